"""AxoNN's gradients over data during the last backward pass of a step."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.io.presets import load_engine
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D

TIED = Model("toy", n_layers=4, hidden_size=64, n_heads=4, vocab_size=256, seq_len=16)
UNTIED = replace(TIED, tied_embeddings=False)
GRID = grid_layout(2, 1, 2, 2)
JOB = Job(n_gpus=8, global_batch=16, seq_len=16)
REDUCING = replace(JOB, overlap=Overlap(grad_reduce=True))
ACCUMULATED, REDUCED = "accumulate", "data"


def plan_of(model, job, n_layers=None, recompute="none", strategy=AXONN):
    model = replace(model, n_layers=n_layers or model.n_layers)
    table = CandidateTable.single(Configuration(GRID, micro_batch=2, recompute=recompute))
    return strategy.plan(model, job, table)


def bytes_of(parts):
    """Bytes that are added to the sums, and that are reduced over data."""
    total = Counter()
    for part in parts:
        for phase in part.phases:
            for op in phase.operations:
                kind = op.axis if isinstance(op, Collective) else op.name.rpartition(".")[2]
                total[kind] += (
                    phase.repeats * float(np.ravel(op.nbytes)[0]) if hasattr(op, "nbytes") else 0.0
                )
    return {kind: total[kind] for kind in (ACCUMULATED, REDUCED)}


@pytest.mark.parametrize("recompute", ["none", "full", "full:1"])
@pytest.mark.parametrize("n_layers", [1, 2, 3, 4])
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_every_gradient_is_added_and_reduced_once(model, n_layers, recompute):
    if recompute == "full:1" and n_layers == 1:
        recompute = "full"
    later = plan_of(model, JOB, n_layers, recompute)
    plan = plan_of(model, REDUCING, n_layers, recompute)
    assert bytes_of([plan.sync_microstep, plan.step_end]) == pytest.approx(
        bytes_of([later.microstep, later.step_end])
    )
    usual = bytes_of([plan.microstep])
    assert usual == bytes_of([later.microstep]) and usual[REDUCED] == 0.0


def test_the_head_goes_first_and_then_each_block_behind_the_next_one():
    sync = plan_of(UNTIED, REDUCING).sync_microstep
    issued = [
        op.name
        for phase in sync.phases
        for _ in range(phase.repeats)
        for op in phase.operations
        if op.name.endswith(("gradient.head.all_reduce", "gradient.block.all_reduce"))
        or op.name == "backward.norm1"
    ]
    block = ["backward.norm1", "gradient.block.all_reduce"]
    assert issued == ["backward.norm1", "gradient.head.all_reduce", *block, *block, *block]


def test_nothing_of_the_sending_block_is_awaited():
    """The gradients that a block adds up have been awaited before, whatever Z does."""
    sync = plan_of(UNTIED, REDUCING).sync_microstep
    added = [op for phase in sync.phases for op in phase.operations if "accumulate" in op.name]
    assert [op.waits_for for op in added[:-1]] == [()] * (len(added) - 1)


@pytest.mark.parametrize(("grid", "least", "most"), [("1x1x4x16", 0.5, 0.9), ("1x1x64x1", 0.99, 1)])
def test_it_is_faster_where_data_is_reduced_and_costs_nothing_else(grid, least, most):
    later, overlapped = (
        best_of_layout(
            build_search(
                "gpt-5b",
                64,
                "perlmutter",
                overlap_grad_reduce=reduces,
                global_batch=64,
                include_oom=True,
            ),
            grid,
        ).step_seconds
        for reduces in (False, True)
    )
    assert least < overlapped / later <= most


@pytest.mark.parametrize(
    "strategy", [Axonn4D(pipelined=True), Axonn4D(engine=load_engine("axonn"))]
)
def test_a_program_that_cannot_keeps_its_plan(strategy):
    assert not strategy.overlaps_reduction(REDUCING)


def test_a_search_finds_the_same_with_bounds_and_without():
    search = build_search("gpt-5b", 16, "perlmutter", overlap_grad_reduce=True, global_batch=64)
    by_bounds, all_played = (
        rank_candidates(replace(search, exhaustive=exhaustive)).prediction(0)
        for exhaustive in (False, True)
    )
    assert by_bounds.configuration == all_played.configuration
    assert by_bounds.step_seconds == pytest.approx(all_played.step_seconds)
