"""The example in the docs: a text file, a falling loss, a checkpoint, another grid."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep

EXAMPLE = Path(__file__).parents[2] / "docs/examples/train_text.py"
TEXT = "It was the best of times, it was the worst of times. " * 40


def losses(n_ranks, *arguments):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, f"--nproc-per-node={n_ranks}", str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", done.stdout, re.M)]


def test_training_goes_on_from_a_checkpoint_on_another_grid(tmp_path):
    text, saved = tmp_path / "text", str(tmp_path / "saved")
    text.write_text(TEXT)
    whole = losses(2, str(text), "--grid", "2x1x1x1", "--steps", "20")
    assert len(whole) == 20 and whole[-1] < 0.6 * whole[0]
    first = losses(2, str(text), "--grid", "1x1x2x1", "--steps", "8", "--save", saved)
    second = losses(4, str(text), "--grid", "1x2x1x2", "--steps", "20", "--load", saved)
    assert first + second == pytest.approx(whole, abs=2e-4)
