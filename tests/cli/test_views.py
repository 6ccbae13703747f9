"""What shows rather than lists: plots, pages, traces, scaling, what-if, plans; colors, progress."""

import csv
import io
import json
import sys

import pytest
from recorded import MEASUREMENT

from axonn_tune.cli.main import COMMANDS, cli, main
from axonn_tune.cli.progress import Progress

JOB = ["--gpus", "64", "--model", "5b", "--global-batch", "128", "--recompute", "full"]


def said(capsys, *arguments):
    """Exit code, stdout and stderr."""
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as ended:
        code = ended.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def is_figure(path):
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    content = path.read_bytes()
    return content.startswith(starts[path.suffix]) and len(content) > 5000


PLOTS = {
    "suggest": [*JOB, "--top-n", "4"],
    "explain": [*JOB, "--grid", "1x4x8x2"],
    "scale": ["--model", "5b", "--gpus", "32..128", "--global-batch", "128"],
}


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("suggest", "png"),
        ("suggest", "pdf"),
        ("suggest", "svg"),
        ("explain", "svg"),
        ("scale", "svg"),
    ],
)
def test_plots(capsys, tmp_path, name, ending):
    path = tmp_path / f"figure.{ending}"
    code, out, _ = said(capsys, name, *PLOTS[name], "--plot", path)
    _, without, _ = said(capsys, name, *PLOTS[name])
    assert code == 0 and out == without and is_figure(path)


def test_a_plot_of_a_pipeline_draws_its_ranks(capsys, tmp_path):
    path = tmp_path / "step.svg"
    layout = ["--strategy", "megatron", "--grid", "tensor=4,data=4,pipeline=4"]
    code, _, _ = said(capsys, "explain", *JOB, *layout, "--plot", path)
    assert code == 0 and "pipeline rank 3" in path.read_text()


@pytest.mark.parametrize("name", [*PLOTS, "reproduce", "machines"])
def test_a_plot_that_cannot_be_drawn_says_so_before_the_work(capsys, monkeypatch, name, tmp_path):
    arguments = {"machines": ["show", "alps"], "reproduce": []}.get(name, PLOTS.get(name))
    code, _, err = said(capsys, name, *arguments, "--plot", tmp_path / "figure.gif")
    assert code == 2 and ".png, .svg, .pdf" in err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = said(capsys, name, *arguments, "--plot", tmp_path / "figure.png")
    assert code == 2 and "pip install 'axonn-tune[plot]'" in err and err.count("\n") == 1


def test_one_strategy_is_drawn_at_a_time(capsys, tmp_path):
    path = tmp_path / "figure.svg"
    code, _, err = said(capsys, "suggest", *JOB, "--strategy", "all", "--plot", path)
    assert code == 2 and "--plot" in err and not path.exists()


def test_a_page_beside_a_ranking(capsys, tmp_path):
    page = tmp_path / "report.html"
    code, out, _ = said(capsys, "suggest", *JOB, "--html", page)
    assert code == 0 and page.read_text().startswith("<!doctype html>")
    assert out == said(capsys, "suggest", *JOB)[1]


def test_a_page_needs_a_validation_of_its_candidates(capsys, tmp_path):
    code, _, err = said(capsys, "report", *JOB, "--validation", tmp_path / "none.json")
    assert code == 2 and "none.json" in err
    code, _, err = said(
        capsys, "report", *JOB, "--details", "1", "--output", tmp_path / "no" / "page.html"
    )
    assert code == 2 and "page.html" in err


def test_a_trace_holds_the_predicted_step(capsys, tmp_path):
    path = tmp_path / "trace.json"
    code, _, err = said(capsys, "trace", *JOB, "--grid", "1x4x8x2", "--output", path)
    assert code == 0 and "ui.perfetto.dev" in err
    events = json.loads(path.read_text())["traceEvents"]
    ends = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1e6
    _, out, _ = said(capsys, "explain", *JOB, "--grid", "1x4x8x2", "--format", "json")
    assert ends == pytest.approx(json.loads(out)["prediction"]["step_seconds"])
    assert {e["ph"] for e in events} == {"X", "M", "s", "f"}


def test_a_trace_takes_a_recorded_step_of_the_same_grid_only(capsys, tmp_path):
    from axonn_tune.io.json_files import save_json

    record = tmp_path / "run.json"
    save_json(record, MEASUREMENT)
    path, job = tmp_path / "trace.json", ["--gpus", "2", "--model", "tiny", "--global-batch", "2"]
    grid = str(MEASUREMENT.grid)
    arguments = ["--measured", record, "--output", path]
    code, _, _ = said(capsys, "trace", *job, "--grid", grid, *arguments)
    assert code == 0
    events = json.loads(path.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [title.split()[0] for title in titles] == ["predicted:", "measured"]
    n_measured = sum(e["ph"] == "X" and e["pid"] == 1 for e in events)
    assert n_measured == len(MEASUREMENT.last_step)
    code, _, err = said(capsys, "trace", *job, "--grid", "1x1x1x2", *arguments)
    assert code == 2 and f"is of grid {grid}" in err


def test_scaling_in_every_format(capsys):
    arguments = ["--model", "5b", "--gpus", "32..128", "--global-batch", "128"]
    _, text, _ = said(capsys, "scale", *arguments)
    rows = list(
        csv.DictReader(io.StringIO(said(capsys, "scale", *arguments, "--format", "csv")[1]))
    )
    document = json.loads(said(capsys, "scale", *arguments, "--format", "json")[1])
    assert [row["gpus"] for row in rows] == ["32", "64", "128"]
    assert [r["efficiency"] for r in document["results"]] == pytest.approx(
        [float(row["efficiency"]) for row in rows]
    )
    assert document["results"][0]["efficiency"] == 1.0
    for row in rows:
        assert f"{float(row['step_seconds']):.3f}" in text


def test_weak_scaling_grows_the_model_or_the_batch(capsys):
    weak = ["scale", "--weak", "5b,10b", "--gpus", "64,128", "--format", "json"]
    _, out, _ = said(capsys, *weak)
    assert [r["model"] for r in json.loads(out)["results"]] == ["gpt-5b", "gpt-10b"]
    batch = ["scale", "--model", "5b", "--gpus", "32,64", "--batch-per-gpu", "4"]
    _, out, _ = said(capsys, *batch, "--format", "json")
    assert [r["global_batch"] for r in json.loads(out)["results"]] == [128, 256]
    assert "growing to 256 sequences" in said(capsys, *batch)[1]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--gpus", "32..64"], "--weak"),
        (["--gpus", "32..64", "--model", "5b", "--weak", "5b,10b"], "--weak"),
        (["--gpus", "32..64", "--weak", "5b"], "1 models for 2 counts"),
        (["--gpus", "64..32", "--model", "5b"], "--gpus 64..32"),
        (["--gpus", "2,4", "--model", "80b"], "fits on no grid"),
        (
            ["--gpus", "32,64", "--model", "5b", "--batch-per-gpu", "1", "--global-batch", "64"],
            "--batch-per-gpu",
        ),
    ],
)
def test_bad_scalings_are_one_line(capsys, arguments, culprit):
    code, out, err = said(capsys, "scale", *arguments)
    assert code == 2 and out == "" and culprit in err and err.count("\n") == 1


def test_what_if_says_what_changes(capsys):
    settings = ["--set", "gpu=h200", "--set", "inter_node.bandwidth=2x"]
    _, out, _ = said(capsys, "whatif", *JOB, *settings)
    found = json.loads(said(capsys, "whatif", *JOB, *settings, "--format", "json")[1])
    before, after = (found["what_if"][which]["step_seconds"] for which in ("before", "after"))
    assert f"The best step takes {100 * (after / before - 1):+.1f} %" in out and "of 139" in out
    assert f"{before:.3f}" in out and f"{after:.3f}" in out
    assert found["influences"] == [] and found["settings"] == settings[1::2]
    _, table, _ = said(capsys, "whatif", *JOB, *settings, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [row["machine"] for row in rows] == ["as it is", "changed", "layout kept"]
    assert float(rows[1]["step_seconds"]) == pytest.approx(after)


def test_sensitivities_list_every_parameter(capsys, tmp_path):
    table = tmp_path / "table.csv"
    said(capsys, "whatif", *JOB, "--by", "2", "--format", "csv", "--output", table)
    rows = {row["parameter"]: row for row in csv.DictReader(io.StringIO(table.read_text()))}
    assert {"gpu.compute", "gpu.memory", "slingshot.bandwidth", "nvlink.latency"} <= set(rows)
    assert float(rows["gpu.compute"]["more_change_fraction"]) < -0.1


@pytest.mark.parametrize("setting", ["warp=2x", "gpu=tpu", "gpu.memory=-1", "slingshot.bandwidth"])
def test_bad_settings_are_one_line(capsys, setting):
    code, out, err = said(capsys, "whatif", *JOB, "--set", setting)
    assert code == 2 and out == "" and err.count("\n") == 1 and setting.split("=")[0] in err


@pytest.mark.parametrize("factor", ["1", "inf", "nan", "1e300"])
def test_bad_factors_are_one_line(capsys, factor):
    code, out, err = said(capsys, "whatif", *JOB, "--by", factor)
    assert code == 2 and out == "" and err.count("\n") == 1 and "--by" in err


def test_a_plan_in_every_format(capsys):
    arguments = [
        "plan",
        "--model",
        "5b",
        "--tokens",
        "100B",
        "--gpus",
        "64",
        "--global-batch",
        "512",
    ]
    _, text, _ = said(capsys, *arguments, "--node-hour-price", "10EUR", "--node-power", "2kW")
    document = json.loads(said(capsys, *arguments, "--format", "json")[1])
    (run,) = document["runs"]
    assert f"{10 * run['node_hours']:,.0f} EUR" in text
    assert f"{run['node_hours'] * 2e-3:.0f} MWh" in text
    assert run["tokens"] == 100e9 and run["cost"] is None
    (row,) = csv.DictReader(io.StringIO(said(capsys, *arguments, "--format", "csv")[1]))
    assert float(row["wall_seconds"]) == pytest.approx(run["wall_seconds"])


def test_a_plan_finds_the_gpus_for_a_deadline_and_hints_at_tokens(capsys):
    _, text, _ = said(capsys, "plan", "--model", "5b", "--deadline", "10d")
    assert "20 for each parameter" in text
    days = float(next(line for line in text.splitlines() if line.startswith("time")).split()[1])
    assert days <= 10
    _, text, _ = said(capsys, "plan", "--model", "5b", "--gpus", "16384")
    assert "perlmutter has no more than 1536 nodes" in text


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ([], "--deadline"),
        (["--gpus", "64", "--deadline", "30d"], "--gpus"),
        (["--gpus", "64", "--tokens", "many"], "--tokens"),
        (["--gpus", "64", "--tokens", "0"], "--tokens"),
        (["--gpus", "64", "--tokens", "1e400"], "--tokens"),
        (["--gpus", "64", "--gpu-mtbf", "1s"], "too often to end"),
        (["--deadline", "soon"], "--deadline"),
        (["--deadline", "1ms"], "--deadline"),
        (["--gpus", "64", "--gpu-mtbf", "-1d"], "--gpu-mtbf"),
        (["--gpus", "64", "--node-hour-price", "20"], "--node-hour-price"),
        (["--gpus", "64", "--node-power", "2 km"], "--node-power"),
    ],
)
def test_bad_plans_are_one_line(capsys, arguments, culprit):
    code, out, err = said(capsys, "plan", "--model", "5b", *arguments)
    assert code == 2 and out == "" and culprit in err and err.count("\n") == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colors_are_for_terminals_and_honour_no_color(monkeypatch):
    def printed():
        monkeypatch.setattr(sys, "stdout", Terminal())
        main(["suggest", *JOB])
        return sys.stdout.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = printed()
    assert "\x1b[1m" in colored
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed()
    assert "\x1b" not in plain and "G_data" in plain


def test_progress_shows_after_two_seconds_on_a_terminal_only(monkeypatch):
    def shown(terminal, quiet=False, patience=0.0):
        monkeypatch.setattr("axonn_tune.cli.progress.PATIENCE_SECONDS", patience)
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(Progress("Working", quiet)([1, 2, 3])) == [1, 2, 3]
        return terminal.getvalue()

    assert "Working" in shown(Terminal())
    assert shown(Terminal(), quiet=True) == ""
    assert shown(Terminal(), patience=60.0) == ""
    assert shown(io.StringIO()) == ""


def all_commands():
    for name in COMMANDS:
        command = cli.get_command(None, name)
        below = getattr(command, "commands", {})
        yield from ([name, each] for each in below) if below else [[name]]


@pytest.mark.parametrize("names", list(all_commands()), ids=" ".join)
def test_every_help_text_has_an_example_of_its_command(capsys, names):
    code, out, _ = said(capsys, *names, "--help")
    assert code == 0 and f"axonn-tune {' '.join(names)}" in out.split("Example", 1)[1]
