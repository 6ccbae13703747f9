"""Megatron-FSDP's messages, kernels and memory against counts that follow its code line by line.

The code is that of Megatron-LM at d98e8a64, megatron/core/distributed/fsdp/src/megatron_fsdp.
"""

from collections import Counter
from dataclasses import replace

import pytest
from build import layout_of, memory_terms, number, operations, plan_of
from worlds import FFN, HIDDEN, SEQ, VOCAB, machine_of, small_llama, with_host

import axonn_tune
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Collective, HostCopy, MemoryBound
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.zero.zero import zero3

LAYERS, RANKS, MICROSTEPS = 6, 8, 4
MODEL = small_llama(LAYERS)
MATRICES = HIDDEN * 2 * HIDDEN + HIDDEN**2 + 3 * HIDDEN * FFN
VECTORS = 2 * HIDDEN
TABLE = VOCAB * HIDDEN
WEIGHTS = LAYERS * (MATRICES + VECTORS) + 2 * TABLE + HIDDEN
ENGINE = load_engine("megatron-fsdp")
STRATEGY = zero3(ENGINE)
IN_16 = Job(RANKS, MICROSTEPS * RANKS, SEQ)
IN_8 = replace(IN_16, precision="fp8-current")
# A GPU that reads operands of low products along rows only, as Hopper does.
ON_HOPPER = replace(IN_8, transposes_operands=True)
JOBS = pytest.mark.parametrize("job", [IN_16, IN_8], ids=["bf16", "fp8"])


def parts(plan):
    """The micro-step that differs, the usual one, and the end of the step."""
    return plan.sync_microstep, plan.microstep, plan.step_end


def messages(part):
    """How often a part sends a message of some kind and bytes over all ranks."""
    found = [op for op in operations(part) if isinstance(op, Collective) and op.axis == "shard"]
    return Counter((op.kind, number(op.nbytes)) for op in found)


def units(low_element):
    """The bytes of each unit as it is gathered, and as its gradients are reduced.

    _get_parameter_groups puts the 8-bit matrices and the bf16 norms of a TransformerLayer into two
    groups, which one coalesced call carries. What is in no unit has the buckets of the embedding,
    and of the final norm with the head, since the first one fills a bucket by itself.
    """
    layer = low_element * MATRICES + 2.0 * VECTORS, 2.0 * (MATRICES + VECTORS)
    embedding, head = 2.0 * TABLE, 2.0 * (TABLE + HIDDEN)
    return layer, embedding, head


@JOBS
def test_each_layer_is_gathered_twice_and_reduced_once_in_every_micro_step(job):
    """_post_forward releases every unit, the last one, too; _pre_backward_param_unshard gathers."""
    (gathered, reduced), embedding, head = units(job.operand_bytes)
    sync, usual, _ = parts(plan_of(STRATEGY, MODEL, job, shard=RANKS))
    expected = Counter()
    expected["all_gather", gathered] += 2 * LAYERS
    expected["reduce_scatter", reduced] += LAYERS
    expected["reduce_scatter", embedding] += 1
    expected["reduce_scatter", head] += 1
    assert messages(usual) == expected
    # What is in no unit is PRESERVED by AllGatherPipeline.reset once in a step, and gathered then.
    expected["all_gather", embedding + head] += 1
    assert messages(sync) == expected


def test_tied_weights_are_one_bucket():
    tied = replace(MODEL, tied_embeddings=True)
    _, usual, _ = parts(plan_of(STRATEGY, tied, IN_16, shard=RANKS))
    found = messages(usual)
    assert found["reduce_scatter", 2.0 * (TABLE + HIDDEN)] == 1
    assert sum(found.values()) == 3 * LAYERS + 1


def test_the_head_is_reduced_while_the_blocks_compute():
    """Its bucket is full once its gradient is formed (get_ready_bucket_group_for_reduction)."""
    names = [op.name for op in operations(plan_of(STRATEGY, MODEL, IN_16, shard=RANKS).microstep)]
    head, block, embedding = (
        names.index(f"gradient.{unit}.shard.reduce") for unit in ("head", "block", "root")
    )
    assert head < block < embedding


def kernel_bytes(part, ending):
    found = [op for op in operations(part) if isinstance(op, MemoryBound)]
    return sum(number(op.nbytes) for op in found if op.name.endswith(ending))


@JOBS
def test_gathers_are_not_copied_and_gradients_are_copied_and_scaled(job):
    """Weights are views of the buckets; main_grad.copy_ and grad_data.mul_ read and write bf16."""
    _, usual, _ = parts(plan_of(STRATEGY, MODEL, job, shard=RANKS))
    names = {op.name for op in operations(usual)}
    assert not [
        name
        for name in names
        if name.startswith(("forward.block", "backward.block")) and name.endswith(".copy")
    ]
    assert kernel_bytes(usual, ".pack") == pytest.approx(4.0 * WEIGHTS)
    assert kernel_bytes(usual, ".scale") == pytest.approx(4.0 * WEIGHTS)
    # local_grad += reduced_grad: two reads and a write of the shard, in bf16.
    added = {number(op.nbytes) for op in operations(usual) if op.name.endswith("block.accumulate")}
    assert added == {6.0 * (MATRICES + VECTORS) / RANKS}


def test_the_optimizer_has_fp32_gradients_of_its_own():
    """update_main_grads casts to fp32, copy_main_weights_to_model_weights copies back."""
    *_, end = parts(plan_of(STRATEGY, MODEL, IN_16, shard=RANKS))
    found = {op.name: number(op.nbytes) for op in operations(end) if isinstance(op, MemoryBound)}
    assert found["gradient.main"] == pytest.approx(6.0 * WEIGHTS / RANKS)
    assert found["weights.main"] == pytest.approx(6.0 * WEIGHTS / RANKS)


def transposed(job, recompute="none", **facts):
    """The bytes of transposed weights in a usual micro-step."""
    engine = replace(ENGINE, zero=replace(ENGINE.zero, **facts))
    plan = plan_of(zero3(engine), MODEL, job, recompute=recompute, shard=RANKS)
    found = operations(plan.microstep)
    assert not [op for op in found if op.name.endswith(".cast_weight")]
    return kernel_bytes(plan.microstep, ".transposed_weight")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_hopper_transposes_each_weight_in_both_passes_unless_copies_stay(recompute):
    """Each reads and writes a byte of each element, if there is no copy.

    Forward it is Transformer Engine's quantize_weight, whose copy goes with the weight, and
    backward fp8_create_transpose_cache, or quantize_weight when the layer is recomputed.
    """
    assert transposed(ON_HOPPER, recompute) == 2 * 2.0 * LAYERS * MATRICES
    assert transposed(IN_8) == transposed(IN_16) == 0.0
    of_one = transposed(ON_HOPPER, keeps_transposed=True)
    assert MICROSTEPS * of_one == pytest.approx(2.0 * LAYERS * MATRICES)


@JOBS
def test_memory_holds_shards_and_two_units(job):
    terms = memory_terms(STRATEGY, MODEL, job, shard=RANKS)
    (gathered, reduced), embedding, head = units(job.operand_bytes)
    assert terms["weights"] == pytest.approx((LAYERS * gathered + embedding + head) / RANKS)
    assert terms["gradients"] == pytest.approx(2.0 * WEIGHTS / RANKS)
    assert terms["optimizer_states"] == pytest.approx(12.0 * WEIGHTS / RANKS)
    # Whole weights of what is in no unit, and the gradients of one of its two parts at a time.
    whole = 2.0 * gathered + embedding + head + 2.0 * reduced + max(embedding, head)
    assert terms["gathered_weights"] == pytest.approx(whole)


@pytest.mark.parametrize(("keeps", "n_layers"), [(False, 1), (True, LAYERS)])
def test_transposed_copies_of_one_or_of_all_layers_are_held(keeps, n_layers):
    engine = replace(ENGINE, zero=replace(ENGINE.zero, keeps_transposed=keeps))
    on_blackwell, on_hopper = (
        memory_terms(zero3(engine), MODEL, job, shard=RANKS)["gathered_weights"]
        for job in (IN_8, ON_HOPPER)
    )
    assert on_hopper - on_blackwell == pytest.approx(n_layers * MATRICES)


# Activations of whole layers -----------------------------------------------------------------


def saved_by_layer():
    """Bytes that one layer saves, from the memory of a model with a layer more."""
    one, two = (
        memory_terms(STRATEGY, small_llama(n), IN_16, shard=RANKS)["activations"] for n in (1, 2)
    )
    return two - one


@pytest.mark.parametrize("n_offloaded", [1, 3, 5])
def test_as_many_layers_move_as_the_text_says(n_offloaded):
    job = replace(IN_16, offload_modules=f"layers:{n_offloaded}")
    plan = plan_of(STRATEGY, MODEL, job, shard=RANKS)
    for direction in (TO_HOST, FROM_HOST):
        found = [op for op in operations(plan.microstep) if isinstance(op, HostCopy)]
        moved = [number(op.nbytes) for op in found if op.direction == direction]
        assert sum(moved) == pytest.approx(n_offloaded * saved_by_layer())
    before, after = (memory_terms(STRATEGY, MODEL, each, shard=RANKS) for each in (IN_16, job))
    saved = before["activations"] - after["activations"]
    assert saved == pytest.approx(n_offloaded * saved_by_layer())
    assert after["host_activations"] == pytest.approx(n_offloaded * saved_by_layer())


def test_copies_that_a_fast_link_hides_take_no_time():
    # The host would hold up kernels as small as these.
    strategy = zero3(replace(ENGINE, issue_seconds=None))

    def seconds(text):
        job = replace(IN_16, offload_modules=text)
        layout = layout_of(strategy, shard=RANKS)
        scenario = Scenario(MODEL, job, with_host(machine_of(), link=1e15), strategy)
        return predict(scenario, Configuration(layout, "xyzd", 1, "none")).step_seconds

    assert seconds("layers:3") == pytest.approx(seconds(""), rel=0.01)


@pytest.mark.parametrize("text", ["layers:0", "layers:x", "layers:"])
def test_a_number_of_layers_is_positive(text):
    with pytest.raises(InputError, match="allowed: layers:N with N at least 1"):
        replace(IN_16, offload_modules=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_modules": "layers:32"}, "has 32 layers.*at most layers:31"),
        ({"offload_modules": "layers:8", "recompute": "full"}, "allowed with .*layers:N: none"),
        ({"offload_modules": "layers:8", "engine": "fsdp2"}, "keeps activations on the GPU"),
    ],
)
def test_what_cannot_move_is_refused(options, message):
    options = {"engine": "megatron-fsdp", "machine": "dgx-h100", **options}
    with pytest.raises(InputError, match=message):
        build_search("llama3-8b", 8, strategy="zero3", **options)


# Search and launch ---------------------------------------------------------------------------

OPTIONS = {"strategy": "zero3", "engine": "megatron-fsdp", "machine": "dgx-h100"}


def test_the_best_layout_is_found_in_both_precisions():
    seconds = {}
    for precision in ("bf16", "fp8"):
        found = axonn_tune.suggest(
            "llama3-8b", 8, precision=precision, global_batch=128, seq_len=8192, **OPTIONS
        )
        assert found["fits"].iloc[0]
        seconds[precision] = found["step_seconds"].iloc[0]
    assert seconds["fp8"] < 0.8 * seconds["bf16"]


def test_launch_writes_the_flags_of_megatron_fsdp():
    search = build_search(
        "llama3-8b", 16, precision="fp8", global_batch=128, seq_len=8192, micro_batch=1, **OPTIONS
    )
    script = launch_files(best_of_layout(search, "shard=8,replica=2"))["launch.sbatch"]
    for flag in (
        "--use-megatron-fsdp",
        "--data-parallel-sharding-strategy optim_grads_params",
        "--num-distributed-optimizer-instances 2",
        "--fp8-recipe tensorwise",
        "--fp8-param-gather",
        "--no-gradient-accumulation-fusion",
    ):
        assert f"  {flag} \\\n" in script
    # Megatron-LM asserts that it is not 1.
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script
