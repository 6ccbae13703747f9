"""What tests of published results share: the command ``reproduce``, which takes half a minute and
runs once, the presets that rows name, and the pages that say how well rows are met."""

import io
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from axonn_tune.cli.main import main
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce import reproduction as module
from axonn_tune.reproduce.reproduction import Reproduction
from axonn_tune.reproduce.results import compare_published, predict_runs
from axonn_tune.reproduce.runs import Loaders
from axonn_tune.reproduce.steps import time_runs

LOADERS = Loaders(load_model, load_machine, load_engine)


def words_of_page(name):
    """The text of a page of the documentation in one line."""
    return " ".join((Path(__file__).parents[1] / "docs" / name).read_text().split())


def compared(runs):
    """Predict runs, and compare each of their numbers with its prediction."""
    return compare_published(runs, predict_runs(runs))


def timed_runs(runs):
    """Predict measured steps, and set them beside their predictions and the naive baseline."""
    return time_runs(runs, predict_runs(runs))


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
