"""Which replica updates which whole matrices, as Megatron-Core's layer-wise optimizer shares them.

NVIDIA/Megatron-LM at d98e8a64, core/optimizer/layer_wise_optimizer.py: each bucket of gradients has
one share for each replica, all of the same size, and a share holds whole matrices. A bucket thus
takes as many elements as the largest share times the number of replicas, and what the other shares
leave empty is stored, reduced and gathered, too. That code also aligns the beginnings of matrices
to 64 elements, which is left out here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import cycle, groupby
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.candidates import Ints

# A bucket is closed once it has filled this part of the least room that its largest matrix takes.
_FILLED = 0.9
# A share takes at most this many times its part of a bucket, unless no share has room.
_MOST_OF_SHARE = 1.3


class Piece(NamedTuple):
    """What a rank holds of a matrix, which it shares with no other rank but those of its group.

    Attributes
    ----------
    rows, columns
        Its sizes.
    flops
        What it takes to orthogonalize the whole matrix.
    """

    rows: float
    columns: float
    flops: float

    @property
    def elements(self) -> float:
        """The number of its elements."""
        return self.rows * self.columns

    @property
    def cost(self) -> float:
        """The estimate by which shares are balanced."""
        return self.elements * min(self.rows, self.columns)


class Shares(NamedTuple):
    """How replicas share matrices.

    Attributes
    ----------
    stored_elements
        Elements of all matrices.
    buffer_elements
        Elements of the buffers that hold all shares.
    owned_elements
        Elements of the matrices of the replica that owns most.
    numbers
        Numbers of matrices of each kind of the replica that has most to compute.
    """

    stored_elements: float
    buffer_elements: float
    owned_elements: float
    numbers: tuple[int, ...]

    @property
    def padding(self) -> float:
        """The number of elements of the buffers that no matrix fills."""
        return self.buffer_elements - self.stored_elements


@lru_cache(maxsize=4096)
def shared(
    kinds: tuple[Piece, ...], order: tuple[int, ...], n_replicas: int, least_elements: float
) -> Shares:
    """Return how replicas share the matrices of a buffer.

    Parameters
    ----------
    kinds
        Kinds of matrices.
    order
        Kind of each matrix, in the order in which the backward pass forms their gradients.
    n_replicas
        Number of replicas.
    least_elements
        Least number of elements of a bucket; infinite where one bucket holds all of them.
    """
    owned = np.zeros((n_replicas, len(kinds)), dtype=np.int64)
    stored_elements = buffer_elements = 0.0
    loads = [0.0] * n_replicas
    for bucket in _buckets(kinds, order, n_replicas, least_elements):
        fills = [0.0] * n_replicas
        of_bucket = sum(kinds[kind].elements for kind in bucket)
        stored_elements += of_bucket
        most = _MOST_OF_SHARE * of_bucket / n_replicas
        for kind, alike in groupby(sorted(bucket, key=lambda kind: -kinds[kind].cost)):
            for owner in _owners(kinds[kind], sum(1 for _ in alike), fills, loads, most):
                owned[owner, kind] += 1
        buffer_elements += n_replicas * max(fills)
    return _shares(kinds, owned, stored_elements, buffer_elements)


@lru_cache(maxsize=4096)
def dealt(kinds: tuple[Piece, ...], order: tuple[int, ...], n_replicas: int) -> Shares:
    """Return how replicas share matrices where no buffer is cut into shares.

    The smallest matrix goes to the first replica, the next one to the second, and so on; after the
    last replica the turn comes back (LayerWiseDistributedOptimizer.shard_params of core_v0.16.1).
    """
    owned = np.zeros((n_replicas, len(kinds)), dtype=np.int64)
    turns = [*range(n_replicas), *reversed(range(n_replicas))]
    by_size = sorted(order, key=lambda kind: kinds[kind].elements)
    for owner, kind in zip(cycle(turns), by_size, strict=False):
        owned[owner, kind] += 1
    stored_elements = sum(kinds[kind].elements for kind in order)
    return _shares(kinds, owned, stored_elements, stored_elements)


def _shares(
    kinds: Sequence[Piece], owned: Ints, stored_elements: float, buffer_elements: float
) -> Shares:
    """Return the shares of replicas that own so many matrices of each kind."""
    elements = owned @ np.array([kind.elements for kind in kinds])
    flops = owned @ np.array([kind.flops for kind in kinds])
    most_owned = float(elements.max(initial=0.0))
    numbers = owned[int(flops.argmax())]
    return Shares(stored_elements, buffer_elements, most_owned, tuple(numbers.tolist()))


def _owners(
    piece: Piece, number: int, fills: list[float], loads: list[float], most: float
) -> Iterator[int]:
    """Yield the shares that take so many equal matrices, and add these to what the shares have.

    Each goes to the share with the least to compute of those with room for it, or else to the one
    with the fewest elements.
    """
    elements, cost = piece.elements, piece.cost
    with_room = [
        (load, share) for share, load in enumerate(loads) if fills[share] + elements <= most
    ]
    heapq.heapify(with_room)
    for _ in range(number):
        owner = heapq.heappop(with_room)[1] if with_room else fills.index(min(fills))
        fills[owner] += elements
        loads[owner] += cost
        if fills[owner] + elements <= most:
            heapq.heappush(with_room, (loads[owner], owner))
        yield owner


def _buckets(
    kinds: Sequence[Piece], order: Sequence[int], n_replicas: int, least_elements: float
) -> Iterator[list[int]]:
    """Yield the kinds of the matrices of each bucket.

    A bucket is closed before the first matrix that would enlarge it, once it holds enough.
    """
    bucket: list[int] = []
    n_elements = largest = most = 0.0
    fills = [0.0] * n_replicas
    for kind in order:
        elements = kinds[kind].elements
        is_full = n_elements >= max(least_elements, _FILLED * n_replicas * largest)
        if bucket and is_full and fills[0] + elements > most:
            yield bucket
            bucket = []
            n_elements = largest = most = 0.0
            fills = [0.0] * n_replicas
        filled = fills[0] + elements
        heapq.heapreplace(fills, filled)
        bucket.append(kind)
        n_elements += elements
        largest, most = max(largest, elements), max(most, filled)
    if bucket:
        yield bucket
