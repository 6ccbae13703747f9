"""The order in which each rank of a pipeline runs its passes, for every schedule.

A rank runs slots one after another. A slot holds one pass, or a forward and a backward pass of two
micro-batches that run together. The schedules are

``1f1b``
    one forward, one backward (Narayanan et al., SC21, section 2.2), with virtual stages or without;
``zb-h1``
    the backward pass is split into the gradients of inputs and those of weights, which fill time
    in which the rank would wait (Qi et al., arXiv 2401.10241, section 2.1);
``dualpipe``
    micro-batches enter at both ends, so that every rank has two stages of two copies of the model
    (DeepSeek-V3, arXiv 2412.19437, section 3.2.1; the order is that of deepseek-ai/DualPipe at
    bb214e8, dualpipe.py).
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import numpy as np

from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.schedule import DUALPIPE, ZB_H1

N_DIRECTIONS = 4
FORWARD, BACKWARD, INPUT, WEIGHT = range(N_DIRECTIONS)

# The direction (`FORWARD`; `BACKWARD`, or its parts `INPUT` and `WEIGHT`), the virtual stage of the
# rank, and the micro-batch.
Pass: TypeAlias = tuple[int, int, int]
Slot: TypeAlias = tuple[Pass, ...]


def ordered_passes(schedule: str, rank: int, n_stages: int, n_virtual: int, n_micro: int) -> Ints:
    """Return the passes of one rank in its order, shape (5, passes).

    The rows are the number of the slot, the place in the slot, and what a `Pass` says.

    Parameters
    ----------
    n_virtual
        Number of virtual stages of each rank; 1 but for ``1f1b``.
    n_micro
        Number of micro-batches, of each direction with ``dualpipe``.
    """
    if schedule == DUALPIPE:
        return np.array(
            [
                (number, place, *each)
                for number, slot in enumerate(_DualPipeOrder(rank, n_stages, n_micro).slots)
                for place, each in enumerate(slot)
            ]
        ).T
    order = rank_order(rank, n_stages, n_virtual, n_micro)
    if schedule == ZB_H1:
        order = _with_split_backward(order, rank, n_micro)
    number = np.arange(len(order))
    return np.stack([number, np.zeros_like(number), *order.T])


def n_warmup_passes(rank: Ints | int, n_stages: int, n_virtual: int, n_micro: int) -> Ints:
    """Return how many forward passes a rank runs before forward and backward passes alternate."""
    warmup = n_stages - np.asarray(rank) - 1
    if n_virtual > 1:
        warmup = 2 * warmup + (n_virtual - 1) * n_stages
    return np.minimum(warmup, n_micro * n_virtual)


def rank_order(rank: int, n_stages: int, n_virtual: int, n_micro: int) -> Ints:
    """Return the passes of one rank in the order in which Megatron-LM runs them.

    After a warm-up of forward passes, one forward and one backward pass alternate; the remaining
    backward passes follow. Groups of `n_stages` micro-batches pass through one virtual stage after
    the other.

    Returns
    -------
    array of int, shape (passes, 3)
        What a `Pass` says.
    """
    total = n_micro * n_virtual
    warmup = int(n_warmup_passes(rank, n_stages, n_virtual, n_micro))
    index = np.arange(total)
    group, within = np.divmod(index, n_stages * n_virtual)
    stage, micro = np.divmod(within, n_stages)
    micro += group * n_stages
    if n_virtual == 1:
        stage, micro = np.zeros_like(index), index
    order = np.empty((2 * total, 3), dtype=np.int64)
    forward_place = index + np.maximum(index - warmup, 0)
    order[forward_place] = np.stack([np.full(total, FORWARD), stage, micro], axis=1)
    backward_place = warmup + index + np.minimum(index + 1, total - warmup)
    backward = np.stack([np.full(total, BACKWARD), n_virtual - 1 - stage, micro], axis=1)
    order[backward_place] = backward
    return order


def _with_split_backward(order: Ints, rank: int, n_micro: int) -> Ints:
    """Return the passes of one rank of ZB-H1 from those of 1F1B, both of shape (passes, 3).

    Forward passes and gradients of inputs come as in 1F1B. A rank puts off the gradients of weights
    by as many micro-batches as ranks stand before it, so that all ranks hold those of `n_stages`
    micro-batches.
    """
    direction, _, micro = order.T
    is_backward = direction == BACKWARD
    is_followed = is_backward & (micro >= rank)
    n_each = 1 + is_followed
    direction = np.repeat(np.where(is_backward, INPUT, FORWARD), n_each)
    micro = np.repeat(micro, n_each)
    after = np.cumsum(n_each)[is_followed] - 1
    direction[after] = WEIGHT
    micro[after] -= rank
    put_off = np.arange(max(n_micro - rank, 0), n_micro)
    direction = np.concatenate([direction, np.full_like(put_off, WEIGHT)])
    micro = np.concatenate([micro, put_off])
    return np.stack([direction, np.zeros_like(micro), micro], axis=1)


class _DualPipeOrder:
    """The slots of one rank, whose micro-batches come from two ends.

    Direction 0 enters at the end of the pipeline to which the rank is nearer. The virtual stage of
    a pass is the flow to which its micro-batch belongs: 0 from the first rank, 1 from the last.
    """

    def __init__(self, rank: int, n_stages: int, n_micro: int) -> None:
        self.slots: list[Slot] = []
        self._is_in_second_half = rank >= n_stages // 2
        self._n_done = {(FORWARD, 0): 0, (FORWARD, 1): 0, (BACKWARD, 0): 0, (BACKWARD, 1): 0}
        self._pending: deque[Pass] = deque()
        from_end = min(rank, n_stages - 1 - rank)
        self._run(from_end, n_stages // 2 - from_end - 1, n_stages, n_micro)

    def _run(self, from_end: int, from_middle: int, n_stages: int, n_micro: int) -> None:
        """Append all slots; the eight steps are those of DualPipe's code.

        `from_end` and `from_middle` count the ranks between this one and the nearer end, or the
        middle.
        """
        for _ in range(2 * from_middle):
            self._forward(0)
        for _ in range(from_end + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(from_middle):
            self._input_gradients(1)
            self._weight_gradients()
            self._forward(1)
        for number in range(n_micro - n_stages + from_end + 1):
            if number == 0 and from_middle == 0:
                self._forward(0)
                self._backward(1)
            else:
                self._together(0, 1)
            self._together(1, 0)
        for _ in range(from_middle):
            self._backward(1)
            self._together(1, 0)
        self._backward_of_both(from_end + 1, from_end % 2 == 1)
        for _ in range(from_middle):
            self._weight_gradients()
            self._input_gradients(0)
        while self._pending:
            self._weight_gradients()

    def _backward_of_both(self, count: int, is_odd: bool) -> None:
        """Run the backward passes of both directions in turn; the later half of them is split."""
        is_split = False
        for number in range(count):
            is_split = is_split or (number == count // 2 and is_odd)
            (self._input_gradients if is_split else self._backward)(1)
            is_split = is_split or number == count // 2
            (self._input_gradients if is_split else self._backward)(0)

    def _next(self, kind: int, direction: int) -> Pass:
        """Return the next pass of a direction; `kind` is `FORWARD` or `BACKWARD`."""
        micro = self._n_done[kind, direction]
        self._n_done[kind, direction] += 1
        return kind, direction ^ self._is_in_second_half, micro

    def _forward(self, direction: int) -> None:
        self.slots.append((self._next(FORWARD, direction),))

    def _backward(self, direction: int) -> None:
        self.slots.append((self._next(BACKWARD, direction),))

    def _together(self, forward: int, backward: int) -> None:
        """Run a forward pass of one direction beside a backward pass of the other."""
        self.slots.append((self._next(FORWARD, forward), self._next(BACKWARD, backward)))

    def _input_gradients(self, direction: int) -> None:
        _, flow, micro = self._next(BACKWARD, direction)
        self.slots.append(((INPUT, flow, micro),))
        self._pending.append((WEIGHT, flow, micro))

    def _weight_gradients(self) -> None:
        self.slots.append((self._pending.popleft(),))
