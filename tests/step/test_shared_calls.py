"""Collectives that several blocks share: each block has a part of a call."""

import pytest
from worlds import machine_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import predict
from axonn_tune.step.timeline import step_timeline
from axonn_tune.strategies.zero.zero import zero3


@pytest.mark.parametrize(
    ("n_layers", "hidden_size", "n_reductions"),
    [(1, 64, 1), (2, 64, 1), (12, 2048, 1), (9, 4096, 4)],
)
def test_an_explanation_counts_whole_calls(n_layers, hidden_size, n_reductions):
    model = Model("m", n_layers, hidden_size, n_heads=8, vocab_size=512, seq_len=128)
    scenario = Scenario(model, Job(16, 32, 128), machine_of(), zero3(load_engine("deepspeed")))
    layout = Layout({"shard": 16, "replica": 1})
    prediction = predict(scenario, Configuration(layout, micro_batch=2))
    assert step_timeline(prediction).seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    by_name = {cost.name: cost for cost in explain(prediction).operations}
    reduction = by_name["gradient.block.shard.reduce"]
    assert reduction.n_calls == n_reductions
    assert reduction.seconds_per_call * n_reductions == pytest.approx(reduction.total_seconds)
