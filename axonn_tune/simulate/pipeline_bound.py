"""Times below which no pipeline can be, from sums alone: its passes are not played."""

from __future__ import annotations

import numpy as np

from axonn_tune.simulate.durations import FIRST, LAST, MIDDLE, PassSeconds, kind_of
from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B, ZB_H1


def least_pipeline_seconds(
    n_stages: Ints | int,
    n_virtual: Ints | int,
    n_micro: Ints | int,
    seconds: PassSeconds,
    transfer_seconds: Array,
    schedule: str = ONE_F_ONE_B,
    places: tuple[int, ...] = (),
) -> Array:
    """Return a time below which `pipeline_seconds` of such a pipeline cannot be, shape (C,).

    The numbers of stages may be those of each candidate, shape (C,).

    A rank does all its passes one after another. Before its first forward pass, the ranks before it
    have done one each. With 1F1B, they do one more each after its last backward pass. The bound is
    the largest such sum of the first, of the last, and of the rank before the last. Where stages
    between the first and the last differ, it is the longest time of any rank's own passes, and zero
    with two flows.
    """
    if schedule == DUALPIPE and places:
        return np.zeros(transfer_seconds.shape)
    usual = np.minimum(seconds.usual, seconds.alone)
    filling = np.minimum(usual, seconds.filling)
    if schedule == DUALPIPE:
        return _least_of_two_flows(n_stages, n_micro, usual)
    backward = (INPUT, WEIGHT) if schedule == ZB_H1 else (BACKWARD,)
    whole = (FORWARD, *backward)
    alone = (FORWARD,) if schedule == ZB_H1 else (FORWARD, BACKWARD)

    def seconds_of(directions: tuple[int, ...], place: int, seconds: Array = usual) -> Array:
        n_sent = sum(direction != WEIGHT for direction in directions)
        each = (seconds[kind_of(direction, place)] for direction in directions)
        return sum(each, start=n_sent * transfer_seconds)

    if places:
        n_ranks = int(np.max(n_stages))
        by_place = [
            (n_micro - 1) * seconds_of(whole, place) + seconds_of(whole, place, filling)
            for place in range(max(places) + 1)
        ]
        of_ranks = [
            sum((by_place[place] for place in places[rank::n_ranks]), start=np.zeros(1))
            for rank in range(n_ranks)
        ]
        return np.maximum.reduce(of_ranks)
    first, middle, last = (seconds_of(whole, place) for place in (FIRST, MIDDLE, LAST))
    before_first, before_middle = seconds_of(alone, FIRST), seconds_of(alone, MIDDLE, filling)
    others = (n_virtual - 1) * middle
    of_last = before_first + (n_stages - 2) * before_middle + n_micro * (last + others)
    own_of_middle = (n_micro * n_virtual - 1) * middle + seconds_of(whole, MIDDLE, filling)
    of_middle = before_first + (n_stages - 3) * before_middle + own_of_middle
    least = np.maximum(n_micro * (first + others), of_last)
    return np.where(np.asarray(n_stages) > 2, np.maximum(least, of_middle), least)


def _least_of_two_flows(n_stages: Ints | int, n_micro: Ints | int, seconds: Array) -> Array:
    """Return the bound of `least_pipeline_seconds` for DualPipe.

    The first and the last rank do the passes of both their stages for half of the micro-batches
    each. A rank of the middle starts when those between it and the nearer end have done one forward
    pass. Transfers of passes that run together overlap, and do not count.
    """
    first, middle, last = (
        seconds[kind_of(FORWARD, place)]
        + np.minimum(
            seconds[kind_of(BACKWARD, place)],
            seconds[kind_of(INPUT, place)] + seconds[kind_of(WEIGHT, place)],
        )
        for place in (FIRST, MIDDLE, LAST)
    )
    start = np.minimum(seconds[kind_of(FORWARD, FIRST)], seconds[kind_of(FORWARD, MIDDLE)])
    of_ends = n_micro / 2 * (first + last)
    of_middle = (np.asarray(n_stages) // 2 - 1) * start + n_micro * middle
    return np.where(np.asarray(n_stages) > 2, np.maximum(of_ends, of_middle), of_ends)
