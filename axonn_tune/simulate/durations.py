"""The kinds of passes of a pipeline, and the table of how long passes and hand-overs take.

The duration of a pass depends on its direction and on whether its stage is the first, a middle or
the last one; `kind_of` numbers these combinations. It also depends on what runs beside the pass, so
that the table has several rows for each kind.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from axonn_tune.simulate.handovers import handover_durations
from axonn_tune.simulate.orders import N_DIRECTIONS, WEIGHT
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import NO_HANDOVER, Array

IntOrInts = TypeVar("IntOrInts", int, Ints)

FIRST, MIDDLE, LAST = range(3)
N_KINDS = 3 * N_DIRECTIONS


def kind_of(direction: IntOrInts, place: IntOrInts) -> IntOrInts:
    """Return the index of a pass's duration; `place` is `FIRST`, `MIDDLE`, `LAST` or later."""
    return place * N_DIRECTIONS + direction


def table_of_durations(
    seconds: Array,
    transfer_seconds: Array,
    beside_seconds: Array,
    alone: Array,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> Array:
    """Return the durations of passes and of hand-overs, shape (3 kinds + 1 + kinds of these, C).

    First come those of a slot's first pass, with its transfer, then those of its second pass, whose
    transfer runs beside the first one's, then those of a pass of the warm-up or of the drain
    (`alone`), whose transfers run beside nothing, then nothing, and then those of hand-overs.
    Gradients of weights are not sent.
    """
    is_sent = (np.arange(len(seconds)) % N_DIRECTIONS != WEIGHT)[:, None]
    with_transfer = seconds + is_sent * transfer_seconds
    alone_with_transfer = alone + is_sent * (transfer_seconds + beside_seconds)
    nothing = np.zeros_like(seconds[:1])
    of_handovers = handover_durations(handover_seconds, seconds.shape[1])
    return np.concatenate([with_transfer, seconds, alone_with_transfer, nothing, of_handovers])


def row_of_pass(n_kinds: int, kind: Ints, place: Ints, is_alone: np.ndarray) -> Ints:
    """Return the rows of passes in the table of durations, by their places in slots."""
    return kind + n_kinds * np.where(place > 0, 1, 2 * is_alone)


def row_of_nothing(n_kinds: int) -> int:
    """Return the row of the table of durations that takes no time."""
    return 3 * n_kinds


def row_of_handover(n_kinds: int, kind: Ints) -> Ints:
    """Return the rows of hand-overs in the table of durations."""
    return row_of_nothing(n_kinds) + 1 + kind
