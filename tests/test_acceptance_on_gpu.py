"""The command that runs the tests on a GPU, tried on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent


def accept(*arguments, folder):
    """Run the command elsewhere, and without an installed axonn-tune on the way to its ranks."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/gpu/accept"), *arguments, "--output", "gpu"],
        cwd=folder,
        env=environment(GPU_TESTS_ON="cpu"),
        capture_output=True,
        text=True,
    )
    pages = list((folder / "gpu").glob("*.md"))
    return done, pages[0].read_text() if pages else ""


@pytest.mark.slow
def test_one_part_runs_and_its_facts_stand_on_the_page(tmp_path):
    done, page = accept("recorder", "--minutes", "5", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| recorder | 4 passed, 4 skipped" in page
    assert "operations and standstills sum up to the step[4]: batch 4, step_ms" in page


def test_parts_that_have_no_time_left_are_listed_as_not_run(tmp_path):
    done, page = accept("shared", "rates", "--minutes", "0", folder=tmp_path)
    assert done.returncode == 1
    assert [line for line in page.splitlines() if "not run" in line] == [
        "| shared | not run, since the time was over |",
        "| rates | not run, since the time was over |",
    ]


def test_a_part_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    done, _ = accept("speeed", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("accept: no part speeed; allowed: recorder, rates, product")
