"""The packages with which released engines train here; each is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.spec.engine import Engine

# The module that each package installs, and what builds a trainer with it.
_MODULES = {"axonn": "axonn", "deepspeed": "deepspeed"}
_TRAINERS: Mapping[str, tuple[str, str]] = {
    "axonn": ("axonn", "AxonnTrainer"),
    "deepspeed": ("deepspeed", "DeepSpeedTrainer"),
}


def require_installed(engine: Engine) -> None:
    """Refuse an engine whose package is not installed.

    Raises
    ------
    InputError
        The message says how it is installed.
    """
    if find_spec(_MODULES[engine.package]) is None:
        raise InputError(
            f"engine {engine.name} needs the package {engine.package}, which is not installed; "
            "pip install 'axonn-tune[engines]'"
        )


def trainer_of(engine: Engine) -> Any:
    """Return what builds a trainer of a request on a device through the engine's package."""
    module, name = _TRAINERS[engine.package]
    return getattr(import_module(f"axonn_tune.runtime.released.{module}"), name)
