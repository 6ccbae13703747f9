"""The whole loop on three link levels: calibrate, suggest, run, compare."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.io.presets import load_cluster
from axonn_tune.io.yaml_files import save_yaml

pytest.importorskip("torch")
COMMAND = [sys.executable, "-m", "axonn_tune.cli.main"]
# What a noisy machine of two cores always keeps; docs/validate.md has what it usually reaches.
LIMITS = ["--max-error", "0.2", "--max-regret", "0.1"]


def three_times_faster(cluster):
    """Return a cluster of the same shape whose messages take a third of the time."""
    levels = [
        replace(level, bandwidth_bytes_per_s=3 * level.bandwidth_bytes_per_s)
        for level in cluster.levels
    ]
    return replace(cluster, levels=tuple(levels))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predictions_hold_on_frontier_mini(emulation, tmp_path, capsys):
    spec = str(tmp_path / "cluster.yaml")
    save_yaml(spec, three_times_faster(load_cluster("frontier-mini")))
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
        *("validate", "--machine", profile, "--grids", "spread:4", "--steps", "4", "--quiet"),
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
            *("--strategy", strategy, "--no-ors", "--steps", "4", "--recompute", "none"),
            *("--quiet", "--max-error", "0.25", "--max-regret", "0.15"),
        ],
        capture_output=True,
        text=True,
    )
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr
