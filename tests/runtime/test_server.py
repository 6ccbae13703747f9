"""The server from which ranks are forked."""

import os
from functools import partial

import pytest

pytest.importorskip("torch")

from axonn_tune.runtime.ranks.launch import launch

NAME = "AXONN_TUNE_TEST"


def variables(default, request, place):
    return os.environ.get(request, default), os.environ["RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.slow
def test_ranks_have_the_environment_that_their_launcher_has_now(monkeypatch):
    """The server keeps the one that it was started with."""
    for value in ("first", "second"):
        monkeypatch.setenv(NAME, value)
        assert launch(partial(variables, "none"), NAME, 2, "cpu") == (value, "0", "2")
    monkeypatch.delenv(NAME)
    assert launch(partial(variables, "none"), NAME, 2, "cpu") == ("none", "0", "2")
