"""What a rank does in order: it starts collectives, waits for them and multiplies matrices."""

from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from axonn_tune.spec.layout import AXES


class Event(NamedTuple):
    """One event; the amount is the bytes of a collective, or the FLOPs of a product."""

    action: str  # start, await or multiply
    kind: str
    axis: str
    amount: float


# Functions of torch.distributed: the kind of collective, and the bytes of its full buffer.
COLLECTIVES = {
    "all_gather": ("all_gather", lambda parts, shard: sum(part.nbytes for part in parts)),
    "all_gather_into_tensor": ("all_gather", lambda full, shard: full.nbytes),
    "reduce_scatter_tensor": ("reduce_scatter", lambda shard, full: full.nbytes),
    "all_reduce": ("all_reduce", lambda full: full.nbytes),
}
# Functions that no plan of AxoNN's algorithm has: a call of one is an event that no plan matches.
OTHERS = ("all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "scatter", "send")
COLLECTIVES |= {name: (name, lambda *tensors: 0) for name in OTHERS}
PRODUCTS = ("matmul", "mm")


@contextmanager
def recorded(grid, products=PRODUCTS):
    """Yield a list that grows while this rank of the grid trains."""
    events = []
    with ExitStack() as patches:
        for name, (kind, full_bytes) in COLLECTIVES.items():
            noting = noting_collective(getattr(dist, name), kind, full_bytes, grid, events)
            patches.enter_context(patch.object(dist, name, noting))
        for name in products:
            noting = noting_product(getattr(torch.Tensor, name), events)
            patches.enter_context(patch.object(torch.Tensor, name, noting))
        yield events


class Handle:
    """A collective under way, whose first wait is noted."""

    def __init__(self, work, on_wait):
        self._work, self._on_wait = work, on_wait

    def wait(self):
        self._work.wait()
        self._on_wait()


def noting_collective(function, kind, full_bytes, grid, events):
    def call(*tensors, group=None, async_op=False, **named):
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(ranks) == 1:  # nothing travels
            return function(*tensors, group=group, async_op=async_op, **named)
        others = [value for value in named.values() if isinstance(value, torch.Tensor)]
        about = (kind, axis_of(ranks, grid), float(full_bytes(*tensors, *others)))
        events.append(Event("start", *about))
        handle = function(*tensors, group=group, async_op=async_op, **named)
        if async_op:
            return Handle(handle, lambda: events.append(Event("await", *about)))
        events.append(Event("await", *about))
        return None

    return call


def noting_product(function, events):
    def call(left, right):
        (m, k), n = left.shape, right.shape[1]
        events.append(Event("multiply", "gemm", "compute", 2.0 * m * n * k))
        return function(left, right)

    return call


def axis_of(ranks, grid):
    """The axis along which all these ranks lie; X varies fastest with the rank number."""
    slowest_first = tuple(reversed(AXES))
    numbers = np.arange(grid.n_ranks).reshape([grid.size(axis) for axis in slowest_first])
    for place, axis in enumerate(slowest_first):
        lines = np.moveaxis(numbers, place, -1).reshape(-1, grid.size(axis))
        if ranks in lines.tolist():
            return axis
    return f"ranks {ranks}"
