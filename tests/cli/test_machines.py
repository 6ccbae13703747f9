"""``axonn-tune machines``: show, diff, expect."""

import builtins
import json

import pytest
from worlds import machine_of

from axonn_tune.cli.main import main
from axonn_tune.io.yaml_files import save_yaml
from axonn_tune.spec.points import GemmPoint


def profile(path, factor=1.0):
    points = [
        GemmPoint(s, s, s, mode, "bf16", factor * 1e-4 * i, 0.01)
        for i, s in enumerate((128, 256, 512, 1024, 2048, 4096), 1)
        for mode in ("NN", "NT", "TN")
    ]
    save_yaml(path, machine_of(points=points))
    return str(path)


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_diff_fails_only_where_something_got_worse(tmp_path, capsys):
    fast, slow = profile(tmp_path / "fast.yaml"), profile(tmp_path / "slow.yaml", 1.3)
    main(["machines", "diff", slow, fast, "--fail"])
    assert "better" in capsys.readouterr().out
    assert call("machines", "diff", fast, slow, "--fail") == 1
    out = capsys.readouterr().out
    assert "products NN bf16" in out and "worse" in out


def test_diff_as_json(tmp_path, capsys):
    path = profile(tmp_path / "a.yaml")
    main(["machines", "diff", path, path, "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    assert not any(change["is_significant"] for change in document["changes"])


def test_expect_prints_what_nccl_tests_would(capsys):
    main(["machines", "expect", "perlmutter", "--nodes", "4", "--least", "1MiB", "--most", "4MiB"])
    out = capsys.readouterr().out
    assert "groups of 16 ranks, stride 1" in out and "4194304" in out and "busbw" in out
    main(["machines", "expect", "perlmutter", "--ranks-per-node", "1", "--format", "json"])
    first = json.loads(capsys.readouterr().out)["collectives"][0]
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
    assert call("machines", "expect", "perlmutter", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_figure_of_measured_and_of_published_rates(tmp_path, ending, capsys):
    pytest.importorskip("matplotlib")
    for name in (profile(tmp_path / "a.yaml"), "frontier"):
        path = tmp_path / f"figure.{ending}"
        main(["machines", "show", name, "--plot", str(path)])
        assert path.stat().st_size > 5000
        path.unlink()


def test_a_figure_needs_a_known_ending_and_matplotlib(tmp_path, capsys, monkeypatch):
    assert call("machines", "show", "frontier", "--plot", "rates.doc") == 2
    assert "allowed endings: .png, .svg, .pdf" in capsys.readouterr().err
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name="matplotlib")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    assert call("machines", "show", "frontier", "--plot", str(tmp_path / "a.png")) == 2
    assert "pip install 'axonn-tune[plot]'" in capsys.readouterr().err
