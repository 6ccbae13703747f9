"""Steps of AxoNN itself on an emulated cluster, against the prediction from the profile of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("axonn")
ROOT = Path(__file__).parents[2]
STEPS = Path(__file__).with_name("axonn_steps.py")
GRIDS = ("2x2x2x1", "1x2x4x1", "1x1x2x4", "1x4x2x1", "2x1x1x4", "2x2x1x2")
LARGEST_MEAN_ERROR = 0.2


def predicted_and_measured(**overlap):
    """Both for each grid, on frontier-mini with the profile that docs/emulated has of it."""
    profile = str(ROOT / "docs" / "emulated" / "frontier-mini.yaml")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "axonn_tune.cli.main", "emulate", "--spec", "frontier-mini"),
            *("--", sys.executable, str(STEPS), profile, json.dumps(overlap), *GRIDS),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {grid: seconds for grid, *seconds in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", [{}, {"oag": False}], ids=["all", "no gather ahead"])
def test_steps_of_axonn_are_predicted(emulation, capsys, overlap):
    """Without gathers ahead, the plan says of every gather what AxoNN does."""
    steps = predicted_and_measured(**overlap)
    predicted, measured = np.array([steps[grid] for grid in GRIDS]).T
    errors = predicted / measured - 1.0
    with capsys.disabled():
        for grid, error in zip(GRIDS, errors, strict=True):
            print(f"\n{grid}: predicted {steps[grid][0]:.3f} s, {error:+.1%}", end="")
        print(f"\nmean error {np.abs(errors).mean():.1%}")
    assert np.abs(errors).mean() < LARGEST_MEAN_ERROR
