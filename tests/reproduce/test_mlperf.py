"""Llama 3.1 8B in 8 bits as submissions to MLPerf measured it on Blackwell."""

import numpy as np
import pytest

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce.nemo import mlperf
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.reproduce.runs import Loaders


@pytest.fixture(scope="module")
def predicted():
    """The rows and the predicted steps of Llama on Blackwell."""
    all_rows = load_published("mlperf")
    rows = [row for row in all_rows if row["engine"] != "nemo"]
    runs = list(mlperf(rows, Loaders(load_model, load_machine, load_engine)))
    return [(row, p.step_seconds) for row, p in zip(rows, predict_runs(runs), strict=True)]


def test_steps_on_up_to_256_gpus_are_met(predicted):
    errors = [
        seconds / float(row["step_seconds"]) - 1.0
        for row, seconds in predicted
        if int(row["gpus"]) <= 256
    ]
    assert len(errors) == 13
    assert np.mean(np.abs(errors)) < 0.05
    assert max(map(abs, errors)) < 0.13


def test_steps_of_two_sequences_on_a_gpu_are_met(predicted):
    """They are the longest, in which what stands outside the kernels matters least.

    The two on B300 are 6 % too short, although their forward passes are met within 5 %.
    """
    errors = [
        seconds / float(row["step_seconds"]) - 1.0
        for row, seconds in predicted
        if row["micro_batch"] == "2"
    ]
    assert len(errors) == 6
    assert np.mean(np.abs(errors)) < 0.04
    assert max(map(abs, errors)) < 0.07


def test_gb300_is_faster_than_gb200_by_what_was_measured(predicted):
    ratios = {}
    for row, seconds in predicted:
        by_machine = ratios.setdefault((row["gpus"], row["tensor"]), {})
        by_machine[row["machine"]] = (float(row["step_seconds"]), seconds)
    on_72 = ratios["72", "1"]
    measured, ours = np.divide(on_72["gb200-nvl72"], on_72["gb300-nvl72"])
    assert ours == pytest.approx(measured, rel=0.03)
