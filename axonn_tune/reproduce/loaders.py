"""How validation finds presets; it touches no files itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model

Row: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Loaders:
    """Presets by name."""

    model: Callable[[str], Model]
    machine: Callable[[str], Machine]
