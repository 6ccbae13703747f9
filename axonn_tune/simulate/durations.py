"""The kinds of passes of a pipeline, and the table of how long passes and hand-overs take.

The duration of a pass depends on its direction and on whether its stage is the first, a middle or
the last one; `kind_of` numbers these combinations. It also depends on what runs beside the pass,
and on whether the pipeline fills or drains with it, so that the table has several rows for each
kind.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from axonn_tune.simulate.handovers import handover_durations
from axonn_tune.simulate.orders import N_DIRECTIONS, WEIGHT
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import NO_HANDOVER, Array

IntOrInts = TypeVar("IntOrInts", int, Ints)

FIRST, MIDDLE, LAST = range(3)
N_KINDS = 3 * N_DIRECTIONS
# The settings of a pass, by which `PassSeconds` has its duration.
USUAL, ALONE, FILLING = range(3)


def kind_of(direction: IntOrInts, place: IntOrInts) -> IntOrInts:
    """Return the index of a pass's duration; `place` is `FIRST`, `MIDDLE`, `LAST` or later."""
    return place * N_DIRECTIONS + direction


class PassSeconds(NamedTuple):
    """Durations of passes by `kind_of`, shape (kinds,) or (kinds, C) each.

    usual
        Passes beside which others may run.
    alone
        Those of the warm-up and of the drain with virtual stages.
    filling
        Those of other ranks for which the last one waits before it starts, and the step after it
        has ended. A rank takes these at the pace of its own GPUs, and not at that of the slowest.
    """

    usual: Array
    alone: Array
    filling: Array

    @classmethod
    def equal(cls, seconds: Array) -> PassSeconds:
        """Return durations that depend on the kind of a pass only."""
        return cls(seconds, seconds, seconds)

    def take(self, rows: Ints) -> PassSeconds:
        """Return the durations of some candidates."""
        return PassSeconds(*(each[:, rows] for each in self))

    def joined(self, other: PassSeconds) -> PassSeconds:
        """Return the durations of these candidates, followed by those of others."""
        return PassSeconds(*map(np.hstack, zip(self, other, strict=True)))


def table_of_durations(
    seconds: PassSeconds,
    transfer_seconds: Array,
    beside_seconds: Array,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> Array:
    """Return the durations of passes and of hand-overs, shape (4 kinds + 1 + kinds of these, C).

    First come those of a slot's first pass by its setting, with its transfer, which runs beside
    nothing if the pass is alone or filling. Then come those of a slot's second pass, whose transfer
    runs beside the first one's, then nothing, and then those of hand-overs. Gradients of weights
    are not sent.
    """
    is_sent = (np.arange(len(seconds.usual)) % N_DIRECTIONS != WEIGHT)[:, None]
    held, held_alone = is_sent * transfer_seconds, is_sent * (transfer_seconds + beside_seconds)
    return np.concatenate(
        [
            seconds.usual + held,
            seconds.alone + held_alone,
            seconds.filling + held_alone,
            seconds.usual,
            np.zeros_like(seconds.usual[:1]),
            handover_durations(handover_seconds, seconds.usual.shape[1]),
        ]
    )


def row_of_pass(n_kinds: int, kind: Ints, place: Ints, setting: Ints) -> Ints:
    """Return the rows of passes in the table of durations, by their places in slots."""
    return kind + n_kinds * np.where(place > 0, len(PassSeconds._fields), setting)


def row_of_nothing(n_kinds: int) -> int:
    """Return the row of the table of durations that takes no time."""
    return (len(PassSeconds._fields) + 1) * n_kinds


def row_of_handover(n_kinds: int, kind: Ints) -> Ints:
    """Return the rows of hand-overs in the table of durations."""
    return row_of_nothing(n_kinds) + 1 + kind
