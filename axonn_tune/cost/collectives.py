"""Seconds of collectives: bandwidth terms and latency, as small functions of arrays.

Sizes are full buffers, as nccl-tests counts them; bandwidth is what one rank's ring gets.
"""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.plan import Array, Size


def moved_fraction(kind: str, n_ranks: Size) -> Array:
    """Bytes that each link of a ring carries over those of the full buffer."""
    n_ranks = np.asarray(n_ranks, dtype=np.float64)
    if kind == "send_recv":
        return np.ones(n_ranks.shape)
    passes = 2.0 if kind == "all_reduce" else 1.0
    fraction: Array = passes * (1.0 - 1.0 / n_ranks)
    return fraction


def ring_gather_seconds(full_bytes: Size, n_ranks: Size, bandwidth_bytes_per_s: Size) -> Array:
    """Bandwidth term of a ring all-gather, reduce-scatter or all-to-all.

    Each rank sends and receives ``full_bytes / n_ranks`` in each of ``n_ranks - 1`` steps
    (Thakur et al., 2005, section 4.1): t = (G-1)/G * S / beta. Zero for one rank.

    Parameters
    ----------
    full_bytes, n_ranks, bandwidth_bytes_per_s : array_like, shape (C,)
    """
    n_ranks = np.asarray(n_ranks, dtype=np.float64)
    seconds: Array = (1.0 - 1.0 / n_ranks) * np.asarray(full_bytes) / bandwidth_bytes_per_s
    return seconds


def ring_all_reduce_seconds(full_bytes: Size, n_ranks: Size, bandwidth_bytes_per_s: Size) -> Array:
    """Bandwidth term of a ring all-reduce: a reduce-scatter and an all-gather."""
    return 2.0 * ring_gather_seconds(full_bytes, n_ranks, bandwidth_bytes_per_s)


def collective_seconds(
    kind: str,
    nbytes: Size,
    n_calls: Size,
    n_ranks: Array,
    bandwidth_bytes_per_s: Array,
    ring_seconds: Array,
    tree_seconds: Array,
) -> Array:
    """Time of a collective, latency included; zero for a group of one rank.

    Gathers and scatters run on a ring, as NCCL and RCCL do: (G-1) alpha. An all-reduce
    runs on a ring, 2 (G-1) alpha + 2 (G-1)/G S/beta, or on a tree, 2 log2(G) alpha +
    2 S/beta, whichever is faster.

    Parameters
    ----------
    nbytes, n_calls : array_like, shape (C,)
        Full buffer, and the number of equal calls that move it.
    ring_seconds, tree_seconds : arrays, shape (C,)
        Latency once around the ring, once up the tree.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    per_link = np.asarray(nbytes) / bandwidth_bytes_per_s
    if kind == "all_reduce":
        on_ring = n_calls * ring_seconds + (1.0 - 1.0 / n_ranks) * per_link
        on_tree = n_calls * tree_seconds + per_link
        seconds: Array = 2.0 * np.minimum(on_ring, on_tree) * (n_ranks > 1)
    elif kind == "send_recv":
        seconds = (n_calls * ring_seconds / np.maximum(n_ranks - 1.0, 1.0) + per_link) * (
            n_ranks > 1
        )
    else:
        seconds = n_calls * ring_seconds + (1.0 - 1.0 / n_ranks) * per_link
    return seconds
