"""FSDP2 that casts weights of low products before it gathers them, as torchao lets it."""

from dataclasses import replace

import pytest
from build import collectives, memory_terms, number, operations, plan_of
from worlds import llama

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.spec.job import Job
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.switches import Switches

MODEL = llama(
    n_layers=4, hidden_size=256, n_heads=8, n_kv_heads=4, vocab_size=1024, seq_len=64,
    ffn_hidden_size=512,
)  # fmt: skip
JOB = Job(16, 16, 64, precision="fp8-current", transposes_operands=True)
TITAN = load_engine("torchtitan-2025")
LOW, USUAL = (
    strategy_named("zero3", Switches(low_weights=is_low), TITAN) for is_low in (True, False)
)
# Of a block: weights of its products, and of its norms.
MATRICES = 256 * (2 * 256 + 2 * 128 + 3 * 512)
VECTORS = 2 * 256


def kernels(strategy, job=JOB, **sizes):
    plan = plan_of(strategy, MODEL, job, **{"shard": 16, **sizes})
    return {op.name: number(getattr(op, "nbytes", 0.0)) for op in operations(plan.microstep)}


def test_a_block_s_products_are_gathered_in_8_bits_and_the_rest_is_not():
    low, usual = kernels(LOW), kernels(USUAL)
    # The last of four blocks stays gathered until the backward pass.
    for chain, share in (("forward", 1.0), ("backward", 3 / 4)):
        message = f"{chain}.block.all_gather"
        assert usual[message] == share * 2.0 * (MATRICES + VECTORS)
        assert low[message] == share * (MATRICES + 2.0 * VECTORS)
        assert low[f"{chain}.block.copy"] == 2.0 * low[message]
    assert low["forward.root.all_gather"] == usual["forward.root.all_gather"]


def test_a_shard_is_scaled_clamped_and_cast_by_three_kernels():
    """They write fp32 but for the last result; vectors are cast to bf16, and all is copied."""
    cast = MATRICES * (8 + 8 + 5) + VECTORS * 6
    assert kernels(LOW)["forward.block.copy_in"] == (cast + 2 * MATRICES + 4 * VECTORS) / 16


@pytest.mark.parametrize("transposes", [True, False])
def test_what_was_gathered_in_8_bits_is_transposed_for_the_backward_pass_at_most(transposes):
    casts = {
        name: nbytes
        for name, nbytes in kernels(LOW, replace(JOB, transposes_operands=transposes)).items()
        if name.endswith(".transposed_weight")
    }
    assert sum(casts.values()) == transposes * 2.0 * MATRICES
    assert all(name.startswith("backward.") for name in casts)


@pytest.mark.parametrize("sizes", [{"shard": 16}, {"tensor": 4, "shard": 4}], ids=str)
def test_a_step_ends_with_the_scales_of_all_weights(sizes):
    plans = [plan_of(strategy, MODEL, JOB, **sizes) for strategy in (LOW, USUAL)]
    low, usual = ([op.name for op in operations(plan.step_end)] for plan in plans)
    assert low[: len(usual)] == usual
    [found] = [op for op in operations(plans[0].step_end) if op.name == "weights.scales"]
    assert number(found.nbytes) == 4 * MODEL.n_layers * MATRICES / 16
    sums = [op for op in collectives(plans[0], plans[0].step_end) if "scales" in op.name]
    assert {op.axis for op in sums} == set(sizes)
    assert {number(op.nbytes) for op in sums} == {4.0 * 7 * MODEL.n_layers}


def test_gathered_weights_take_half_the_memory():
    low, usual = (
        memory_terms(strategy, MODEL, JOB, shard=16)["gathered_weights"]
        for strategy in (LOW, USUAL)
    )
    # Two blocks at once, and what the stream has received in which gathers run.
    assert usual - low == pytest.approx(3 * MATRICES)


def test_without_low_products_nothing_changes():
    full = replace(JOB, precision="bf16")
    assert kernels(LOW, full) == kernels(USUAL, full)


def test_what_does_not_gather_in_8_bits_says_so():
    switches = Switches(low_weights=True)
    with pytest.raises(InputError, match="engine fsdp2 gathers weights in the job's type"):
        strategy_named("zero3", switches, load_engine("fsdp2"))
    with pytest.raises(InputError, match="a model without experts"):
        strategy_named("zero3", switches, TITAN, has_experts=True)
