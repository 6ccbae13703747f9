"""Global batches that a number of GPUs can share, in sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np

from axonn_tune.search.factors import divisors
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.layout import Axes

# Number of batches that a search around a target tries.
MOST_BATCHES = 8
# A GPU's share of a default batch is small, or it can be cut into micro-batches of several sizes:
# 43 sequences could be taken only one by one, or all at once.
USUAL_MICRO_BATCHES = range(1, 9)
LEAST_CHOICE = 3
# One of any twelve successive numbers is divisible by 1, 2, 3, 4 and 6.
NEAREST_SHARES = 12
# A default batch is at most this part of the wanted one away from it, if GPUs that have a share
# together can bring it so near. The part is a convention: 3,072 and 6,144 GPUs then have one batch.
NEAR_FRACTION = 0.125


@dataclass(frozen=True)
class BatchRule:
    """How a search takes its global batch.

    target
        The batch that is wanted, in sequences.
    is_given
        Whether the user named the target. Otherwise it is a default, and the nearest batch is
        taken that the GPUs can share.
    within_fraction
        Largest distance of a batch from the target, as a fraction of it, where several batches
        are tried; None where one is taken.
    micro_batch
        Number of sequences by which a GPU's share of a default batch must be divisible.
    """

    target: int
    is_given: bool
    within_fraction: float | None = None
    micro_batch: int = 1

    def batches(self, n_gpus: int, axes: Axes) -> list[int]:
        """Return the batches that a number of GPUs tries with a strategy of these axes."""
        if self.within_fraction is not None:
            return batches_near(self.target, self.within_fraction, n_gpus)
        if self.is_given:
            return [self.target]
        can_split_sequences = set(axes.batch) < set(axes.names)
        return [nearest_shared_batch(self.target, n_gpus, can_split_sequences, self.micro_batch)]


def nearest_shared_batch(
    target: int, n_gpus: int, can_split_sequences: bool = True, micro_batch: int = 1
) -> int:
    """Return the batch nearest to the target that the GPUs can share evenly.

    Each GPU gets the same whole number of sequences, a multiple of the micro-batch, which can be
    cut into micro-batches of several sizes. Where no such batch is near the target, and GPUs can
    split a sequence, 2, 4, 8 or more of them have a share together, as few as possible.
    """
    tried = []
    for n_together in _groups_of(n_gpus) if can_split_sequences else [1]:
        batch = _nearest_with_choice(target, n_gpus // n_together * micro_batch, micro_batch)
        if abs(batch - target) <= NEAR_FRACTION * target:
            return batch
        tried.append(batch)
    return min(tried, key=lambda batch: abs(batch - target))


def _groups_of(n_gpus: int) -> list[int]:
    """Return the sizes 1, 2, 4, 8 and so on of equal groups of GPUs."""
    return [2**power for power in range((n_gpus & -n_gpus).bit_length())]


def _nearest_with_choice(target: int, multiple: int, micro_batch: int) -> int:
    """Return the nearest multiple that leaves a choice of micro-batches to each share.

    A share is a multiple of the micro-batch.
    """
    middle = target // multiple
    numbers = range(max(middle - NEAREST_SHARES, 1), middle + NEAREST_SHARES + 1)
    batches = [number * multiple for number in numbers if _leaves_a_choice(number * micro_batch)]
    return min(batches, key=lambda batch: abs(batch - target))


def can_share(batch: int, n_gpus: int) -> bool:
    """Return whether GPUs can share a batch evenly, alone or in groups of 2, 4, 8 or more."""
    odd_factor = n_gpus // (n_gpus & -n_gpus)
    return batch % odd_factor == 0


def _leaves_a_choice(share: int) -> bool:
    """Return whether a share is small, or has micro-batches of several usual sizes."""
    n_choices = sum(share % size == 0 for size in USUAL_MICRO_BATCHES)
    return share in USUAL_MICRO_BATCHES or n_choices >= LEAST_CHOICE


def nearest_multiples(target: int, counts: Ints) -> tuple[int, int]:
    """Return the nearest multiples of any of the counts, at most and at least the target.

    The first is 0 if all counts are above the target.
    """
    below = target // counts * counts
    return int(below.max()), int((below + np.where(below < target, counts, 0)).min())


def batches_near(target: int, within_fraction: float, n_gpus: int) -> list[int]:
    """Return a few batches near a target, those first that can be cut into the most equal shares.

    Among batches with equally many shares, the nearest comes first. Batches that `can_share`
    refuses come last.
    """
    low = math.ceil(target * (1.0 - within_fraction))
    high = math.floor(target * (1.0 + within_fraction))
    counts = divisors(n_gpus)[::-1].tolist()
    counts.sort(key=lambda count: not can_share(count, n_gpus))
    by_count = (_multiples_near(target, n_shares, low, high) for n_shares in counts)
    distinct = dict.fromkeys(chain.from_iterable(by_count))
    return list(distinct)[:MOST_BATCHES]


def _multiples_near(target: int, count: int, low: int, high: int) -> list[int]:
    """Return multiples of a count from `low` to `high`, the nearest to the target first."""
    middle = target // count
    first = max(math.ceil(low / count), middle - MOST_BATCHES)
    last = min(high // count, middle + MOST_BATCHES)
    multiples = [count * factor for factor in range(first, last + 1)]
    return sorted(multiples, key=lambda batch: abs(batch - target))
