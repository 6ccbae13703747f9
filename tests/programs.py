"""The training programs that `launch` writes, for ranks of a test that import and run them."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import axonn_tune

FOLDER = Path(axonn_tune.__file__).parent / "job_scripts" / "programs"


def imported(name):
    """A program or one of its modules, which import each other by their names alone."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def settings_in(files):
    """The settings among written files, as the programs read them."""
    return json.loads(files["settings.json"], object_hook=lambda d: SimpleNamespace(**d))


def arguments(**given):
    """The command line of a program."""
    return SimpleNamespace(**{"steps": 2, "lr": 1e-2, "data": None, **given})
