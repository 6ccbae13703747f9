"""Casts and copies of low precisions: bytes against a linear layer written out by hand."""

from dataclasses import replace

import pytest
from build import attentions, collectives, memory_terms, number, plan_of, sent_bytes
from worlds import llama

from axonn_tune.errors import InputError
from axonn_tune.spec.engine import Engine, MemoryForm
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Gemm, MemoryBound
from axonn_tune.spec.precision import FORMATS, PRECISIONS, RECIPES
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3

MODEL = llama(
    n_layers=4, hidden_size=1024, n_heads=8, vocab_size=4096, seq_len=2048, ffn_hidden_size=4096
)
JOB = Job(n_gpus=8, global_batch=8, seq_len=2048)
TOKENS = 2048
LOW = sorted(RECIPES)


def in_precision(precision, **facts):
    return replace(JOB, precision=precision, **facts)


def operations(strategy, job, **sizes):
    return plan_of(strategy, MODEL, job, **sizes).operations


def bytes_of(strategy, job, name, **sizes):
    """The bytes of all casts of one name in a single pass; 0 where there is no such operation."""
    found = {
        op.name: number(op.nbytes)
        for op in operations(strategy, job, **sizes)
        if isinstance(op, MemoryBound) and op.kernel == "cast"
    }
    return found.get(name, 0.0)


@pytest.mark.parametrize("strategy", [Megatron3D(), zero3()], ids=["megatron", "zero3"])
def test_without_a_recipe_nothing_is_cast(strategy):
    sizes = {"data": 8} if strategy.name == "megatron" else {"shard": 8}
    for op in operations(strategy, JOB, **sizes):
        assert getattr(op, "kernel", "") != "cast"
        assert getattr(op, "number_format", "") == ""


@pytest.mark.parametrize("precision", LOW)
def test_products_of_blocks_are_low_and_the_heads_are_not(precision):
    products = [
        op for op in operations(Megatron3D(), in_precision(precision), data=8) if type(op) is Gemm
    ]
    low = {op.name.split(".")[1] for op in products if op.number_format}
    high = {op.name.split(".")[1] for op in products if not op.number_format}
    assert (low, high) == ({"qkv", "proj", "up", "down"}, {"head"})
    assert {op.number_format for op in products} == {"", RECIPES[precision].number_format}


# Bytes of each element of a cast, by hand: reads of bf16, then what is written. Each operand needs
# rows for one product and columns for another (Transformer Engine, performance_considerations.rst,
# table 2). The gradient of an output is cast from scratch; the MLP's inner features are, too.
BY_HAND = {
    ("fp8-delayed", True): 2 + 1 + 1,
    ("fp8-delayed", False): 2 + 1,
    ("fp8-current", True): 2 * 2 + 1 + 1,
    ("fp8-current", False): 2 * 2 + 1,
    ("fp8-block", True): 2 + 2 * (1 + 4 / 128),
    ("mxfp8", False): 2 + 2 * (1 + 1 / 32),
    ("nvfp4", False): 2 * 2 + 2 * (1 / 2 + 1 / 16),
}


@pytest.mark.parametrize(("precision", "transposes"), BY_HAND)
def test_a_cast_reads_and_writes_what_its_recipe_says(precision, transposes):
    job = in_precision(precision, transposes_operands=transposes)
    inner = TOKENS * 4096
    expected = BY_HAND[precision, transposes] * inner
    assert bytes_of(Megatron3D(), job, "forward.down.cast", data=8) == expected
    gated = 2 * expected
    assert bytes_of(Megatron3D(), job, "backward.up.cast", data=8) == gated


def test_a_norm_may_have_read_its_output():
    width = TOKENS * 1024
    current = in_precision("fp8-current")
    assert bytes_of(Megatron3D(), current, "forward.qkv.cast", data=8) == (2 + 1) * width
    # With delayed scales the norm writes 8 bits itself; only a transposed copy may be left.
    delayed = in_precision("fp8-delayed")
    assert bytes_of(Megatron3D(), delayed, "forward.qkv.cast", data=8) == 0
    on_hopper = replace(delayed, transposes_operands=True)
    assert bytes_of(Megatron3D(), on_hopper, "forward.qkv.cast", data=8) == 2 * width


PREPARING = Megatron3D(engine=Engine(megatron=MegatronProgram(casts_in_activations=True)))


@pytest.mark.parametrize(
    ("precision", "transposes", "by_hand"),
    [
        ("fp8-current", True, 2 + 1 + 1),
        ("fp8-current", False, 2 + 1),
        ("fp8-delayed", True, 2),
        ("fp8-delayed", False, 0),
    ],
)
def test_an_activation_may_prepare_the_casts_of_what_it_forms(precision, transposes, by_hand):
    """It finds the largest value as a norm does, or writes 8 bits, whose copy is transposed."""
    job = in_precision(precision, transposes_operands=transposes)
    inner = TOKENS * 4096
    assert bytes_of(PREPARING, job, "forward.down.cast", data=8) == by_hand * inner
    assert bytes_of(PREPARING, job, "backward.up.cast", data=8) == 2 * by_hand * inner


def test_an_activation_prepares_no_other_cast():
    job = in_precision("fp8-current")
    for name in ("forward.proj.cast", "backward.down.cast", "backward.qkv.cast"):
        assert bytes_of(PREPARING, job, name, data=8) == bytes_of(Megatron3D(), job, name, data=8)


LOW_HEAD = Megatron3D(engine=Engine(megatron=MegatronProgram(low_head=True)))


def test_an_engine_may_run_the_heads_products_in_the_recipes_format():
    """Its input and the gradient of the logits are cast, along rows and along columns."""
    job = in_precision("mxfp8")
    sizes = {"tensor": 2, "data": 4}
    formats = {
        op.name: op.number_format
        for op in operations(LOW_HEAD, job, **sizes)
        if type(op) is Gemm and ".head." in op.name
    }
    assert list(formats.values()) == ["mxfp8"] * 3
    element = FORMATS["mxfp8"].nbytes
    logits = TOKENS * 4096 / 2
    assert bytes_of(LOW_HEAD, job, "backward.head.cast", **sizes) == (2 + 2 * element) * logits
    gathered, in_bf16 = (
        {
            number(op.nbytes)
            for op in operations(strategy, job, **sizes)
            if op.name == "forward.head.all_gather"
        }
        for strategy in (LOW_HEAD, Megatron3D())
    )
    assert gathered == {TOKENS * 1024 * element} and in_bf16 == {TOKENS * 1024 * 2}


def test_a_head_of_low_products_needs_a_recipe():
    found, usual = (
        list(operations(strategy, JOB, data=8)) for strategy in (LOW_HEAD, Megatron3D())
    )
    assert [op.name for op in found] == [op.name for op in usual]
    assert {getattr(op, "number_format", "") for op in found} == {""}


LOW_ATTENTION = Megatron3D(
    engine=Engine(megatron=MegatronProgram(low_attention=True)), context_kind="ulysses"
)


@pytest.mark.parametrize(("precision", "reads"), [("fp8-delayed", 1), ("fp8-current", 2)])
def test_attention_in_8_bits_has_casts_around_it(precision, reads):
    """Queries, keys and values are as wide as the model here, and so is what attention forms."""
    job = in_precision(precision)
    width = TOKENS * 1024
    found = {
        name: bytes_of(LOW_ATTENTION, job, name, data=8)
        for chain in ("forward", "backward")
        for name in (f"{chain}.attention.cast", f"{chain}.attention.convert")
    }
    # With known scales attention writes 8 bits, which are converted to 16.
    is_written_low = precision == "fp8-delayed"
    assert found == {
        "forward.attention.cast": (2 * reads + 1) * 3 * width,
        "forward.attention.convert": (1 + 2) * width * is_written_low,
        "backward.attention.cast": (2 * reads + 1) * width,
        "backward.attention.convert": (1 + 2) * 3 * width * is_written_low,
    }


def test_attention_in_8_bits_exchanges_half_the_bytes():
    job, sizes = in_precision("fp8-delayed"), {"context": 4, "data": 2}
    usual = Megatron3D(context_kind="ulysses")
    for chain in ("forward", "backward"):
        sent, sent_low = (
            sent_bytes(plan_of(strategy, MODEL, job, **sizes), chain, "context")
            for strategy in (usual, LOW_ATTENTION)
        )
        assert sent_low == sent / 2


def test_attention_in_8_bits_needs_a_recipe():
    sizes = {"context": 4, "data": 2}
    found, usual = (
        plan_of(strategy, MODEL, JOB, **sizes)
        for strategy in (LOW_ATTENTION, Megatron3D(context_kind="ulysses"))
    )
    assert [op.name for op in found.operations] == [op.name for op in usual.operations]
    assert {op.number_format for op in attentions(found, "forward")} == {""}
    low = plan_of(LOW_ATTENTION, MODEL, in_precision("fp8-delayed"), **sizes)
    assert {op.number_format for op in attentions(low, "forward")} == {"fp8"}


def test_what_is_gathered_is_cast_before_and_transposed_after():
    job = in_precision("fp8-current", transposes_operands=True)
    sizes = {"tensor": 4, "data": 2}
    width = TOKENS * 1024
    assert bytes_of(Megatron3D(), job, "forward.up.cast", **sizes) == (2 + 1) * width / 4
    assert bytes_of(Megatron3D(), job, "backward.up.transposed", **sizes) == 2 * width
    gathered = {
        op.name: number(op.nbytes)
        for op in operations(Megatron3D(), job, **sizes)
        if op.name.endswith(".all_gather")
    }
    assert gathered["forward.up.all_gather"] == width
    assert gathered["backward.down.all_gather"] == width
    assert gathered["forward.head.all_gather"] == 2 * width


@pytest.mark.parametrize("precision", LOW)
def test_ranks_agree_on_the_scale_of_a_whole_tensor_that_they_gather(precision):
    """Inputs of layers that split columns, and gradients of those that split rows."""

    def agreed(strategy, **sizes):
        plan = plan_of(strategy, MODEL, in_precision(precision), **sizes)
        found = [op for op in plan.operations if op.name.endswith(".cast.all_reduce")]
        assert {(op.kind, op.axis, number(op.nbytes)) for op in found} <= {
            ("all_reduce", "tensor", 4.0)
        }
        return {op.name.removesuffix(".cast.all_reduce") for op in found}

    has_one_scale = precision in ("fp8-current", "nvfp4")
    gathered = {"forward.qkv", "forward.up", "backward.proj", "backward.down"}
    assert agreed(Megatron3D(), tensor=4, data=2) == (gathered if has_one_scale else set())
    assert agreed(Megatron3D(sequence_parallel=False), tensor=4, data=2) == set()
    assert agreed(zero3(), shard=8) == set()


def test_a_cast_waits_for_the_scale_on_which_ranks_agree():
    plan = plan_of(Megatron3D(), MODEL, in_precision("fp8-current"), tensor=4, data=2)
    casts = {op.name: op for op in plan.operations if op.name.endswith("cast")}
    for name in ("forward.up.cast", "backward.down.cast"):
        assert f"{name}.all_reduce" in casts[name].waits_for


def test_attention_saves_its_output_uncast_for_the_product_behind_it():
    width = TOKENS * 1024
    current = in_precision("fp8-current")
    again = bytes_of(Megatron3D(), current, "backward.proj.cast_again", data=8)
    assert again == (2 * 2 + 1) * width
    delayed = in_precision("fp8-delayed")
    assert bytes_of(Megatron3D(), delayed, "backward.proj.cast_again", data=8) == 0


def matrices():
    return 4 * MODEL.block_matmul_parameters


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("transposes", [True, False])
def test_weights_have_copies_for_each_side(precision, transposes):
    job = in_precision(precision, transposes_operands=transposes)
    recipe = RECIPES[precision]
    n_copies = 2 if recipe.quantises_columns or transposes else 1
    copies = n_copies * FORMATS[recipe.number_format].nbytes * matrices()
    usual = memory_terms(Megatron3D(), MODEL, JOB, data=8)["weights"]
    kept = memory_terms(Megatron3D(), MODEL, job, data=8)["weights"]
    only_low = memory_terms(Megatron3D(low_weights=True), MODEL, job, data=8)["weights"]
    assert kept == pytest.approx(usual + copies)
    assert only_low == pytest.approx(usual - 2 * matrices() + copies)


def test_saved_inputs_of_products_are_cast():
    """The norms' outputs and the MLP's inner features take half; attention's output is not cast."""
    usual = memory_terms(Megatron3D(), MODEL, JOB, data=8)["activations"]
    low = memory_terms(Megatron3D(), MODEL, in_precision("fp8-current"), data=8)["activations"]
    saved = TOKENS * (2 * 1024 + 4096)  # a byte less for each element
    assert usual - low == pytest.approx(4 * saved)
    delayed = memory_terms(Megatron3D(), MODEL, in_precision("fp8-delayed"), data=8)["activations"]
    assert delayed - low == pytest.approx(4 * TOKENS * 1024)  # proj saves its cast, too


def gathered_weights(strategy, job):
    plan = plan_of(strategy, MODEL, job, data=8)
    parts = (plan.sync_microstep or plan.microstep, plan.step_end)
    return sum(
        number(op.nbytes)
        for op in collectives(plan, *parts)
        if op.name.startswith("weights.") and op.name.endswith("all_gather")
    )


def test_weights_are_gathered_in_8_bits_if_they_are_stored_so():
    job = in_precision("fp8-delayed")
    assert gathered_weights(Megatron3D(), job) == gathered_weights(Megatron3D(), JOB)
    saved = gathered_weights(Megatron3D(), JOB) - gathered_weights(
        Megatron3D(low_weights=True), job
    )
    assert saved > 0
    one_by_one = Megatron3D(low_weights=True, overlap_grad_reduce=False)
    at_once = gathered_weights(replace(one_by_one, low_weights=False), job) - gathered_weights(
        one_by_one, job
    )
    assert at_once == pytest.approx(matrices())
    without_recipe = gathered_weights(Megatron3D(low_weights=True), JOB)
    assert without_recipe == gathered_weights(Megatron3D(), JOB)


@pytest.mark.parametrize("overlaps", [True, False])
def test_both_copies_of_mxfp8_are_cast_from_what_is_gathered(overlaps):
    job = in_precision("mxfp8")
    usual = Megatron3D(overlap_grad_reduce=overlaps)
    low = replace(usual, low_weights=True)
    assert gathered_weights(low, job) == gathered_weights(usual, JOB)
    casts = [
        [number(op.nbytes) for op in operations(each, job, data=8) if op.name == "weights.cast"]
        for each in (usual, low)
    ]
    assert casts[0] == casts[1] and sum(casts[1]) > 2 * matrices()


def test_an_engine_may_save_inputs_uncast_and_cast_them_again():
    """Then casts along rows and columns are two kernels, and activations take what they took."""
    engine = Engine("e", "E", ("zero3",), memory=MemoryForm(saves_uncast=True))
    job = in_precision("fp8-current", transposes_operands=True)
    inner = TOKENS * 4096
    for name in ("forward.down.cast", "backward.down.cast_again"):
        assert bytes_of(zero3(engine), job, name, shard=8) == (2 * 2 + 1) * inner
    assert bytes_of(zero3(), job, "forward.down.cast", shard=8) == (2 * 2 + 2) * inner
    usual = memory_terms(zero3(engine), MODEL, JOB, shard=8)["activations"]
    assert memory_terms(zero3(engine), MODEL, job, shard=8)["activations"] == usual


def test_gathered_weights_are_cast_whenever_they_are_used():
    current = in_precision("fp8-current")
    cast = bytes_of(zero3(), current, "forward.down.cast_weight", shard=8)
    assert cast == (2 * 2 + 1) * 1024 * 4096
    kept = bytes_of(Megatron3D(), current, "weights.cast", data=8)
    assert kept == pytest.approx((2 * 2 + 1) * matrices())


@pytest.mark.parametrize(("moments", "saved"), [("bf16", 2 * 2), ("fp8", 2 * 3)])
def test_moments_may_be_smaller(moments, saved):
    strategy = Megatron3D(distributed_optimizer=False)
    usual = memory_terms(strategy, MODEL, JOB, data=8)["optimizer_states"]
    small = memory_terms(strategy, MODEL, replace(JOB, moments=moments), data=8)
    n_parameters = usual / 12
    assert usual - small["optimizer_states"] == pytest.approx(saved * n_parameters)
    with pytest.raises(InputError, match=r"moments is .*; allowed with offload: fp32"):
        replace(JOB, moments=moments, offload="optimizer")


@pytest.mark.parametrize(
    ("precision", "moments", "low_weights", "saved"),
    [
        ("bf16", "bf16", False, 2),
        ("fp8-delayed", "fp8", False, 2),
        ("fp8-delayed", "fp8", True, 0),
        ("fp8-current", "bf16", False, 0),
        ("bf16", "fp32", False, 0),
    ],
)
def test_a_master_weight_may_be_what_the_weight_in_bf16_lacks(
    precision, moments, low_weights, saved
):
    """The bytes that the optimizer reads and writes follow: it then reads the weight as well."""
    job = replace(JOB, precision=precision, moments=moments)

    def found(keeps_remainders):
        engine = Engine(
            "e", "E", ("megatron",), memory=MemoryForm(keeps_remainders=keeps_remainders)
        )
        strategy = Megatron3D(distributed_optimizer=True, low_weights=low_weights, engine=engine)
        states = memory_terms(strategy, MODEL, job, data=8)["optimizer_states"]
        [step] = [op for op in operations(strategy, job, data=8) if op.name == "optimizer.step"]
        return states, number(step.nbytes)

    (usual, usual_traffic), (small, traffic) = found(False), found(True)
    n_owned = usual / Megatron3D().states(job).nbytes
    assert usual - small == pytest.approx(saved * n_owned)
    assert usual_traffic - traffic == pytest.approx((2 * saved - 2 * (saved > 0)) * n_owned)


def test_an_engine_says_which_precisions_it_has():
    engine = Engine("e", "E", ("megatron",), precisions=("bf16", "mxfp8", "fp8-block"))
    assert engine.precision_named("fp8") == "mxfp8"
    assert engine.precision_named("bf16") == "bf16"
    with pytest.raises(InputError, match=r"'nvfp4'; allowed with engine e: bf16, mxfp8, fp8-block"):
        engine.precision_named("nvfp4")
    with pytest.raises(InputError, match=r"'fp8'; allowed with engine w: bf16$"):
        Engine("w", "W", ("zero3",)).precision_named("fp8")
    assert set(PRECISIONS) == {"bf16", *RECIPES}


@pytest.mark.parametrize("n_stages", [1, 4])
def test_the_first_micro_batch_waits_for_the_casts_of_all_stages(n_stages):
    """Each stage casts its weights when the first micro-batch arrives."""
    current = in_precision("fp8-current")
    sizes = {"data": 8 // n_stages, "pipeline": n_stages}
    bytes_by_name = {
        op.name: number(op.nbytes)
        for op in operations(Megatron3D(), current, **sizes)
        if op.name.startswith("weights.cast")
    }
    of_own = bytes_by_name["weights.cast"]
    elsewhere = bytes_by_name.get("weights.cast.of_other_stages", 0.0)
    assert of_own > 0
    assert elsewhere == pytest.approx((n_stages - 1) * of_own)
