"""A pipeline fills and drains at the pace of the ranks through which a micro-batch passes."""

import numpy as np
import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.cost.prices import slowest_rank_factor
from axonn_tune.search.rank import best_of
from axonn_tune.spec.plan import Pipeline
from axonn_tune.step.player import Player


def predicted(model="20b", n_gpus=64, **options):
    search = build_search(model, n_gpus, machine="dgx-a100", strategy="megatron", **options)
    return best_of(search).prediction


@pytest.mark.parametrize(
    ("model", "layout", "expected"),
    [
        ("20b", {"tensor": 8, "pipeline": 4}, 8),
        ("llama3-8b", {"tensor": 2, "context": 4, "pipeline": 4}, 8),
        ("mixtral-8x7b", {"tensor": 2, "pipeline": 4, "expert": 8}, 8),
    ],
)
def test_ranks_that_exchange_something_in_a_pass_wait_for_one_another(model, layout, expected):
    player = Player(predicted(model, fix=layout, global_batch=64))
    assert player.plan.pipeline.n_in_lockstep(player.table).tolist() == [expected]


def test_a_pipeline_fills_at_the_pace_of_one_stage(monkeypatch):
    layout = {"tensor": 8, "pipeline": 8}
    options = {"fix": layout, "global_batch": 64, "micro_batch": 1, "virtual_stages": 1}
    prediction = predicted(**options)
    monkeypatch.setattr(Pipeline, "n_in_lockstep", lambda *_: np.full(1, 64.0))
    at_pace_of_all = predicted(**options)
    player = Player(prediction)
    passes = [player.play(part, 1) for part in player.plan.pipeline.middle.passes]
    kernel_seconds = sum(
        event.seconds for each in passes for event in each.events if event.lane == 0
    )
    machine = prediction.scenario.machine
    pace = slowest_rank_factor(machine, 8) / slowest_rank_factor(machine, 64)
    assert at_pace_of_all.step_seconds - prediction.step_seconds == pytest.approx(
        (8 - 2) * kernel_seconds * (1.0 - pace), rel=1e-6
    )
