"""Candidates that one plan describes take as long together as each of them does alone."""

from itertools import pairwise

import numpy as np
import pytest

from axonn_tune import processes
from axonn_tune.api.searching import build_search
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import parse_layout
from axonn_tune.step import evaluate
from axonn_tune.step.evaluate import Evaluator

LAYOUTS = ["2x2x2x2", "4x1x2x2", "1x2x1x8", "8x1x1x2"]
# All layers stand first and none last: what a plan says does not depend on the order.
OF_LAYERS = ["full", "full:20", "full:10", "none"]
ENGINE_THAT_REUSES = "axonn-sc24"


def search_of(**options):
    return build_search("5b", 16, "frontier", global_batch=64, **options)


def table_of(recomputes):
    configurations = [
        Configuration(parse_layout(layout), micro_batch=2, recompute=recompute)
        for recompute in recomputes
        for layout in LAYOUTS
    ]
    return CandidateTable.of(configurations, search_of().scenario.strategy.axes)


@pytest.mark.parametrize("own_rows", [1, 2048])
@pytest.mark.parametrize("recomputes", [[*OF_LAYERS, "selective"], ["full", "selective"]])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"frozen": "embedding,layers:0-11,head"},
        {"attention": "unfused"},
        {"engine": "axonn"},
    ],
)
def test_recomputations_share_a_plan(options, recomputes, own_rows, monkeypatch):
    monkeypatch.setattr(evaluate, "OWN_ROWS", own_rows)
    scenario = search_of(**options).scenario
    table = table_of(recomputes)
    (rows,) = scenario.planned_rows(table)
    together = np.array(Evaluator.of(scenario, table).evaluate())
    assert rows.size == len(table)
    for row in range(len(table)):
        alone = np.array(Evaluator.of(scenario, table.take(slice(row, row + 1))).evaluate())
        np.testing.assert_allclose(together[:, row], alone[:, 0], rtol=1e-12, atol=1e-15)


def test_cores_share_the_chunks_of_a_plan(monkeypatch):
    evaluator = Evaluator.of(search_of().scenario, table_of([*OF_LAYERS, "selective"]))
    alone = np.array(evaluator.evaluate())
    monkeypatch.setattr(evaluate, "CHUNK_ROWS", 3)
    monkeypatch.setattr(processes, "_n_cores", lambda: 2)
    np.testing.assert_allclose(np.array(evaluator.evaluate()), alone, rtol=1e-12, atol=1e-15)


def test_a_program_that_reuses_recomputed_weights_has_another_plan():
    scenario = search_of(engine=ENGINE_THAT_REUSES).scenario
    n_each = len(LAYOUTS)
    table = table_of([*OF_LAYERS, "selective"])
    groups = sorted(sorted(rows.tolist()) for rows in scenario.planned_rows(table))
    starts = [0, n_each, len(table) - n_each, len(table)]
    assert groups == [list(range(*ends)) for ends in pairwise(starts)]


def test_many_candidates_that_issue_the_same_phases_are_played_apart(monkeypatch):
    scenario = search_of().scenario
    n_each = len(LAYOUTS)

    def chunks(own_rows, chunk_rows):
        monkeypatch.setattr(evaluate, "OWN_ROWS", own_rows)
        monkeypatch.setattr(evaluate, "CHUNK_ROWS", chunk_rows)
        found = evaluate._chunks(Evaluator.of(scenario, table_of(OF_LAYERS)))
        return [(chunk.start, chunk.stop) for chunk in found]

    assert chunks(n_each, 100) == [(0, n_each), (n_each, 3 * n_each), (3 * n_each, 4 * n_each)]
    assert chunks(n_each + 1, 100) == [(0, 4 * n_each)]
    ends = [n_each, 2 * n_each + 1, 3 * n_each, 4 * n_each]
    assert chunks(n_each, n_each + 1) == list(pairwise([0, *ends]))
