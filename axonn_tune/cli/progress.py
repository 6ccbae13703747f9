"""A progress bar on stderr for work that takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import click

T = TypeVar("T")

# The time before which nobody needs a bar.
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class Progress:
    """Wraps a sequence: ``for item in progress(items)`` shows how far it is.

    The bar is shown only on a terminal, and not if `quiet` is set.
    """

    label: str
    quiet: bool

    def __call__(self, items: Sequence[T]) -> Iterator[T]:
        """Yield the items one after another."""
        start = time.monotonic()
        shows = not self.quiet and sys.stderr.isatty()
        with ExitStack() as stack:
            bar: Any = None
            for done, item in enumerate(items):
                if shows and bar is None and time.monotonic() - start > PATIENCE_SECONDS:
                    bar = stack.enter_context(
                        click.progressbar(length=len(items), label=self.label, file=sys.stderr)
                    )
                    bar.update(done)
                yield item
                if bar is not None:
                    bar.update(1)
