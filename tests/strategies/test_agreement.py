"""What replicas of Megatron-LM agree on at the end of a step: the norm, and scales of weights."""

import pytest
from build import collectives, number, plan_of
from worlds import llama

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

MODEL = llama(
    n_layers=4, hidden_size=256, n_heads=8, n_kv_heads=4, vocab_size=1024, seq_len=64,
    ffn_hidden_size=512,
)  # fmt: skip
SCALES = "weights.scales.all_reduce"


def sums_at_end(precision="bf16", sizes=None, **options):
    """The bytes of the all-reduces at the end of a step, by name and axis."""
    strategy = Megatron3D(**options)
    plan = plan_of(strategy, MODEL, Job(8, 8, 64, precision=precision), **(sizes or {"data": 8}))
    return {
        (op.name, op.axis): number(op.nbytes)
        for op in collectives(plan, plan.step_end)
        if op.kind == "all_reduce"
    }


def norm_axes(**options):
    """The axes over which the norm of the gradients is summed."""
    return {axis for name, axis in sums_at_end(**options) if name.startswith("gradient.norm.")}


def test_replicas_that_share_gradients_sum_their_norm():
    sizes = {"tensor": 2, "data": 2, "pipeline": 2}
    replicas = Megatron3D().replicas
    assert norm_axes(sizes=sizes) == {"tensor", "pipeline", replicas}
    assert norm_axes(sizes=sizes, distributed_optimizer=False) == {"tensor", "pipeline"}


def test_replicas_that_have_summed_all_gradients_know_their_norm():
    """They share the states of the optimizer only."""
    engine = Engine(megatron=MegatronProgram(sums_sharded=True))
    assert norm_axes(engine=engine) == set()


@pytest.mark.parametrize("precision", ["fp8-current", "fp8-delayed"])
def test_replicas_agree_on_the_scale_of_each_weight_in_8_bits(precision):
    """Each of them has updated a part of it; a block has weights of qkv, proj, up and down."""
    replicas = Megatron3D().replicas
    assert sums_at_end(precision, low_weights=True)[SCALES, replicas] == 4 * 4 * 4


@pytest.mark.parametrize(
    ("precision", "is_low"), [("bf16", True), ("mxfp8", True), ("fp8-current", False)]
)
def test_weights_that_are_not_gathered_with_a_scale_of_their_own_need_no_agreement(
    precision, is_low
):
    names = {name for name, _ in sums_at_end(precision, low_weights=is_low)}
    assert SCALES not in names
    assert any(name.startswith("gradient.norm.") for name in names)
