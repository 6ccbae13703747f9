"""Say how to go on after a long measurement was interrupted or has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from axonn_tune.io.journal import Journal


@contextmanager
def resumable(journal: Journal) -> Iterator[None]:
    """Say what the journal keeps if a failure or an interrupt ends this context."""
    from axonn_tune.errors import AxonnTuneError
    from axonn_tune.runtime.ranks.launch import is_speaker

    try:
        yield
    except AxonnTuneError as error:
        raise AxonnTuneError(str(error) + _what_is_kept(journal, str(error))) from error
    except KeyboardInterrupt:
        if is_speaker():
            click.echo(f"axonn-tune: interrupted{_what_is_kept(journal)}", err=True)
        raise


def _what_is_kept(journal: Journal, message: str = "") -> str:
    if "--resume" in message or not journal.exists():
        return ""
    return f"; what was measured is kept in {journal.path}: go on with --resume"
