"""Colors and progress, which are for terminals only."""

import io
import sys

from axonn_tune.cli import progress
from axonn_tune.cli.main import main


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colors_are_for_terminals_and_honour_no_color(monkeypatch):
    def printed():
        monkeypatch.setattr(sys, "stdout", Terminal())
        main(["suggest", "--gpus", "8", "--model", "tiny"])
        return sys.stdout.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    colored = printed()
    assert "\x1b[1m" in colored
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed()
    assert "\x1b" not in plain and "G_data" in plain


def test_progress_shows_after_two_seconds_on_a_terminal_only(monkeypatch):
    def shown(terminal, quiet=False, patience=0.0):
        monkeypatch.setattr(progress, "PATIENCE_SECONDS", patience)
        monkeypatch.setattr(sys, "stderr", terminal)
        assert list(progress.Progress("Working", quiet)([1, 2, 3])) == [1, 2, 3]
        return terminal.getvalue()

    assert "Working" in shown(Terminal())
    assert shown(Terminal(), quiet=True) == ""
    assert shown(Terminal(), patience=60.0) == ""
    assert shown(io.StringIO()) == ""


def test_a_table_takes_the_width_of_the_terminal_and_a_file_stays_as_it_is(
    capsys, monkeypatch, tmp_path
):
    """MFU and tokens/s fell out of every table, however wide the terminal."""
    path = tmp_path / "table.txt"
    words = ["compare", "--gpus", "8", "--model", "llama3-8b", "--machine", "dgx-h100"]
    words += ["--strategies", "zero3", "--global-batch", "64", "--recompute", "full"]

    def printed(columns=None, output=()):
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        main([*words, *output])
        return capsys.readouterr().out

    usual = printed()
    assert "Columns left out" in usual and "tokens/s" not in usual.split("Columns left")[0]
    assert max(map(len, usual.splitlines()[2:5])) <= 100
    wide = printed("200")
    assert "left out for lack" not in wide and "  tokens/s  exposed  " in wide
    assert printed("20") == usual
    printed("200", ["--output", str(path)])
    assert path.read_text() == usual
