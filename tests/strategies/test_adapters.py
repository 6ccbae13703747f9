"""Adapters beside frozen weights against autograd, and against lists written out by hand."""

from dataclasses import replace

import pytest
import torch
from build import collectives, memory_terms, number, operations, plan_of
from torch.utils.flop_counter import FlopCounterMode
from worlds import llama

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.engine import Engine, MemoryForm
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Attention, Collective, Gemm, MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.tuning import TARGETS, Adapters
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

LAYERS, HIDDEN, FFN, HEADS, SEQ, RANK = 4, 256, 704, 8, 128, 16
MODEL = llama(
    n_layers=LAYERS,
    hidden_size=HIDDEN,
    n_heads=HEADS,
    n_kv_heads=4,
    ffn_hidden_size=FFN,
    vocab_size=4096,
    seq_len=SEQ,
)
SIDES = {"qkv": (HIDDEN, 2 * HIDDEN), "proj": (HIDDEN, HIDDEN)}
SIDES |= {"up": (HIDDEN, 2 * FFN), "down": (FFN, HIDDEN)}
ALL = Job(n_gpus=8, global_batch=8, seq_len=SEQ)
LORA = replace(ALL, adapters=Adapters(RANK))
STRATEGY = Megatron3D()
EVERY_TARGET = pytest.mark.parametrize("target", list(TARGETS))


def fine_tuning(*targets, dropout=False):
    return replace(ALL, adapters=Adapters(RANK, targets, dropout))


def microstep(job, **sizes):
    """The operations of a micro-step, by phase in order."""
    return operations(plan_of(STRATEGY, MODEL, job, **sizes).microstep)


def adapter_elements(targets):
    layers = {layer for target in targets for layer in TARGETS[target]}
    return LAYERS * sum(RANK * sum(SIDES[layer]) for layer in layers)


# Autograd ----------------------------------------------------------------------------------------


def traced(layer, has_adapter):
    """FLOPs of a layer with a frozen weight in torch, and the bytes that autograd saves of it."""
    k, n = SIDES[layer]
    x = torch.ones(SEQ, k, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(k, n, dtype=torch.bfloat16)
    a = torch.ones(k, RANK, dtype=torch.bfloat16, requires_grad=True)
    b = torch.ones(RANK, n, dtype=torch.bfloat16, requires_grad=True)
    parameters = {each.data_ptr() for each in (weight, a, b)}
    saved = {}

    def save(tensor):
        if tensor.data_ptr() not in parameters:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        y = x @ weight + ((x @ a) @ b) * 2.0 if has_adapter else x @ weight
        y.backward(torch.ones_like(y))
    return counter.get_total_flops(), sum(saved.values())


@pytest.mark.parametrize("layer", list(SIDES))
@pytest.mark.parametrize("has_adapter", [True, False])
def test_products_of_a_layer_are_those_of_autograd(layer, has_adapter):
    other = "up" if layer == "qkv" else "qkv"
    job = fine_tuning(layer if has_adapter else other)
    planned = sum(
        number(op.flops)
        for op in microstep(job, data=8)
        if isinstance(op, Gemm) and op.name.split(".")[1] == layer
    )
    assert planned == LAYERS * traced(layer, has_adapter)[0]


@pytest.mark.parametrize("layer", list(SIDES))
def test_an_adapter_saves_what_autograd_saves(layer):
    """Beside frozen weights only adapters save inputs; attention saves that of proj in any case."""
    assert traced(layer, has_adapter=False)[1] == 0
    other = "proj" if layer != "proj" else "qkv"
    with_one = memory_terms(STRATEGY, MODEL, fine_tuning(other), data=8)["activations"]
    with_two = memory_terms(STRATEGY, MODEL, fine_tuning(other, layer), data=8)["activations"]
    saved = traced(layer, has_adapter=True)[1] - (2 * SEQ * HIDDEN if layer == "proj" else 0)
    assert with_two - with_one == LAYERS * saved


# What is trained, and what is not ----------------------------------------------------------------


def test_a_third_of_the_work_of_frozen_weights_is_left_out():
    tokens = ALL.tokens
    attention = 3 * 4 * tokens * SEQ * HIDDEN * LAYERS
    weights = LAYERS * sum(k * n for k, n in SIDES.values()) + 4096 * HIDDEN
    assert MODEL.model_flops(tokens, SEQ) == 6 * tokens * weights + attention
    adapters = 6 * tokens * adapter_elements(["attention", "mlp"])
    frozen = MODEL.model_flops(tokens, SEQ, LORA.adapters)
    assert frozen == 4 * tokens * weights + attention + adapters
    again = MODEL.hardware_flops(tokens, SEQ, "full", adapters=LORA.adapters) - frozen
    assert again == 2 * tokens * (weights - 4096 * HIDDEN) + (attention + adapters) / 3


@EVERY_TARGET
def test_the_plan_has_the_flops_of_the_model(target):
    job = fine_tuning(target)
    planned = sum(
        number(op.flops) for op in microstep(job, data=8) if isinstance(op, Gemm | Attention)
    )
    assert planned == pytest.approx(MODEL.model_flops(SEQ, SEQ, job.adapters), rel=1e-12)


@EVERY_TARGET
@pytest.mark.parametrize("sizes", [{"tensor": 4, "data": 2}, {"context": 2, "data": 4}])
def test_ranks_share_the_work_of_adapters(target, sizes):
    job = fine_tuning(target)

    def flops(**layout):
        products = [op for op in microstep(job, **layout) if isinstance(op, Gemm)]
        return sum(number(op.flops) for op in products)

    n_ranks = sizes.get("tensor", 1) * sizes.get("context", 1)
    assert n_ranks * flops(**sizes) == flops(data=8)


@EVERY_TARGET
def test_only_adapters_have_gradients(target):
    names = [op.name for op in microstep(fine_tuning(target), tensor=2, data=4)]
    of_weights = {name.split(".")[1] for name in names if name.endswith("gemm_weight")}
    assert of_weights == set(TARGETS[target])
    assert all(".adapter_" in name for name in names if name.endswith("gemm_weight"))
    assert "backward.embedding.scatter_add" not in names


def test_the_forward_pass_is_that_of_pre_training_beside_the_adapters():
    def forward(job):
        return [
            (op.name, number(getattr(op, "nbytes", 0.0)))
            for op in microstep(job, tensor=2, data=4)
            if not op.name.startswith(("backward", "gradient")) and ".adapter_" not in op.name
        ]

    assert forward(LORA) == forward(ALL)


def test_only_gradients_of_adapters_are_reduced_and_only_they_are_gathered():
    plan = plan_of(STRATEGY, MODEL, LORA, tensor=2, data=4)
    over_replicas = {
        op.name: number(op.nbytes)
        for op in plan.operations
        if isinstance(op, Collective) and op.axis == "context*data"
    }
    elements = adapter_elements(["attention", "mlp"]) / 2
    norm_bytes = over_replicas.pop("gradient.norm.all_reduce_context*data")
    assert norm_bytes == 4
    assert over_replicas == {"gradient.reduce": 4 * elements, "weights.all_gather": 2 * elements}
    assert "gradient.norms.all_reduce" not in [op.name for op in plan.operations]


# Memory by hand ----------------------------------------------------------------------------------


def test_memory_of_weights_gradients_and_states_by_hand():
    tensor, data = 2, 4
    terms = memory_terms(STRATEGY, MODEL, fine_tuning("attention"), tensor=tensor, data=data)
    matrices = LAYERS * sum(k * n for k, n in SIDES.values()) + 2 * 4096 * HIDDEN
    norms = (2 * LAYERS + 1) * HIDDEN
    adapters = adapter_elements(["attention"]) / tensor
    assert terms["weights"] == 2 * (matrices / tensor + norms + adapters)
    assert terms["gradients"] == 4 * adapters
    assert terms["optimizer_states"] == 12 * adapters / data


def test_saved_activations_by_hand():
    """A block saves inputs of both norms, q, k, v, attention's output, and the MLP before its gate.

    The adapter beside qkv saves the tokens of both ranks, which sequence parallelism splits, and
    with dropout a mask of a byte; each adapter saves its hidden features.
    """
    tensor = 2
    terms = memory_terms(STRATEGY, MODEL, fine_tuning("qkv"), tensor=tensor, data=4)
    split = 2 * HIDDEN + 2 * HIDDEN + HIDDEN + 2 * FFN
    saved = 2 * SEQ * (split / tensor + HIDDEN + RANK)
    assert terms["activations"] == LAYERS * saved
    dropped = memory_terms(STRATEGY, MODEL, fine_tuning("qkv", dropout=True), tensor=tensor, data=4)
    assert dropped["activations"] == LAYERS * (saved + SEQ * HIDDEN)


@pytest.mark.parametrize(
    ("precision", "dropout", "tensor", "fuses", "element_bytes"),
    [
        ("bf16", False, 1, False, 0),  # the tensor that the adapter saves
        ("bf16", True, 1, False, 2),
        ("bf16", False, 2, False, 2),
        ("fp8-current", False, 1, False, 1),
        ("fp8-current", False, 2, False, 1),
        ("fp8-current", True, 1, True, 0),
        ("fp8-current", True, 2, True, 1),  # nothing is fused with a tensor group
    ],
)
def test_a_layer_with_a_norm_may_save_what_only_its_frozen_weight_reads(
    precision, dropout, tensor, fuses, element_bytes
):
    job = replace(fine_tuning("qkv", dropout=dropout), precision=precision)
    program = MegatronProgram(fuses_adapters=fuses)

    def saved(**form):
        engine = Engine(megatron=program, memory=MemoryForm(**form))
        strategy = replace(STRATEGY, engine=engine)
        terms = memory_terms(strategy, MODEL, job, tensor=tensor, data=8 // tensor)
        return terms["activations"]

    more = saved(saves_frozen_inputs=True) - saved()
    assert more == LAYERS * element_bytes * SEQ * HIDDEN / tensor


def test_recomputation_of_whole_blocks_saves_their_inputs_only():
    terms = memory_terms(STRATEGY, MODEL, LORA, recompute="full", data=8)
    usual = memory_terms(STRATEGY, MODEL, ALL, recompute="full", data=8)
    assert terms["activations"] == usual["activations"]


@pytest.mark.parametrize(("tensor", "is_fused"), [(1, True), (2, False)])
def test_products_of_a_fusing_engine_scale_and_add_without_a_tensor_group(tensor, is_fused):
    """They read the output, or the gradient, to which they add; other kernels write it, too."""
    strategy = replace(STRATEGY, engine=Engine(megatron=MegatronProgram(fuses_adapters=True)))

    def moved_bytes(of_strategy, kind):
        plan = plan_of(of_strategy, MODEL, fine_tuning("qkv"), tensor=tensor, data=8 // tensor)
        found = [op for op in operations(plan.microstep) if op.name.endswith(kind)]
        assert len(found) == 2 * LAYERS
        return [number(op.nbytes) for op in found]

    for kind, n_passes, of_fused in (("adapter_sum", 3, 1), ("scale", 2, 0)):
        usual = moved_bytes(STRATEGY, kind)
        expected = [nbytes * of_fused / n_passes for nbytes in usual] if is_fused else usual
        assert moved_bytes(strategy, kind) == pytest.approx(expected)


# Messages of the tensor group --------------------------------------------------------------------


def messages(layer, exchanges=False, **options):
    """The messages of one adapter, with their bytes, in order."""
    strategy = replace(STRATEGY, exchanges_adapters=exchanges, **options)
    plan = plan_of(strategy, MODEL, fine_tuning(layer), tensor=4, data=2)
    found = [op for op in collectives(plan, plan.microstep) if ".adapter_" in op.name]
    return [(op.kind, number(op.nbytes)) for op in found]


HIDDEN_BYTES = 2 * SEQ * RANK
STREAM_BYTES = 2 * SEQ * HIDDEN


def test_layers_that_split_columns_bring_hidden_features_together():
    expected = [("all_gather", HIDDEN_BYTES)] * LAYERS + [("all_reduce", HIDDEN_BYTES)] * LAYERS
    assert messages("qkv") == messages("up") == expected


@pytest.mark.parametrize("exchanges", [True, False])
def test_layers_that_split_rows_sum_hidden_features_and_bring_columns_together(exchanges):
    columns = ("all_to_all", STREAM_BYTES / 4) if exchanges else ("all_gather", STREAM_BYTES)
    hidden = ("all_reduce", HIDDEN_BYTES)
    expected = [hidden, columns] * LAYERS + [columns, hidden] * LAYERS
    assert messages("proj", exchanges) == messages("down", exchanges) == expected


def test_without_sequence_parallelism_gradients_are_where_they_are_needed():
    hidden, columns = ("all_reduce", HIDDEN_BYTES), ("all_gather", STREAM_BYTES)
    expected = [hidden, columns] * LAYERS + [hidden] * LAYERS
    assert messages("proj", sequence_parallel=False) == expected


# Packed samples, and low precisions --------------------------------------------------------------


def test_tokens_attend_to_their_own_sample():
    def attention(job, **sizes):
        found = [op for op in microstep(job, **sizes) if isinstance(op, Attention)]
        return sum(number(op.flops) for op in found)

    packed = replace(ALL, samples_per_sequence=4.0)
    for sizes in ({"data": 8}, {"context": 2, "data": 4}):
        assert attention(packed, **sizes) == pytest.approx(attention(ALL, **sizes) / 4)
    assert packed.sample_len == SEQ / 4


@pytest.mark.parametrize("transposes", [True, False])
def test_frozen_weights_of_low_products_are_cast_once_and_transposed_each_time(transposes):
    job = replace(LORA, precision="fp8-current", transposes_operands=transposes)
    plan = plan_of(STRATEGY, MODEL, job, data=8)
    casts = {
        op.name: number(op.nbytes)
        for op in plan.operations
        if isinstance(op, MemoryBound) and op.kernel == "cast"
    }
    assert "weights.cast" not in casts
    assert casts["forward.down.cast"] == (2 * 2 + 1) * SEQ * FFN  # two reads, and one copy
    assert casts["backward.down.cast"] == (2 * 2 + 1) * SEQ * HIDDEN
    transposed = {name: size for name, size in casts.items() if name.endswith(".transposed")}
    weights = {f"backward.{layer}.transposed": 2 * k * n for layer, (k, n) in SIDES.items()}
    assert transposed == (weights if transposes else {})
    low = memory_terms(replace(STRATEGY, low_weights=True), MODEL, job, data=8)["weights"]
    usual = memory_terms(STRATEGY, MODEL, LORA, data=8)["weights"]
    assert usual - low == LAYERS * sum(k * n for k, n in SIDES.values())


def low_casts(strategy, job, **sizes):
    """The bytes of each cast of a micro-step by name, and of each gather over the tensor group."""
    plan = plan_of(strategy, MODEL, job, **sizes)
    ops = operations(plan.microstep)
    casts = {op.name: number(op.nbytes) for op in ops if getattr(op, "kernel", "") == "cast"}
    gathers = {op.name: number(op.nbytes) for op in collectives(plan, plan.microstep)}
    return casts, gathers


SEQUENCE = replace(
    STRATEGY,
    engine=Engine(megatron=MegatronProgram(fuses_adapters=True, casts_in_activations=True)),
)


@pytest.mark.parametrize(
    ("precision", "reads", "prepared"), [("fp8-delayed", 1, 0), ("fp8-current", 2, 1)]
)
def test_a_norm_prepares_no_cast_of_an_output_that_an_adapter_reads(precision, reads, prepared):
    """Unless a sequence of operations lets the adapter read the cast."""
    job = replace(fine_tuning("qkv"), precision=precision)
    width = SEQ * HIDDEN

    def expected(n_reads):
        return (2 * n_reads + 1) * width if n_reads else 0.0

    apart, _ = low_casts(STRATEGY, job, data=8)
    assert apart["forward.qkv.cast"] == expected(reads)
    assert apart.get("forward.up.cast", 0.0) == expected(prepared)
    in_sequence, _ = low_casts(SEQUENCE, job, data=8)
    assert in_sequence.get("forward.qkv.cast", 0.0) == expected(prepared)
    split, _ = low_casts(SEQUENCE, job, tensor=2, data=4)  # nothing is fused with a tensor group
    assert split["forward.qkv.cast"] == expected(reads)


@pytest.mark.parametrize("overlaps", [True, False])
def test_what_an_adapter_reads_is_gathered_uncast_and_cast_whole(overlaps):
    strategy = replace(STRATEGY, overlaps_tensor=overlaps)
    job = replace(fine_tuning("qkv", "proj"), precision="fp8-current")
    casts, gathers = low_casts(strategy, job, tensor=4, data=2)
    width = SEQ * HIDDEN
    assert gathers["forward.qkv.all_gather"] == 2 * width
    assert gathers["forward.up.all_gather"] == width  # no adapter reads it
    assert gathers["backward.proj.all_gather"] == width
    assert casts["forward.qkv.cast"] == (2 * 2 + 1) * width
    assert casts["forward.up.cast"] == (2 + 1) * width / 4
    plan = plan_of(strategy, MODEL, job, tensor=4, data=2)
    [forward] = [phase for phase in plan.microstep.phases if phase.name == "forward"]
    names = [op.name for op in forward.operations]
    before = ["forward.qkv.all_gather", "forward.qkv.cast", "forward.qkv.gemm"]
    assert [names.index(name) for name in before] == sorted(names.index(name) for name in before)
    [cast] = [op for op in forward.operations if op.name == "forward.qkv.cast"]
    assert "forward.qkv.all_gather" in cast.waits_for


@pytest.mark.parametrize(
    ("precision", "transposes", "rows", "columns"),
    [
        ("fp8-current", False, 2 * 2 + 1, 0),  # the product reads the rows along columns
        ("fp8-current", True, 2 * 2 + 1, 1),
        ("mxfp8", False, 2 + 33 / 32, 33 / 32),
    ],
)
def test_layers_with_a_norm_cast_gradients_for_a_dw_that_is_never_formed(
    precision, transposes, rows, columns
):
    """In a sequence of operations nothing is cast for it."""
    job = replace(fine_tuning("qkv"), precision=precision, transposes_operands=transposes)
    usual, _ = low_casts(STRATEGY, job, data=8)
    in_sequence, _ = low_casts(SEQUENCE, job, data=8)
    widths = {"qkv": 2 * HIDDEN, "proj": HIDDEN, "down": HIDDEN}
    for layer, n in widths.items():
        name = f"backward.{layer}.cast"
        assert in_sequence[name] == rows * SEQ * n
        assert usual[name] == (rows + columns * (layer == "qkv")) * SEQ * n
    prepared = rows - 2 * (precision == "fp8-current")  # the activation's kernel has read once
    assert in_sequence["backward.up.cast"] == prepared * SEQ * 2 * FFN
    assert usual["backward.up.cast"] == (rows + columns) * SEQ * 2 * FFN


def test_products_of_adapters_keep_the_jobs_type():
    job = replace(LORA, precision="fp8-delayed")
    formats = {
        op.number_format
        for op in microstep(job, data=8)
        if isinstance(op, Gemm) and ".adapter_" in op.name
    }
    assert formats == {""}


# What cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "culprit"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 8, "targets": ()}, "targets is empty"),
        ({"rank": 8, "targets": ("head",)}, "targets is 'head'"),
    ],
)
def test_impossible_adapters_are_refused(wrong, culprit):
    with pytest.raises(InputError, match=culprit):
        Adapters(**wrong)


@pytest.mark.parametrize("n_samples", [0.5, SEQ + 1, float("nan")])
def test_impossible_samples_are_refused(n_samples):
    with pytest.raises(InputError, match="samples_per_sequence"):
        replace(ALL, samples_per_sequence=n_samples)


def test_packed_samples_need_fused_attention():
    with pytest.raises(InputError, match="unfused"):
        replace(ALL, attention="unfused", samples_per_sequence=2.0)


def test_a_first_stage_that_trains_nothing_has_a_time():
    """It holds a frozen embedding and no layer."""
    search = build_search("llama3-8b", 34, "dgx-h100", strategy="megatron", lora_rank=16)
    assert best_of_layout(search, "pipeline=34").step_seconds > 0
