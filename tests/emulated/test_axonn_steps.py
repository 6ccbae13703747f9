"""Steps of AxoNN itself on an emulated cluster, against the prediction from the profile of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("axonn")
STEPS = Path(__file__).with_name("axonn_steps.py")
GRIDS = ("2x2x2x1", "1x2x4x1", "1x1x2x4", "1x4x2x1", "2x1x1x4", "2x2x1x2")
# The plan does not know yet in what AxoNN differs from it; docs/validate.md has the usual errors.
LARGEST_MEAN_ERROR = 0.2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_of_axonn_are_predicted(emulation, capsys):
    """On frontier-mini, with the profile that docs/emulated has of it."""
    profile = str(STEPS.parents[2] / "docs" / "emulated" / "frontier-mini.yaml")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "axonn_tune.cli.main", "emulate", "--spec", "frontier-mini"),
            *("--", sys.executable, str(STEPS), profile, "{}", *GRIDS),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    errors = {}
    for grid, predicted, measured in map(json.loads, done.stdout.splitlines()):
        errors[grid] = predicted / measured - 1.0
    mean_error = np.abs(list(errors.values())).mean()
    with capsys.disabled():
        shown = ", ".join(f"{grid}: {error:+.1%}" for grid, error in errors.items())
        print(f"\nerrors of the step: {shown}; mean {mean_error:.1%}")
    assert list(errors) == list(GRIDS) and mean_error < LARGEST_MEAN_ERROR
