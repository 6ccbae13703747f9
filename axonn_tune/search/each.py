"""How to walk through what takes long: a caller may show how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

# Yields the items of a sequence one after another, as `iter` does.
Each: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
