"""FSDP2 in the stages of a pipeline: what a rank holds, what it sends, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from build import memory_terms, number, operations, plan_of
from worlds import llama, machine_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine, OffloadProgram
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.plan import Gemm
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.tuning import Adapters, Frozen
from axonn_tune.step.predict import predict
from axonn_tune.strategies.zero.zero import zero3

MODEL = llama(
    n_layers=8,
    hidden_size=256,
    n_heads=8,
    n_kv_heads=4,
    vocab_size=1024,
    ffn_hidden_size=512,
    seq_len=64,
    tied_embeddings=False,
)
JOB = Job(16, 64, 64)


def staged(**facts):
    program = ZeroProgram(is_fsdp2=True, has_stages=True, reduced_element_bytes=4.0, **facts)
    return zero3(Engine(zero=program))


TABLE = MODEL.vocab_size * MODEL.hidden_size
# Two blocks and the embedding, on the first of four stages.
OF_STAGE = (MODEL.parameters - 2 * TABLE - MODEL.norm_parameters) / 4 + TABLE


def first_stage(strategy, n_sequences):
    """Memory of a rank in the first of four stages, by term."""
    layout = Layout({"shard": 4, "replica": 1, "pipeline": 4})
    configuration = Configuration(layout, micro_batch=1, recompute="full")
    table = CandidateTable.single(configuration, strategy.axes)
    terms = strategy.first_stage_memory(MODEL, Job(16, n_sequences, 64), table)
    return {name: number(nbytes) for name, nbytes in terms.items()}


def test_a_stage_keeps_its_weights_and_sums_whole_and_shares_the_rest():
    # With so many tokens most is held in a backward pass.
    long = replace(MODEL, seq_len=4096)
    strategy = staged()
    layout = Layout({"shard": 4, "replica": 1, "pipeline": 4})
    table = CandidateTable.single(
        Configuration(layout, micro_batch=8, recompute="full"), strategy.axes
    )
    held = strategy.first_stage_memory(long, Job(16, 256, 4096), table)
    terms = {name: number(nbytes) for name, nbytes in held.items()}
    assert terms["gathered_weights"] == pytest.approx(2 * OF_STAGE)
    assert terms["weights"] == pytest.approx(4 * OF_STAGE / 4)
    assert terms["optimizer_states"] == pytest.approx(8 * OF_STAGE / 4)
    # Sums in fp32; in backward passes nothing has been reduced.
    assert terms["gradients"] == pytest.approx(4 * OF_STAGE)
    # The first of four stages holds the inputs of two blocks for four micro-batches, and one more.
    assert terms["activations"] == pytest.approx((4 * 2 + 1) * 8 * 4096 * 256 * 2)


def test_at_the_end_a_rank_holds_sums_and_what_has_been_reduced_of_them():
    at_end = first_stage(staged(), 16)
    message = 4 * (OF_STAGE - TABLE) / 2  # A block is larger than the embedding.
    assert at_end["gradients"] == pytest.approx(4 * OF_STAGE + 4 * OF_STAGE / 4 + message)
    assert at_end["activations"] == at_end["working_set"] == 0.0
    pools = first_stage(staged(reserves_by_stream=True), 16)
    assert pools["gradients"] == at_end["gradients"]
    assert pools["activations"] > 0.0 and pools["working_set"] > 0.0


def test_one_stage_is_planned_as_without_a_pipeline():
    without = zero3(Engine(zero=ZeroProgram(is_fsdp2=True, reduced_element_bytes=4.0)))
    assert memory_terms(staged(), MODEL, JOB, shard=16, pipeline=1) == memory_terms(
        without, MODEL, JOB, shard=16
    )

    def planned(strategy, **sizes):
        plan = plan_of(strategy, MODEL, JOB, shard=16, **sizes)
        return [(op.name, vars(op).keys()) for op in operations(plan.microstep)]

    assert planned(staged(), pipeline=1) == planned(without)


def test_stages_share_all_products():
    def flops(strategy, **sizes):
        plan = plan_of(strategy, MODEL, JOB, **sizes)
        if plan.pipeline is None:
            return sum(
                number(op.flops) for op in operations(plan.microstep) if isinstance(op, Gemm)
            )
        return sum(
            times * number(op.flops)
            for times, stage in zip((1, 2, 1), plan.pipeline.stages, strict=True)
            for part in stage.passes
            for op in operations(part)
            if isinstance(op, Gemm)
        )

    assert flops(staged(), shard=4, pipeline=4) == pytest.approx(
        flops(staged(), shard=16, pipeline=1)
    )


def test_more_micro_batches_leave_less_of_a_bubble():
    def step(n_sequences):
        scenario = Scenario(MODEL, Job(16, n_sequences, 64), machine_of(), staged())
        layout = Layout({"shard": 4, "replica": 1, "pipeline": 4})
        return predict(scenario, Configuration(layout, micro_batch=1))

    few, many = step(16), step(256)
    assert few.bubble_seconds / few.step_seconds > 2.0 * many.bubble_seconds / many.step_seconds
    assert many.step_seconds < 16.0 * few.step_seconds


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(16, 64, 64, adapters=Adapters(8)), "adapters in a pipeline"),
        (Job(16, 64, 64, offload="optimizer"), "offload in a pipeline"),
        (Job(16, 64, 64, frozen=Frozen(embedding=True, n_layers=2)), "frozen parts in a pipeline"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_predicted_in_a_pipeline_is_refused(job, reason):
    engine = Engine(
        zero=ZeroProgram(is_fsdp2=True, has_stages=True),
        offload=OffloadProgram(gradients=True, weights=True),
    )
    strategy = zero3(engine)
    layouts = [Layout({"shard": 16 // n, "replica": 1, "pipeline": n}) for n in (1, 4)]
    placements = Placements.of(layouts, axes=strategy.axes)
    broken = strategy.rejections(MODEL, job, placements)
    (mask,) = (mask for name, mask in broken.items() if name.startswith(reason))
    np.testing.assert_array_equal(np.broadcast_to(mask, 2), [False, True])


def test_experts_and_other_engines_have_no_stages():
    assert "pipeline" in zero3(load_engine("torchtitan")).axes.names
    assert "pipeline" not in zero3(load_engine("torchtitan"), has_experts=True).axes.names
    assert "pipeline" not in zero3(load_engine("fsdp2")).axes.names
