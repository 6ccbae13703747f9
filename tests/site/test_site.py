"""The documentation builds without a warning, and its tutorials print what they show."""

import csv
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.cli.main import main
from axonn_tune.io.json_files import load_json, save_json
from axonn_tune.spec.validation import Validation

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = [*sorted((DOCS / "tutorials").glob("*.md")), DOCS / "experts.md"]
# A session is a command after a dollar sign and what it prints; "..." stands for any lines.
SESSION = re.compile(r"^```console\n\$ (?P<command>.+)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)
WRITE = os.environ.get("AXONN_TUNE_WRITE_GOLDEN")
ELLIPSIS = "..."


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run([*command, DOCS, tmp_path], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    index = (tmp_path / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        if "emulated" not in page.parts:
            name = page.relative_to(DOCS).with_suffix(".html")
            assert (tmp_path / name).exists()
            assert name.name == "index.html" or f'href="{name.as_posix()}"' in index


def printed_by(command, folder):
    """Return the lines that a command prints on its output and its error stream."""
    words = shlex.split(command)
    assert words[0] == "axonn-tune", "a tutorial shows this program"
    done = subprocess.run(
        [sys.executable, "-m", "axonn_tune.cli.main", *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return [line.rstrip() for line in done.stdout.splitlines()]


def cut(lines, shown):
    """Return the lines with an ellipsis in place of those that the shown lines leave out."""
    if ELLIPSIS not in shown:
        return lines
    place = shown.index(ELLIPSIS)
    n_after = len(shown) - place - 1
    return [*lines[:place], ELLIPSIS, *lines[len(lines) - n_after :]]


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_shows(tutorial, tmp_path):
    (tmp_path / "emulated").symlink_to(DOCS / "emulated")
    (tmp_path / "own-runs").symlink_to(DOCS / "tutorials" / "own-runs")
    text = tutorial.read_text()
    sessions = list(SESSION.finditer(text))
    assert len(sessions) == text.count("```console")
    for session in sessions:
        lines = printed_by(session["command"], tmp_path)
        shown = cut(lines, session["output"].splitlines())
        now = "\n".join(["```console", f"$ {session['command']}", *shown, "```"])
        if WRITE:
            text = text.replace(session[0], now)
        else:
            assert now == session[0], f"{tutorial.name}: {session['command']}"
    if WRITE:
        tutorial.write_text(text)


def weak_scaling():
    """Return the cells of each row of the worked example in plan.md."""
    table = (DOCS / "plan.md").read_text().split("| machine | GPUs |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


@pytest.mark.slow
def test_the_worked_example_of_weak_scaling_is_what_the_commands_say(tmp_path):
    text = (DOCS / "plan.md").read_text()
    shown = weak_scaling()
    commands = re.findall(r"^axonn-tune (scale --weak .+ --recompute full.*)$", text, re.MULTILINE)
    said = []
    for number, command in enumerate(commands):
        path = tmp_path / f"{number}.csv"
        main([*command.split(), "--format", "csv", "--output", str(path)])
        rows = list(csv.DictReader(path.read_text().splitlines()))
        first = float(rows[0]["hfu"])
        said += [
            (
                int(row["gpus"]),
                row["model"].removeprefix("gpt-").upper(),
                f"{int(row['gpus']) * float(row['hardware_tflops_per_gpu']) / 1e3:,.1f}",
                f"{100 * float(row['hfu']) / first:.0f} %",
            )
            for row in rows
        ]
    assert len(commands) == 3
    assert [(int(row[1].replace(",", "")), row[2], row[3], row[5]) for row in shown] == said


def test_the_sentence_about_weak_scaling_states_the_errors_of_its_table():
    errors = []
    for _, _, _, *rates, _, _ in weak_scaling():
        predicted, published = (
            float((rate.split() or ["nan"])[0].replace(",", "")) for rate in rates
        )
        errors.append(100 * (predicted / published - 1))
    first, *others = errors[:4]
    least, *slower = sorted(-error for error in errors[4:8] if not math.isnan(error))
    of_alps = errors[9]
    machines = {place: row[0] for place, row in enumerate(weak_scaling()) if row[0]}
    assert machines == {0: "Perlmutter", 4: "Frontier", 8: "Alps"}
    page = " ".join((DOCS / "plan.md").read_text().split())
    assert (
        f"On Perlmutter the smallest job is predicted {first:.0f} % too fast and the others "
        f"{min(others):.0f} to {max(others):.0f} %"
    ) in page
    assert (
        f"all jobs are predicted too slow: the smallest by {least:.0f} %, the large ones by "
        f"{slower[0]:.0f} to {slower[-1]:.0f} %"
    ) in page
    assert f"with which the job is predicted {of_alps:.0f} % too fast" in page


def test_the_first_page_states_the_range_of_the_errors_of_engines():
    page = (DOCS / "validation.md").read_text()
    table = page.split("## By strategy and engine")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w+, [^|]+) \| [^|]+ \| \d+ \| ([\d.]+) \|", table, re.MULTILINE)
    # The last row of an engine counts all its numbers.
    means = {name: float(mean) for name, mean in rows}.values()
    index = " ".join((DOCS / "index.md").read_text().split())
    assert len(means) > 20
    assert (
        f"The mean errors of single engines lie between {min(means):.0f} % and {max(means):.0f} %"
    ) in index


def test_the_evidence_is_laid_out_as_save_json_writes_it(tmp_path):
    records = sorted((DOCS / "emulated").glob("*.json"))
    for record in records:
        written = tmp_path / record.name
        save_json(written, load_json(record, Validation))
        assert written.read_text() == record.read_text(), record.name
    assert len(records) == 26


def test_the_page_of_the_cost_model_names_each_module_that_prices_and_none_that_is_missing():
    page = (DOCS / "cost-model.md").read_text()
    package = DOCS.parent / "axonn_tune"
    rooms = "cost|search|simulate|spec|step|strategies"
    named = set(re.findall(rf"`((?:{rooms})/\w+\.py)`", page))
    assert {name for name in named if not (package / name).exists()} == set()
    modules = {f"cost/{path.name}" for path in (package / "cost").glob("[a-z]*.py")}
    assert modules - named == set()
