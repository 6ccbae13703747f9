"""Modules of multi-token prediction against counts written out by hand."""

from dataclasses import replace

import pytest
from build import collectives, memory_terms, number, operations, plan_of
from worlds import llama

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_model
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Attention, Gemm
from axonn_tune.spec.tuning import Adapters
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

LAYERS, HIDDEN, FFN, SEQ, VOCABULARY = 4, 1024, 2816, 512, 4096
MODEL = llama(
    n_layers=LAYERS,
    hidden_size=HIDDEN,
    n_heads=8,
    ffn_hidden_size=FFN,
    vocab_size=VOCABULARY,
    seq_len=SEQ,
)
USUAL = Job(n_gpus=8, global_batch=8, seq_len=SEQ)
ONE, TWO = (replace(USUAL, mtp_modules=n_modules) for n_modules in (1, 2))
STRATEGY = Megatron3D()
BLOCK = 4 * HIDDEN**2 + 3 * HIDDEN * FFN
PROJECTION = 2 * HIDDEN**2
# Two norms of the block, two of what is joined, and one before the head.
NORMS = 5 * HIDDEN
HEAD = HIDDEN * VOCABULARY


def flops(*parts):
    return sum(number(op.flops) for op in operations(*parts) if isinstance(op, Gemm | Attention))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("job", [ONE, TWO])
def test_the_plan_has_the_flops_of_the_model(job, recompute):
    plan = plan_of(STRATEGY, MODEL, job, recompute=recompute, data=8)
    counted = MODEL.hardware_flops(SEQ, SEQ, recompute, mtp_modules=job.mtp_modules)
    assert flops(plan.microstep) == pytest.approx(counted, rel=1e-12)


def test_each_module_adds_a_block_a_projection_and_the_logits():
    attention = 3 * 4 * SEQ * SEQ * HIDDEN
    added = 6 * SEQ * (BLOCK + PROJECTION + HEAD) + attention
    for job in (ONE, TWO):
        more = MODEL.model_flops(SEQ, SEQ, mtp_modules=job.mtp_modules)
        assert more - MODEL.model_flops(SEQ, SEQ) == pytest.approx(job.mtp_modules * added)


def test_parameters_are_those_of_deepseeks_module():
    """README_WEIGHTS.md of deepseek-ai/DeepSeek-V3: 11.5B without the shared embedding and head."""
    assert MODEL.mtp_parameters == BLOCK + PROJECTION + NORMS
    assert load_model("deepseek-v3").mtp_parameters == pytest.approx(11.5e9, rel=0.01)


def added_memory(**sizes):
    with_one = memory_terms(STRATEGY, MODEL, ONE, **sizes)
    return {
        term: nbytes - memory_terms(STRATEGY, MODEL, USUAL, **sizes)[term]
        for term, nbytes in with_one.items()
    }


def test_memory_of_one_stage_by_hand():
    """The module shares embedding and head with the model; one more block's activations live."""
    tensor, data = 2, 4
    added = added_memory(tensor=tensor, data=data)
    elements = (BLOCK + PROJECTION) / tensor + NORMS
    assert added["weights"] == 2 * elements
    assert added["gradients"] == 4 * elements
    assert added["optimizer_states"] == pytest.approx(12 * elements / data)
    # The block saves the inputs and outputs of its norms, q, k, v, attention's output and the MLP
    # before and after its activation; then come what is joined, before and after two norms, and
    # the input and the output of the third.
    saved = 4 * HIDDEN + 4 * HIDDEN + 3 * FFN + 6 * HIDDEN
    assert added["activations"] == 2 * SEQ * saved / tensor


def test_the_last_stage_has_the_modules_and_a_copy_of_the_embedding():
    sizes = {"pipeline": 2, "data": 4}
    weights = memory_terms(STRATEGY, MODEL, TWO, **sizes)["weights"]
    elements = (LAYERS / 2 + 2) * (BLOCK + 2 * HIDDEN) + 2 * HEAD + HIDDEN
    assert weights == 2 * (elements + 2 * (PROJECTION + 3 * HIDDEN))
    usual, more = (plan_of(STRATEGY, MODEL, job, **sizes).pipeline for job in (USUAL, TWO))
    for stage in ("first", "middle", "sync"):
        assert flops(*getattr(usual, stage).passes) == flops(*getattr(more, stage).passes)
    added = flops(*more.last.passes) - flops(*usual.last.passes)
    expected = MODEL.model_flops(SEQ, SEQ, mtp_modules=2) - MODEL.model_flops(SEQ, SEQ)
    assert added == pytest.approx(expected, rel=1e-12)
    step_end = plan_of(STRATEGY, MODEL, ONE, **sizes).step_end
    assert "gradient.embedding.send_recv" in [op.name for op in operations(step_end)]


def test_columns_of_the_projection_are_gathered():
    """With sequence parallelism, so is the gradient of their tokens; without, ranks have it."""
    for strategy, names in (
        (STRATEGY, ["forward", "backward"]),
        (Megatron3D(sequence_parallel=False), ["forward"]),
    ):
        plan = plan_of(strategy, MODEL, ONE, tensor=2, data=4)
        gathers = [
            op for op in collectives(plan, plan.microstep) if op.name.endswith("columns.all_gather")
        ]
        assert [op.name.split(".")[0] for op in gathers] == names
        assert {number(op.nbytes) for op in gathers} == {2 * SEQ * HIDDEN}


def test_a_module_has_the_block_of_the_last_layer():
    model = load_model("deepseek-v3")
    job = Job(n_gpus=64, global_batch=64, seq_len=4096, mtp_modules=1)
    strategy = Megatron3D(has_experts=True)
    plan = plan_of(strategy, model, job, data=64, expert=64)
    (module,) = [phase for phase in plan.microstep.phases if phase.name == "module"]
    names = {op.name for op in module.operations}
    assert {"forward.experts_up.gemm", "backward.experts_down.gemm_weight"} <= names
    assert "forward.up.gemm" not in names


def test_modules_beside_frozen_weights_are_refused():
    with pytest.raises(InputError, match="mtp_modules is 1"):
        replace(ONE, adapters=Adapters(8))
    with pytest.raises(InputError, match="mtp_modules is -1"):
        replace(USUAL, mtp_modules=-1)
