"""What the runtime does is what the step plan says: operations, order, bytes, FLOPs."""

import numpy as np
import pytest
from runtime.cases import BATCH, reducing_cases, telling_cases, trained
from runtime.ranks import on_grid, on_ranks

from axonn_tune.io.presets import load_engine
from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Attention, Collective, Gemm
from axonn_tune.strategies.axonn.axonn4d import Axonn4D

BUNDLED = Axonn4D(engine=load_engine("bundled"))
BUCKETED = "gradient.all_reduce"


def number(size):
    return float(np.ravel(size)[0])


def planned_step(case):
    """Name, stream, kind, bytes and FLOPs of every operation in the order of issue."""
    spec = case.spec
    job = Job(
        case.grid.n_ranks,
        BATCH,
        spec.seq_len,
        dtype=case.dtype,
        attention=case.attention,
        overlap=case.overlap,
        keep_gathered_weights=case.keep_gathered_weights,
    )
    configuration = Configuration(case.grid, case.order, case.micro_batch, case.recompute)
    plan = BUNDLED.plan(spec, job, CandidateTable.single(configuration))
    assert number(plan.n_microsteps) == case.n_microsteps
    operations = []
    last = plan.sync_microstep or plan.microstep
    microsteps = [*plan.microstep.phases * (case.n_microsteps - 1), *last.phases]
    for phase in [*microsteps, *plan.step_end.phases]:
        operations += list(phase.operations) * phase.repeats
    described = [describe_planned(op, case.grid) for op in operations]
    return [op for op in described if op is not None]


def describe_planned(op, grid):
    if isinstance(op, Collective):
        issued = grid.size(op.axis) > 1
        return (op.name, op.axis, op.kind, number(op.nbytes), 0.0) if issued else None
    if isinstance(op, Gemm | Attention):
        kind = "gemm" if isinstance(op, Gemm) else "attention"
        return op.name, "compute", kind, 0.0, number(op.flops)
    nbytes = number(op.nbytes)
    return (op.name, "compute", "memory_bound", nbytes, 0.0) if nbytes else None


def recorded_step(operations):
    """The same of a record; the buckets of one reduction count as one operation."""
    described = []
    for op in operations:
        if op.name == BUCKETED and described[-1][0] == BUCKETED:
            *same, nbytes, flops = described[-1]
            described[-1] = (*same, nbytes + op.nbytes, flops)
        else:
            described.append((op.name, op.stream, op.kind, op.nbytes, op.flops))
    return described


def check_records(rank, cases):
    for case in cases:
        with on_grid(case.grid, case.order) as mesh:
            ours = trained(case, mesh)
            text = RandomTokens(case.spec.vocab_size, case.spec.seq_len)
            trainer = Trainer(ours.model, ours.optimizer, text, BATCH, case.micro_batch)
            for index in range(2):  # the first step learns what to gather ahead
                trainer.step(index)
            planned, recorded = planned_step(case), recorded_step(trainer.last_operations)
            for at, (wanted, got) in enumerate(zip(planned, recorded, strict=False)):
                assert got == wanted, f"rank {rank}, {case}, operation {at}"
            assert len(recorded) == len(planned), f"rank {rank}, {case}"
            check_times(trainer.last_operations)


def check_times(operations):
    """Kernels follow each other; a collective starts after the kernels issued before it."""
    free = 0.0
    for op in operations:
        assert op.end_seconds >= op.start_seconds >= free
        if op.stream == "compute":
            free = op.end_seconds


@pytest.mark.parametrize(
    "n_ranks",
    [1, 2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.sweep)],
)
def test_record_equals_plan(n_ranks):
    on_ranks(n_ranks, check_records, list(telling_cases(n_ranks)))


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_record_equals_plan_where_the_backward_pass_reduces_gradients(n_ranks):
    on_ranks(n_ranks, check_records, reducing_cases(n_ranks))
