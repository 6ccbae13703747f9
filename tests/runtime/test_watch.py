"""Ranks whose host cannot be interrupted: they end in time, with one line and exit code 2."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ended, environment, torchrun_environments

pytest.importorskip("torch")

from axonn_tune.runtime.ranks import watch

PROGRAM = str(Path(__file__).with_name("watched_ranks.py"))
ON_FIRE = "rank 1 failed: ValueError: the disk is on fire"


def start(how, variables):
    return subprocess.Popen(
        [sys.executable, PROGRAM, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )


def given_ranks(how):
    return [start(how, variables) for variables in torchrun_environments(2)]


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_ends_when_another_one_fails():
    first, second = map(ended, given_ranks("raise"))
    assert second == (2, "can meet again: False\n", f"axonn-tune: {ON_FIRE}\n")
    assert first == (2, f"{ON_FIRE}\n", "")  # it keeps the reason, and does not repeat it


@pytest.mark.slow
def test_ranks_that_all_fail_can_meet_again():
    first, second = map(ended, given_ranks("both"))
    for code, output, _ in (first, second):
        assert (code, output) == (2, "can meet again: True\n")
    assert (first[2] + second[2]).count("failed: ValueError: the disk is on fire") == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "stop", "join"])
def test_one_rank_says_that_nothing_ends(how):
    ranks = given_ranks(how)
    code, _, errors = ended(ranks[0])
    if how == "stop":
        ranks[1].send_signal(signal.SIGCONT)
    other_code, _, other_errors = ended(ranks[1])
    assert (code, other_code) == (2, 2)
    assert (errors + other_errors).count("\n") == 1
    assert "failed: nothing has ended for 4 s; another rank hangs or has died" in (
        errors + other_errors
    )


@pytest.mark.slow
def test_ranks_that_are_started_here_end_with_the_reason():
    code, _, errors = ended(start("raise", environment()))
    assert (code, errors) == (2, f"axonn-tune: {ON_FIRE}\n")


def test_a_late_rank_is_silent_where_the_store_has_just_ended(monkeypatch, capsys):
    class EndedStore:
        def check(self, keys):
            return False

        def compare_set(self, key, expected, value):
            raise RuntimeError("connection reset")

    codes = []
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(watch.os, "_exit", codes.append)
    watch.Watch(EndedStore(), rank=1, n_ranks=2, timeout_seconds=0.0)._thread.join()
    assert codes == [2] and capsys.readouterr().err == ""
