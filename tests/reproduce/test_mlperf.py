"""Llama 3.1 8B and 405B in 8 and 4 bits as submissions to MLPerf measured them."""

from dataclasses import replace
from itertools import takewhile

import numpy as np
import pytest
from reproduced import LOADERS

from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.nemo import mlperf
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.spec import names
from axonn_tune.spec.plan import Part
from axonn_tune.step.player import Player


@pytest.fixture(scope="module")
def predictions():
    """The rows and the predictions of Llama 3.1 8B in 8 bits on Blackwell."""
    return predictions_of(lambda row: is_8b_on_blackwell(row) and row["precision"] != "nvfp4")


def is_8b_on_blackwell(row):
    return row["model"] == "llama3-8b" and row["machine"].startswith(("dgx-b", "gb"))


def predictions_of(is_wanted):
    """The rows that are wanted and their predictions."""
    rows = list(filter(is_wanted, load_published("mlperf")))
    runs = list(mlperf(rows, LOADERS))
    return [*zip(rows, predict_runs(runs), strict=True)]


def errors_of(predictions):
    """The relative errors of predicted steps."""
    return [p.step_seconds / float(row["step_seconds"]) - 1.0 for row, p in predictions]


@pytest.fixture(scope="module")
def predicted(predictions):
    """The rows and the predicted steps."""
    return [(row, prediction.step_seconds) for row, prediction in predictions]


def forward_seconds(prediction):
    """The time of a forward pass alone: a micro-step until the gradient of the loss."""
    player = Player(prediction)
    phases = []
    for phase in player.plan.microstep.phases:
        is_forward = takewhile(lambda op: op.name != names.LOSS_GRADIENT, phase.operations)
        phases.append(replace(phase, operations=tuple(is_forward)))
        if len(phases[-1].operations) < len(phase.operations):
            return player.play(Part("forward", tuple(phases)), 1).seconds
    raise AssertionError("no phase forms the gradient of the loss")


def test_forward_passes_alone_are_met(predictions):
    """Nothing but kernels, and what ranks of a sequence exchange, is in them."""
    errors = [
        forward_seconds(prediction) / float(row["forward_seconds"]) - 1.0
        for row, prediction in predictions
        if row["tensor"] == "1"
    ]
    assert len(errors) == 15
    assert np.mean(np.abs(errors)) < 0.035
    assert max(map(abs, errors)) < 0.09


def test_forward_passes_of_a_thousand_tokens_on_a_gpu_are_met():
    """Tensor messages wait for products in them, as `NVTE_TP_OVERLAP_TRAINING_ONLY` says.

    What lacks in steps on 512 GPUs is thus not in kernels of few tokens: it is in the rest.
    """
    rows = [
        {**row, "overlaps": "no"}
        for row in load_published("mlperf")
        if is_8b_on_blackwell(row) and row["tensor"] != "1" and row["forward_seconds"]
    ]
    predictions = predict_runs(list(mlperf(rows, LOADERS)))
    errors = {
        row["machine"]: forward_seconds(prediction) / float(row["forward_seconds"]) - 1.0
        for row, prediction in zip(rows, predictions, strict=True)
    }
    assert set(errors) == {"gb200-nvl72-64", "gb300-nvl72-64"}
    assert abs(errors["gb200-nvl72-64"]) < 0.03
    assert abs(errors["gb300-nvl72-64"]) < 0.08


def test_steps_on_up_to_256_gpus_are_met(predicted):
    errors = [
        seconds / float(row["step_seconds"]) - 1.0
        for row, seconds in predicted
        if int(row["gpus"]) <= 256
    ]
    assert len(errors) == 15
    assert np.mean(np.abs(errors)) < 0.055
    assert max(map(abs, errors)) < 0.13


@pytest.mark.parametrize(("gpus", "largest"), [("512", 0.07), ("1024", 0.19)])
def test_steps_over_racks_of_gb200_are_met(predicted, gpus, largest):
    """They were 11 and 23 % too short when a ring was taken to fill the adapters of a rack."""
    ((row, seconds),) = [
        (row, seconds)
        for row, seconds in predicted
        if row["machine"] == "gb200-nvl72-64" and row["gpus"] == gpus
    ]
    assert seconds == pytest.approx(float(row["step_seconds"]), rel=largest)


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


def test_steps_of_a_program_whose_host_waits_for_each_bucket_are_met():
    """Without these waits the steps would be predicted 13 and 26 % too short."""
    predictions = predictions_of(lambda row: row["checks"] == "yes")
    assert [row["gpus"] for row, _ in predictions] == ["128", "64"]
    on_128, on_64 = errors_of(predictions)
    assert -0.19 < on_128 < -0.17
    assert -0.10 < on_64 < -0.08


def test_gb300_is_faster_than_gb200_by_what_was_measured(predicted):
    on_72 = {
        row["machine"]: (float(row["step_seconds"]), seconds)
        for row, seconds in predicted
        if row["gpus"] == "72" and row["file"].startswith("NVIDIA/")
    }
    measured, ours = np.divide(on_72["gb200-nvl72"], on_72["gb300-nvl72"])
    assert ours == pytest.approx(measured, rel=0.03)


def test_steps_of_8b_in_4_bits_are_met():
    """Attention has 8 bits in all but one."""
    errors = np.abs(
        errors_of(
            predictions_of(lambda row: is_8b_on_blackwell(row) and row["precision"] == "nvfp4")
        )
    )
    assert len(errors) == 12
    assert errors.mean() < 0.045
    assert errors.max() < 0.11


@pytest.mark.parametrize(
    ("is_in_4_bits", "n_rows", "largest"),
    [pytest.param(False, 16, 0.03, id="8 bits"), pytest.param(True, 8, 0.1, id="4 bits")],
)
def test_steps_of_405b_on_256_to_8192_gpus_are_met(is_in_4_bits, n_rows, largest):
    predictions = predictions_of(
        lambda row: row["model"] == "llama3-405b" and (row["precision"] == "nvfp4") == is_in_4_bits
    )
    assert len(predictions) == n_rows
    assert max(map(abs, errors_of(predictions))) < largest


def test_round_6_runs_the_cudnn_that_its_systems_state():
    """Release 26.04 has 9.21.1, which is nearest to the measured 9.22; release 25.09 has 9.13.1."""
    round_6 = [row for row in load_published("mlperf") if row["tag"] == "v6.0"]
    newer = {row["file"].split("/")[0] for row in round_6 if row["attention"] == "cudnn"}
    older = {row["file"].split("/")[0] for row in round_6 if row["attention"] == "cudnn-9.13"}
    assert (newer, older) == ({"NVIDIA", "CoreWeave"}, {"Azure", "Nebius"})


def test_405b_on_gb300_gains_between_rounds_what_was_measured():
    """The newer software is 6 % faster; of what it changed, attention alone is predicted."""
    by_round = {
        row["tag"]: (float(row["step_seconds"]), p.step_seconds, int(row["global_batch"]))
        for row, p in predictions_of(
            lambda row: (
                row["model"] == "llama3-405b"
                and row["machine"].startswith("gb300")
                and row["gpus"] == "512"
            )
        )
    }
    measured, ours = (
        by_round["v6.0"][k] / by_round["v6.0"][2] / (by_round["v5.1"][k] / by_round["v5.1"][2])
        for k in (0, 1)
    )
    assert ours == pytest.approx(measured, abs=0.03)


def test_steps_of_gpt3_on_256_to_11616_h100_are_met():
    """On over 10,000 GPUs the exchange between replicas would take 30 % of a step at its end."""
    predictions = predictions_of(
        lambda row: row["model"] == "gpt3-175b" and row["machine"] == "dgx-h100"
    )
    errors = np.abs(errors_of(predictions))
    assert len(errors) == 21
    assert errors.mean() < 0.06
    assert errors.max() < 0.125


def test_gpt3_gathers_weights_in_8_bits_from_round_4_on():
    """FP8_PARAMS came with it, and weights in 4 bits are gathered in bf16."""
    for row in load_published("mlperf"):
        is_earlier = row["tag"] in ("v3.0", "v3.1")
        assert (row["low_weights"] == "no") == (is_earlier or row["precision"] == "nvfp4")
    ((_, prediction),) = predictions_of(lambda row: "eos-dfw_n1280" in row["file"])
    strategy = prediction.scenario.strategy
    assert strategy.gathered_bytes(prediction.scenario.job) == 2


def test_steps_on_gpus_of_amd_are_met():
    predictions = predictions_of(lambda row: row["machine"].startswith("mi"))
    assert len(predictions) == 5
    errors = np.abs(errors_of(predictions))
    assert errors.mean() < 0.06
    assert errors.max() < 0.12
