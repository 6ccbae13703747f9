"""The whole loop on three link levels: calibrate, suggest, run, compare."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulated.clusters import faster_cluster

pytest.importorskip("torch")
COMMAND = [sys.executable, "-m", "axonn_tune.cli.main"]
# What a noisy machine of two cores always keeps; docs/validate.md has what it usually reaches.
LIMITS = ["--max-error", "0.2", "--max-regret", "0.1"]
# The links have three times the rates of the shipped cluster, to take a third of the time.
FASTER = 3.0


SEARCH = ["--model", "tiny", "--gpus", "8", "--global-batch", "8"]
AXONN_STEPS = Path(__file__).with_name("axonn_steps.py")
AXONN_GRIDS = ("2x2x2x1", "1x2x4x1", "1x1x2x4", "1x4x2x1", "2x1x1x4", "2x2x1x2")


def on_all_ranks(spec, *command):
    return subprocess.run(
        [*COMMAND, "emulate", "--spec", spec, "--", *command], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def calibrated(emulation, tmp_path_factory):
    """The path of a cluster's spec, and that of a profile that was calibrated on it."""
    folder = tmp_path_factory.mktemp("mini")
    spec = faster_cluster("frontier-mini", FASTER, folder)
    profile = str(folder / "mini.yaml")
    few = ["--quick", "--most-shapes", "5", "--quiet"]
    done = on_all_ranks(spec, *COMMAND, "calibrate", "--output", profile, *few, *SEARCH)
    assert done.returncode == 0, done.stderr
    assert "package: joins" in done.stdout and "intra-node: joins" in done.stdout
    return spec, profile


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predictions_hold_on_frontier_mini(calibrated, capsys):
    spec, profile = calibrated
    validated = on_all_ranks(
        *(spec, *COMMAND, "validate", "--machine", profile, "--grids", "spread:4"),
        *("--steps", "3", "--quiet", *LIMITS, *SEARCH),
    )
    with capsys.disabled():
        print(f"\n{validated.stdout}")
    assert validated.returncode == 0, validated.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_of_axonn_itself_are_predicted(calibrated, capsys):
    """The prediction is that of the engine AxoNN 0.2.0."""
    pytest.importorskip("axonn")
    spec, profile = calibrated
    done = on_all_ranks(spec, sys.executable, str(AXONN_STEPS), profile, "{}", *AXONN_GRIDS)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    errors = {grid: predicted / measured - 1.0 for grid, predicted, measured in steps}
    mean_error = np.abs(list(errors.values())).mean()
    with capsys.disabled():
        shown = ", ".join(f"{grid}: {error:+.1%}" for grid, error in errors.items())
        print(f"\nerrors of AxoNN's step: {shown}; mean {mean_error:.1%}")
    assert list(errors) == list(AXONN_GRIDS) and mean_error < 0.2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["hsdp", "megatron-tp"])
def test_predictions_of_torch_s_own_parallelism_hold(emulation, capsys, strategy):
    """On flat-8, with the profile that docs/emulated has of it."""
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
