"""``axonn-tune machines``: show, diff, expect."""

import json

import pytest
from command_line import assert_refused, run_cli
from figures import assert_drawn, svg_texts
from worlds import machine_of

from axonn_tune.io.yaml_files import save_yaml
from axonn_tune.report.table import WIDTH
from axonn_tune.spec.points import GemmPoint


def profile(path, factor=1.0):
    points = [
        GemmPoint(s, s, s, mode, "bf16", factor * 1e-4 * i, 0.01)
        for i, s in enumerate((128, 256, 512, 1024, 2048, 4096), 1)
        for mode in ("NN", "NT", "TN")
    ]
    save_yaml(path, machine_of(points=points))
    return str(path)


def test_diff_fails_only_where_something_got_worse(tmp_path, capsys):
    fast, slow = profile(tmp_path / "fast.yaml"), profile(tmp_path / "slow.yaml", 1.3)
    code, out, _ = run_cli(capsys, "machines", "diff", slow, fast, "--fail")
    assert code == 0 and "better" in out
    code, out, _ = run_cli(capsys, "machines", "diff", fast, slow, "--fail")
    assert code == 1 and "products NN bf16" in out and "worse" in out


def test_diff_as_json(tmp_path, capsys):
    path = profile(tmp_path / "a.yaml")
    _, out, _ = run_cli(capsys, "machines", "diff", path, path, "--format", "json")
    document = json.loads(out)
    assert document["schema_version"] == 1
    assert not any(change["is_significant"] for change in document["changes"])


def test_expect_prints_what_nccl_tests_would(capsys):
    expect = ["machines", "expect", "perlmutter"]
    sizes = ["--least", "1MiB", "--most", "4MiB"]
    _, out, _ = run_cli(capsys, *expect, "--nodes", "4", *sizes)
    assert "groups of 16 ranks, stride 1" in out and "4194304" in out and "busbw" in out
    _, out, _ = run_cli(capsys, *expect, "--ranks-per-node", "1", "--format", "json")
    document = json.loads(out)
    assert document["schema_version"] == 1
    first = document["collectives"][0]
    assert (first["stride"], first["size"], first["nbytes"]) == (4, 2, 1024)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--kind", "gossip"], "gossip"),
        (["--ranks-per-node", "3"], "divisor of 4"),
        (["--least", "1 GiB", "--most", "1 KiB"], "least <= most"),
        (["--least", "much"], "--least"),
    ],
)
def test_bad_input_of_expect_is_one_line(arguments, named, capsys):
    assert_refused(capsys, "machines", "expect", "perlmutter", *arguments, culprit=named)


def test_a_figure_of_measured_rates_has_their_curves(tmp_path, capsys):
    path = tmp_path / "figure.svg"
    run_cli(capsys, "machines", "show", profile(tmp_path / "a.yaml"), "--plot", path)
    assert_drawn(path)
    assert {"bf16 NN", "bf16 NT", "bf16 TN"} <= set(svg_texts(path))


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("gb200-nvl72-64", ["links.nvlink.hop_steps"]),
        ("perlmutter", ["links.slingshot.ring_steps", "links.slingshot.tree_steps"]),
        ("dgx2-1ib", []),
    ],
)
def test_measured_steps_are_shown_with_their_source(capsys, name, steps):
    lines = run_cli(capsys, "machines", "show", name)[1].splitlines()
    shown = [number for number, line in enumerate(lines) if "_steps " in line]
    assert [lines[number].split()[0] for number in shown] == steps
    assert all(lines[number].split()[2] == "points" for number in shown)
    assert all("NCCL" in "".join(lines[number : number + 4]) for number in shown)


@pytest.mark.parametrize("words", [("machines", "b200-simumax"), ("models", "deepseek-v3")])
def test_what_is_shown_fits_on_a_line(capsys, words):
    kind, name = words
    _, out, _ = run_cli(capsys, kind, "show", name)
    assert max(map(len, out.splitlines())) <= WIDTH


def test_expecting_more_nodes_than_there_are_says_so(capsys):
    def said(n_nodes):
        return run_cli(capsys, "machines", "expect", "perlmutter", "--nodes", n_nodes)[1]

    assert "perlmutter has no more than 1536 nodes (6144 GPUs)." in said("1537")
    assert "no more than" not in said("1536")
    of_one = run_cli(capsys, "machines", "expect", "perlmutter", "--ranks-per-node", "1")[1]
    assert "no more than" not in of_one


@pytest.mark.parametrize("plural", ["models", "machines"])
def test_a_list_shows_the_names_by_which_files_are_found(capsys, tmp_path, monkeypatch, plural):
    _, text, _ = run_cli(capsys, plural, "template")
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setenv("AXONN_TUNE_PATH", str(tmp_path))
    _, out, _ = run_cli(capsys, plural, "list")
    assert "mine " in out and "my-" not in out
    assert run_cli(capsys, plural, "show", "mine")[0] == 0
