"""Mixtures of experts in MLPerf on up to 8,192 GPUs; nothing is fitted to their steps."""

import numpy as np
import pytest

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce.mlperf_experts import mlperf_experts
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.reproduce.runs import Loaders

ROWS = load_published("mlperf_experts")


@pytest.fixture(scope="module")
def judged():
    """Row, prediction and error of every step."""
    runs = list(mlperf_experts(ROWS, Loaders(load_model, load_machine, load_engine)))
    measured = [run.published["step_seconds"] for run in runs]
    return [
        (row, prediction, prediction.step_seconds / seconds - 1.0)
        for row, prediction, seconds in zip(ROWS, predict_runs(runs), measured, strict=True)
    ]


@pytest.fixture(scope="module")
def errors(judged):
    """The errors of the steps of DeepSeek-V3."""
    return [error for row, _, error in judged if row["model"] == "deepseek-v3"]


def test_all_but_one_fit(judged):
    """Transformer Engine's sequence of operations keeps no second copy of its weights in 8 bits."""
    too_large = [row for row, prediction, _ in judged if not prediction.fits]
    assert [(row["model"], row["gpus"], row["machine"]) for row in too_large] == [
        ("gpt-oss-20b", "8", "gb200-nvl72-64")
    ]


def test_steps_are_met_up_to_512_gpus(errors):
    assert [int(row["gpus"]) for row in ROWS[:6]] == [256, 512, 512, 2048, 4096, 8192]
    assert all(abs(error) < 0.11 for error in errors[:3])


def test_gpt_oss_is_met_within_a_rack(judged):
    errors = {
        int(row["gpus"]): error
        for row, _, error in judged
        if row["model"] == "gpt-oss-20b" and row["machine"].startswith("gb300")
    }
    assert abs(errors[8]) < 0.08 and abs(errors[72]) < 0.08
    of_all = [error for row, _, error in judged if row["model"] == "gpt-oss-20b"]
    assert len(of_all) == 7 and np.mean(np.abs(of_all)) < 0.13


def test_more_gpus_take_longer_than_predicted(errors):
    """What every step takes besides its micro-steps is not all known."""
    assert all(-0.22 < error < -0.1 for error in errors[3:])


def test_the_layouts_leave_whole_micro_steps():
    for row in ROWS:
        ranks = int(row["tensor"]) * int(row["context"]) * int(row["pipeline"])
        assert int(row["global_batch"]) % (int(row["gpus"]) // ranks) == 0
