"""A progress bar on stderr for what takes more than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import click

T = TypeVar("T")

# Nobody needs a bar before that.
PATIENCE_SECONDS = 2.0


@dataclass(frozen=True)
class Progress:
    """Wraps a sequence: ``for item in progress(items)`` shows how far it is.

    Only on a terminal, and not if it is to be quiet.
    """

    label: str
    quiet: bool = False

    def __call__(self, items: Sequence[T]) -> Iterator[T]:
        """The items one after another."""
        start, shows = time.monotonic(), not self.quiet and sys.stderr.isatty()
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


quiet_option = click.option("--quiet", is_flag=True, help="No progress.")
