"""The whole loop on three link levels: calibrate, suggest, run, compare."""

import subprocess
import sys
from pathlib import Path

import pytest
from emulated.clusters import faster_cluster

pytest.importorskip("torch")
COMMAND = [sys.executable, "-m", "axonn_tune.cli.main"]
# What a noisy machine of two cores always keeps; docs/validate.md has what it usually reaches.
LIMITS = ["--max-error", "0.2", "--max-regret", "0.1"]
# The links have three times the rates of the shipped cluster, to take a third of the time.
FASTER = 3.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predictions_hold_on_frontier_mini(emulation, tmp_path, capsys):
    spec = faster_cluster("frontier-mini", FASTER, tmp_path)
    profile = str(tmp_path / "mini.yaml")
    search = ["--model", "tiny", "--gpus", "8", "--global-batch", "8"]

    def on_all_ranks(*command):
        return subprocess.run(
            [*COMMAND, "emulate", "--spec", spec, "--", *COMMAND, *command],
            capture_output=True,
            text=True,
        )

    few = ["--quick", "--most-shapes", "5", "--quiet"]
    calibrated = on_all_ranks("calibrate", "--output", profile, *few, *search)
    assert calibrated.returncode == 0, calibrated.stderr
    assert "package: joins" in calibrated.stdout and "intra-node: joins" in calibrated.stdout
    validated = on_all_ranks(
        *("validate", "--machine", profile, "--grids", "spread:4", "--steps", "3", "--quiet"),
        *LIMITS,
        *search,
    )
    with capsys.disabled():
        print(f"\n{validated.stdout}")
    assert validated.returncode == 0, validated.stderr


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
