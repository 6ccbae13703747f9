"""Fine-tuning with adapters as MLPerf and Megatron-Bridge measured it."""

import numpy as np
import pytest

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce.fine_tuning import fine_tuning
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.reproduce.runs import Loaders


@pytest.fixture(scope="module")
def predicted():
    """The row and the prediction of every step."""
    rows = load_published("lora")
    runs = fine_tuning(rows, Loaders(load_model, load_machine, load_engine))
    return list(zip(rows, predict_runs(list(runs)), strict=True))


@pytest.mark.parametrize(
    ("system", "n_rows", "most"), [("MLPerf", 18, 0.11), ("Megatron-Bridge", 5, 0.16)]
)
def test_steps_are_met_within_what_the_page_says(predicted, system, n_rows, most):
    errors = [
        p.step_seconds / float(row["step_seconds"]) - 1.0
        for row, p in predicted
        if row["system"] == system
    ]
    assert len(errors) == n_rows
    assert np.mean(np.abs(errors)) < most


def test_layouts_of_one_round_are_in_order(predicted):
    """Where software and batch are the same, more GPUs of a kind take a shorter step."""
    for release, machine in (("v4.0", "dgx-h100"), ("v4.1", "dgx-h100"), ("v5.0", "gb200-nvl72")):
        steps = {
            row["gpus"]: (float(row["step_seconds"]), p.step_seconds)
            for row, p in predicted
            if (row["release"], row["machine"]) == (release, machine)
        }
        measured = sorted(steps, key=lambda gpus: steps[gpus][0])
        assert measured == sorted(steps, key=lambda gpus: steps[gpus][1])


def test_nvidia_counts_the_same_flops(predicted):
    """Megatron-Bridge prints 2,086 TFLOP/s at 7,481 tokens/s: 278.8 GFLOP for each token.

    It counts no adapters, and attention as if causal.
    """
    for row, p in predicted:
        if row["system"] == "Megatron-Bridge":
            job = p.scenario.job
            flops = p.tflops_per_gpu * 1e12 / p.tokens_per_second_per_gpu
            adapters = 6.0 * p.scenario.model.adapter_parameters(job.adapters)
            assert flops - adapters == pytest.approx(278.8e9, rel=0.01)
