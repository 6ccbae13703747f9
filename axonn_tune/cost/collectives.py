"""The time of collectives: a bandwidth term and a latency.

Sizes are full buffers, as nccl-tests counts them. The bandwidth is that of one rank's ring.
"""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.plan import Array, Size


def moved_fraction(kind: str, n_ranks: Size) -> Array:
    """Return the fraction of the full buffer that each link of a ring carries.

    A ring of G ranks sends (G-1)/G of the buffer over each link in a gather, a scatter or an
    all-to-all (Thakur et al., 2005, section 4.1), and twice that in an all-reduce, which is a
    scatter and a gather. A transfer to the neighbour sends the whole buffer. A group of one rank
    sends nothing.
    """
    n_ranks = np.asarray(n_ranks, dtype=np.float64)
    if kind == "send_recv":
        return np.where(n_ranks > 1, 1.0, 0.0)
    passes = 2.0 if kind == "all_reduce" else 1.0
    return passes * (1.0 - 1.0 / n_ranks)


def collective_seconds(
    kind: str,
    nbytes: Size,
    n_calls: Size,
    n_ranks: Array,
    bandwidth_bytes_per_s: Array,
    ring_seconds: Array,
    tree_seconds: Array,
) -> Array:
    """Return the time of a collective, latency included; zero for a group of one rank.

    Gathers and scatters run on a ring, as NCCL and RCCL do: (G-1) alpha + (G-1)/G S/beta. An
    all-reduce runs on a ring, 2 (G-1) alpha + 2 (G-1)/G S/beta, or on a tree, 2 log2(G) alpha +
    2 S/beta, whichever is faster. A transfer to the neighbour takes one hop, alpha + S/beta.

    Parameters
    ----------
    nbytes, n_calls : array_like, shape (C,)
        Full buffer, and the number of equal calls that move it.
    n_ranks, bandwidth_bytes_per_s : arrays, shape (C,)
        Size of the group, and bandwidth of one rank's ring.
    ring_seconds, tree_seconds : arrays, shape (C,)
        Latency once around the ring, and once up the tree.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    per_link = moved_fraction(kind, n_ranks) * (np.asarray(nbytes) / bandwidth_bytes_per_s)
    if kind == "all_reduce":
        on_ring = 2.0 * n_calls * ring_seconds + per_link
        on_tree = 2.0 * (n_calls * tree_seconds + np.asarray(nbytes) / bandwidth_bytes_per_s)
        return np.minimum(on_ring, on_tree) * (n_ranks > 1)
    if kind == "send_recv":
        hop_seconds = ring_seconds / np.maximum(n_ranks - 1.0, 1.0)
        return n_calls * hop_seconds * (n_ranks > 1) + per_link
    return n_calls * ring_seconds + per_link
