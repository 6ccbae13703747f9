"""The whole loop on three link levels: calibrate, suggest, run, compare."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
COMMAND = [sys.executable, "-m", "axonn_tune.cli.main"]
CALIBRATE = [sys.executable, str(Path(__file__).with_name("coarse_calibration.py")), "calibrate"]
# What a noisy machine of two cores always keeps; docs/validate.md has what it usually reaches.
LIMITS = ["--max-error", "0.2", "--max-regret", "0.1"]
# The shipped rates: on faster links a step is mostly the host's own work, which a busy host slows.
CLUSTER = "frontier-mini"
SEARCH = ["--model", "tiny", "--gpus", "8", "--global-batch", "8"]
# A prediction of a released engine may miss its steps by so much.
OF_ENGINES = ["--steps", "3", "--recompute", "none", "--max-error", "0.2"]
AXONN_GRIDS = ("2x2x2x1", "1x1x2x4")


def on_all_ranks(*command):
    return subprocess.run(
        [*COMMAND, "emulate", "--spec", CLUSTER, "--", *command], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def calibrated(emulation, tmp_path_factory):
    """The path of a profile that was calibrated on the cluster."""
    profile = str(tmp_path_factory.mktemp("mini") / "mini.yaml")
    calibrate(profile)
    return profile


def calibrate(profile):
    """Calibrate the cluster, and write or replace its profile."""
    few = ["--quick", "--most-shapes", "5", "--quiet"]
    done = on_all_ranks(*CALIBRATE, "--output", profile, *few, *SEARCH)
    assert done.returncode == 0, done.stderr
    assert "package: joins" in done.stdout and "intra-node: joins" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_predictions_hold_on_frontier_mini(calibrated, capsys):
    check_prediction(capsys, calibrated, "--grids", "spread:3", "--steps", "3", *LIMITS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_steps_of_axonn_itself_are_predicted(calibrated, capsys):
    """The prediction is that of the engine AxoNN 0.2.0."""
    pytest.importorskip("axonn")
    grids = [word for grid in AXONN_GRIDS for word in ("--grid", grid)]
    check_prediction(capsys, calibrated, "--engine", "axonn", *OF_ENGINES, *grids)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_steps_of_deepspeed_itself_are_predicted(calibrated, capsys):
    pytest.importorskip("deepspeed")
    options = ["--engine", "deepspeed", "--strategy", "zero3", "--no-ors"]
    check_prediction(capsys, calibrated, *options, *OF_ENGINES)


def check_prediction(capsys, profile, *options):
    """Compare steps on the calibrated cluster with their prediction, and again if it is missed.

    A host that is busy with something else spoils one calibration or one comparison; a wrong model
    misses both times.
    """
    validate = [*COMMAND, "validate", "--machine", profile, "--quiet", *SEARCH, *options]
    done = on_all_ranks(*validate)
    if done.returncode == 1:
        calibrate(profile)
        done = on_all_ranks(*validate)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(600)
@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["hsdp", "megatron-tp"])
def test_predictions_of_torch_s_own_parallelism_hold(emulation, capsys, strategy):
    """The cluster is flat-8, and the profile is the one that docs/emulated has of it."""
    profile = Path(__file__).parents[2] / "docs" / "emulated" / "flat-8.yaml"
    done = subprocess.run(
        [
            *(*COMMAND, "emulate", "--spec", "flat-8", "--", *COMMAND, "validate"),
            *("--model", "tiny", "--machine", str(profile), "--gpus", "8", "--global-batch", "8"),
            *("--strategy", strategy, "--no-ors", "--steps", "3", "--recompute", "none"),
            *("--quiet", "--max-error", "0.25", "--max-regret", "0.15"),
        ],
        capture_output=True,
        text=True,
    )
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
