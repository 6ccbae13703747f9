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
    chosen = np.ones((0, 1), dtype=np.int64)
    for _ in range(n_factors - 1):
        chosen = np.concatenate(
            [
                np.repeat(chosen, factors.size, axis=1),
                np.tile(factors, chosen.shape[1])[None],
            ]
        )
        chosen = chosen[:, n_gpus % chosen.prod(axis=0) == 0]
    return np.concatenate([chosen, n_gpus // chosen.prod(axis=0, keepdims=True)])
