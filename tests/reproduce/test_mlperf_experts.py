"""DeepSeek-V3 in MLPerf on up to 8,192 GPUs; nothing is fitted to its steps."""

import pytest

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce.mlperf_experts import mlperf_experts
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.reproduce.runs import Loaders

ROWS = load_published("mlperf_experts")


@pytest.fixture(scope="module")
def errors():
    """The error of every step."""
    runs = list(mlperf_experts(ROWS, Loaders(load_model, load_machine, load_engine)))
    measured = [run.published["step_seconds"] for run in runs]
    predictions = predict_runs(runs)
    assert all(prediction.fits for prediction in predictions)
    return [p.step_seconds / s - 1.0 for p, s in zip(predictions, measured, strict=True)]


def test_steps_are_met_up_to_2048_gpus(errors):
    assert [int(row["gpus"]) for row in ROWS] == [256, 512, 512, 2048, 4096, 8192]
    assert all(abs(error) < 0.14 for error in errors[:4])


def test_more_gpus_take_longer_than_predicted(errors):
    """What every step takes besides its micro-steps is not all known."""
    assert all(-0.2 < error < -0.1 for error in errors[3:])


def test_the_layouts_leave_whole_micro_steps():
    for row in ROWS:
        ranks = int(row["tensor"]) * int(row["pipeline"])
        assert int(row["global_batch"]) % (int(row["gpus"]) // ranks) == 0
