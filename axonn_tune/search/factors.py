"""Divisors and factorisations of a count."""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.candidates import Ints


def divisors(n: int) -> Ints:
    """Return all divisors of n, in growing order."""
    small = np.arange(1, int(n**0.5) + 1)
    small = small[n % small == 0]
    large = (n // small)[::-1]
    return np.concatenate([small, large[large > small[-1]]])


def factorisations(n_gpus: int, n_factors: int = 4) -> Ints:
    """Return all ordered factorisations of a count, shape (factors, number of layouts)."""
    factors = divisors(n_gpus)
    quotient, divisor = np.nonzero(factors[:, None] % factors == 0)
    n_divisors = np.bincount(quotient)
    first = np.cumsum(n_divisors) - n_divisors
    chosen: list[Ints] = []
    # Which factor is left to be split, one entry for each factorisation so far.
    left = np.array([factors.size - 1])
    for _ in range(n_factors - 1):
        counts = n_divisors[left]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        taken = divisor[np.repeat(first[left], counts) + within]
        chosen = [*(np.repeat(sizes, counts) for sizes in chosen), factors[taken]]
        left = np.searchsorted(factors, np.repeat(factors[left], counts) // factors[taken])
    return np.stack([*chosen, factors[left]])
