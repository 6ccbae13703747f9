"""``axonn-tune whatif``: what another machine would change."""

import csv
import io
import json

import pytest
from command_line import assert_refused, run_cli

JOB = ["--gpus", "64", "--model", "5b", "--global-batch", "128", "--recompute", "full"]


def change_text(ratio):
    """Return how a step is said to differ from another one."""
    change = f"{100 * abs(ratio - 1):.1f}"
    return "as long" if change == "0.0" else f"{change} % {'less' if ratio < 1 else 'more'} time"


@pytest.mark.slow
def test_what_if_says_what_changes(capsys):
    settings = ["--set", "gpu=h200", "--set", "inter_node.bandwidth=2x"]
    _, out, _ = run_cli(capsys, "whatif", *JOB, *settings)
    _, as_json, _ = run_cli(capsys, "whatif", *JOB, *settings, "--format", "json")
    found = json.loads(as_json)
    before, after = (found["what_if"][which]["step_seconds"] for which in ("before", "after"))
    assert f"The best step takes {change_text(after / before)}" in out and "of 140" in out
    assert f"{before:.3f}" in out and f"{after:.3f}" in out
    assert found["influences"] == [] and found["settings"] == settings[1::2]
    _, table, _ = run_cli(capsys, "whatif", *JOB, *settings, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["machine"] for row in rows] == ["as it is", "changed", "layout kept"]
    assert float(rows[1]["step_seconds"]) == pytest.approx(after)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("inter_node.bandwidth=2x", "On dgx-h100: infiniband.bandwidth 388 GB/s becomes 776 GB/s."),
        ("jitter=-50%", "On dgx-h100: jitter 0.03 becomes 0.015."),
    ],
)
def test_the_numbers_before_and_after_a_change_are_said(capsys, setting, said):
    _, out, _ = run_cli(capsys, "whatif", *JOB, "--machine", "dgx-h100", "--set", setting)
    assert out.splitlines()[1] == said
    nothing = ["--set", "inter_node.bandwidth=1x"]
    _, out, _ = run_cli(capsys, "whatif", *JOB, "--machine", "dgx-h100", *nothing)
    assert "becomes" not in out and out.splitlines()[1] == ""


def test_sensitivities_list_every_parameter(capsys, tmp_path):
    table = tmp_path / "table.csv"
    run_cli(capsys, "whatif", *JOB, "--by", "2", "--format", "csv", "--output", table)
    rows = {row["parameter"]: row for row in csv.DictReader(io.StringIO(table.read_text()))}
    assert {"gpu.compute", "gpu.memory", "slingshot.bandwidth", "nvlink.latency"} <= set(rows)
    assert float(rows["gpu.compute"]["more_change_fraction"]) < -0.1


@pytest.mark.parametrize(
    ("setting", "changes"),
    [("gpu.memory=2x", "layout"), ("inter_node.bandwidth=2x", "configuration")],
)
def test_what_changes_is_named_and_both_changes_are_of_the_former_step(capsys, setting, changes):
    job = ["--gpus", "4096", "--model", "80b", "--set", setting]
    _, as_json, _ = run_cli(capsys, "whatif", *job, "--format", "json")
    before, after, kept = (
        json.loads(as_json)["what_if"][which] for which in ("before", "after", "kept")
    )
    assert (before["grid"] == after["grid"]) == (changes == "configuration")
    change, of_kept = (
        change_text(each["step_seconds"] / before["step_seconds"]) for each in (after, kept)
    )
    _, out, _ = run_cli(capsys, "whatif", *job)
    assert (
        f"The best step takes {change}; the {changes} changes, and with the old one it would "
        f"take {of_kept}." in out
    )


@pytest.mark.parametrize("setting", ["warp=2x", "gpu=tpu", "gpu.memory=-1", "slingshot.bandwidth"])
def test_bad_settings_are_one_line(capsys, setting):
    culprit = setting.split("=")[0]
    assert_refused(capsys, "whatif", *JOB, "--set", setting, culprit=culprit)


@pytest.mark.parametrize("factor", ["1", "inf", "nan", "1e300"])
def test_bad_factors_are_one_line(capsys, factor):
    assert_refused(capsys, "whatif", *JOB, "--by", factor, culprit="--by")


def test_changed_virtual_stages_are_told_of(capsys):
    """A faster GPU makes fewer virtual stages the best ones of the same layout."""
    job = ["--gpus", "640", "--model", "llama3-70b", "--machine", "alps", "--strategy", "megatron"]
    job += ["--fix", "tensor=4", "--fix", "pipeline=4", "--fix", "context=1"]
    _, out, _ = run_cli(capsys, "whatif", *job, "--set", "gpu.compute=1.3x")
    _, as_json, _ = run_cli(capsys, "whatif", *job, "--set", "gpu.compute=1.3x", "--format", "json")
    found = json.loads(as_json)["what_if"]
    stages = [found[which]["n_virtual"] for which in ("before", "after", "kept")]
    assert stages[0] != stages[1]
    lines = out.splitlines()
    end = lines[3].index("virtual") + len("virtual")
    assert [int(line[:end].split()[-1]) for line in lines[5:8]] == stages
    _, out, _ = run_cli(capsys, "whatif", *job, "--by", "1.3")
    assert f"virtual {stages[1]}, mbs" in out


def test_a_change_that_changes_nothing_says_so(capsys):
    _, out, _ = run_cli(capsys, "whatif", *JOB, "--set", "gpu.memory=1.0001x")
    assert "The best step takes as long; the layout stays." in out


def test_a_kept_layout_has_no_rivals(capsys):
    """docs/json.md said null."""
    words = ["--gpus", "8", "--model", "tiny", "--global-batch", "8", "--format", "json"]
    _, text, _ = run_cli(capsys, "whatif", *words, "--set", "inter_node.bandwidth=2x")
    assert json.loads(text)["what_if"]["kept"]["p_best"] == 1.0
