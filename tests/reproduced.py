"""The command ``reproduce``, which takes half a minute: run once for all tests that need it."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass

import pytest

from axonn_tune.cli.main import main
from axonn_tune.reproduce import reproduction as module
from axonn_tune.reproduce.reproduction import Reproduction


@dataclass(frozen=True)
class Command:
    """What the command predicted and what it printed."""

    reproduction: Reproduction
    csv: str


@pytest.fixture(scope="session")
def reproduce_command():
    """Run ``axonn-tune reproduce --format csv`` and keep the predictions behind its rows."""
    reproduce = module.reproduce
    kept = []

    def kept_reproduce(*arguments):
        kept.append(reproduce(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(module, "reproduce", kept_reproduce)
        main(["reproduce", "--format", "csv"])
    (reproduction,) = kept
    return Command(reproduction, printed.getvalue())


@pytest.fixture(scope="session")
def reproduction(reproduce_command):
    """Return all published numbers next to their predictions."""
    return reproduce_command.reproduction
