"""A progress bar on stderr; where that is no terminal, a line now and then."""

from __future__ import annotations

import sys
import time

BAR_WIDTH = 24
# Least time between two updates of the bar, and between two lines.
BAR_SECONDS = 0.1
LINE_SECONDS = 10.0


class ProgressBar:
    """Shows how much of the work is done, and about how long the rest takes."""

    def __init__(self, silent: bool) -> None:
        self._silent = silent
        self._on_terminal = sys.stderr.isatty()
        self._done = 0
        self._total = 0
        self._start = time.monotonic()
        self._last = self._start

    def expect(self, count: int) -> None:
        """Add a number of things to do; take them away if it is negative."""
        self._total += count

    def restart(self) -> None:
        """Forget the time so far, because what follows takes another time."""
        self._start = time.monotonic()

    def advance(self, what: str) -> None:
        """Count one thing as done."""
        self._done += 1
        now = time.monotonic()
        interval = BAR_SECONDS if self._on_terminal else LINE_SECONDS
        if self._silent or now - self._last < interval:
            return
        self._last = now
        share = self._done / max(self._total, self._done)
        left = (now - self._start) * (1.0 - share) / share
        text = f"{self._done} of {self._total} measured, about {left:.0f} s left ({what})"
        if self._on_terminal:
            filled = round(BAR_WIDTH * share)
            bar = "#" * filled + "-" * (BAR_WIDTH - filled)
            print(f"\r\x1b[K[{bar}] {text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Clear the bar."""
        if self._on_terminal and not self._silent:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
