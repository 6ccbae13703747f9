"""The packages with which released engines train here; each is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import ATTENTIONS


@dataclass(frozen=True)
class Package:
    """A package from PyPI.

    trainer
        The class that trains with it, behind the module of this room in which it is.
    dtypes, attentions, recomputes
        What it does here.
    parts
        Parts of a model that it builds here and the runtime does not, as `Model.special_parts`
        names them.
    """

    trainer: str
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    attentions: tuple[str, ...] = ATTENTIONS
    recomputes: tuple[str, ...] = ("none", "full")
    parts: tuple[str, ...] = ()


_PACKAGES: Mapping[str, Package] = {
    "axonn": Package("axonn.AxonnTrainer", dtypes=("fp32",)),
    "deepspeed": Package("deepspeed.DeepSpeedTrainer"),
    "megatron-core": Package(
        "megatron_core.MegatronCoreTrainer",
        dtypes=("fp32",),
        attentions=("unfused",),
        recomputes=("none",),
        parts=("experts", "norms of queries and keys"),
    ),
}


def installed_package(engine: Engine) -> Package:
    """Return the package of an engine.

    Raises
    ------
    InputError
        It is not installed; the message says how to install it.
    """
    package = _PACKAGES[engine.package]
    try:
        version(engine.package)
    except PackageNotFoundError:
        raise InputError(
            f"engine {engine.name} needs the package {engine.package}, which is not installed; "
            "pip install 'axonn-tune[engines]'"
        ) from None
    return package


def trainer_of(engine: Engine) -> Any:
    """Return what builds a trainer of a request on a device through the engine's package."""
    module, name = _PACKAGES[engine.package].trainer.split(".")
    return getattr(import_module(f"axonn_tune.runtime.released.{module}"), name)
