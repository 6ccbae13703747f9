"""The time of collectives: a bandwidth term and a latency, or the measured steps of a ring.

Sizes are full buffers, as nccl-tests counts them. The bandwidth is that of one rank's ring.
"""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.plan import Array, Size

# The shares of a link that NCCL's tuner expects of any tree, and of one with messages of 64 B times
# the powers of two (published: NVIDIA/nccl 5067397, src/graph/tuning.cc, `treeCorrectionFactor` of
# the protocol Simple, which holds for less than 512 MiB).
LARGEST_TREE_SHARE = 0.92
_TREE_SHARE = LARGEST_TREE_SHARE * np.array(
    [0.9] * 7 + [0.8, 0.7, 0.6, 0.6] + [0.5] * 4 + [0.6, 0.7, 0.8] + [0.7, 0.7, 0.8, 0.9, 0.9, 1.0]
)


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


def rings_worth(kind: str, n_ranks: Size, n_units: Size, sent_once: Experts | None = None) -> Array:
    """Return how many times the bytes of a ring leave a unit that holds its part of a group.

    One ring passes the boundary of a unit, however many of the ranks are inside. In an all-to-all
    each of the m ranks inside sends its own bytes to the G - m others: m (G - m)/G of the buffer
    leave the unit, in the place of the ring's (G - 1)/G.

    Tokens that are sent once to each unit with any of their experts take as long as if the m ranks'
    bytes for all units, even those for their own unit, left it: on NICs of 50 GB/s such kernels
    were measured at 43 to 58 GB/s of these bytes on H800 (DeepEP's kernels, 2 to 8 nodes), and at
    44 to 54 GB/s on H100 (Hybrid-EP's, the same; deepseek-ai/DeepEP dd758ca, docs/legacy.md, and
    94a9f8f, docs/README_Hybrid-EP.md).
    """
    n_ranks = np.asarray(n_ranks, dtype=np.float64)
    if kind != "all_to_all":
        return np.ones(n_ranks.shape)
    n_inside = n_ranks / n_units
    if sent_once is not None:
        n_copies = sent_once.n_reached(n_units) / sent_once.n_reached(n_ranks)
        return np.maximum(n_inside * n_copies, 1.0)
    return np.maximum(n_inside * (n_ranks - n_inside) / np.maximum(n_ranks - 1.0, 1.0), 1.0)


def tree_passes(n_nodes: Size) -> Array:
    """Return how many times the buffer of an all-reduce leaves a node each way, on two trees.

    NCCL and RCCL give half of the buffer to each of two binary trees of nodes (NVIDIA/nccl 5067397,
    src/graph/trees.cc, `ncclGetDtree`), and move it up and down at the same time
    (src/device/all_reduce.h, `runTreeSplit`). With two nodes, each is the root of one tree and the
    leaf of the other: it sends one half down and the other up, so that the buffer leaves it once.
    With four nodes or more, some have a parent and two children in one tree and are leaves of the
    other: they send four halves. With three nodes the busiest sends three halves, but NCCL counts
    four (src/graph/tuning.cc, `nNodes <= 2`), and so prefers a ring for large buffers: over four
    nodes of AWS's p4d 1 GiB took 2.00 times as long as over two, and over three 1.84 times (NVIDIA/
    nccl issue 527).
    """
    return np.where(np.asarray(n_nodes) == 2, 1.0, 2.0)


def tree_share(nbytes: Size) -> Array:
    """Return the share of its busiest link that a tree uses for messages of these bytes.

    A tree passes its message on in parts, which fill and empty it; NCCL's tuner has found how much
    of the bandwidth that leaves. Between its powers of two the share is read on straight lines over
    the logarithm. Without measured steps, the law thus predicts all-reduces of 32 MiB to 1 GiB over
    two nodes of Alps within 10 %, and those of 256 MiB to 8 GiB over two nodes of AWS's p5, too.
    """
    doublings = np.log2(np.maximum(np.asarray(nbytes) / 64.0, 1.0))
    return np.interp(doublings, np.arange(_TREE_SHARE.size), _TREE_SHARE)


def chain_passes(n_units: Size) -> Array:
    """Return how many times the buffer leaves a unit that a tree joins in a chain inside a node.

    A chain of n units has n - 1 links, which carry the buffer once up and once down. NCCL's
    channels start their chains at different GPUs, so that these links are taken to be spread evenly
    over the units. As much leaves each GPU of a node whose switch forms the sums (NVLS), by the bus
    bandwidth that is measured there.
    """
    return 2.0 * (1.0 - 1.0 / np.asarray(n_units, dtype=np.float64))


def collective_seconds(
    kind: str,
    nbytes: Size,
    n_calls: Size,
    n_ranks: Array,
    bandwidth_bytes_per_s: Array,
    ring_seconds: Array,
    tree_seconds: Array,
    tree_s_per_byte: Array,
    least_tree_s_per_byte: Size = 0.0,
    stepped_ring_seconds: Size = np.nan,
    stepped_tree_seconds: Size = np.nan,
) -> Array:
    """Return the time of a collective, latency included; zero for a group of one rank.

    Gathers and scatters run on a ring, as NCCL and RCCL do: (G-1) alpha + (G-1)/G S/beta, or
    (G-1) tau where the time tau of a step was measured. An all-reduce runs twice around a ring, or
    up and down a tree, whichever is faster; on the tree it takes 2 log2(G) alpha and the time in
    which the busiest link carries the buffer at its share, but no less than the library expects, or
    its measured steps if these take longer than the whole link. A transfer to the neighbour takes
    one hop, alpha + S/beta, and so does an all-to-all but for the part that stays, (G-1)/G S/beta.

    Parameters
    ----------
    nbytes, n_calls : array_like, shape (C,)
        Full buffer, and the number of equal calls that move it.
    n_ranks, bandwidth_bytes_per_s : arrays, shape (C,)
        Size of the group, and bandwidth of one rank's ring.
    ring_seconds, tree_seconds : arrays, shape (C,)
        Latency once around the ring (of one hop for an all-to-all), and once up the tree.
    tree_s_per_byte : array, shape (C,)
        Time for which each byte of the buffer occupies the busiest link of a tree, up and down.
    least_tree_s_per_byte : array, shape (C,), optional
        Time that the library expects for each byte of a large buffer on a tree at least.
    stepped_ring_seconds, stepped_tree_seconds : arrays, shape (C,), optional
        Time of one call once around the ring, and up and down the tree, by measured steps; NaN
        where there are none.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    if kind == "send_recv":
        hop_seconds = ring_seconds / np.maximum(n_ranks - 1.0, 1.0)
        sent = moved_fraction(kind, n_ranks) * (np.asarray(nbytes) / bandwidth_bytes_per_s)
        return n_calls * hop_seconds * (n_ranks > 1) + sent
    sent = moved_fraction("all_gather", n_ranks) * (np.asarray(nbytes) / bandwidth_bytes_per_s)
    once_around = _either(n_calls * stepped_ring_seconds, n_calls * ring_seconds + sent)
    if kind != "all_reduce":
        return once_around
    on_busiest_link = np.asarray(nbytes) * tree_s_per_byte
    stepped = np.maximum(n_calls * stepped_tree_seconds, on_busiest_link)
    least = np.asarray(nbytes) * (LARGEST_TREE_SHARE * np.asarray(least_tree_s_per_byte))
    share = tree_share(call_bytes(nbytes, n_calls))
    at_its_share = np.maximum(on_busiest_link, least) / share
    up_and_down = _either(stepped, 2.0 * n_calls * tree_seconds + at_its_share)
    return np.minimum(2.0 * once_around, up_and_down) * (n_ranks > 1)


def call_bytes(nbytes: Size, n_calls: Size) -> Array:
    """Return the bytes of one call, 0 for candidates without any call."""
    n_calls = np.asarray(n_calls, dtype=np.float64)
    return np.asarray(nbytes) / np.where(n_calls > 0, n_calls, 1.0)


def _either(measured: Size, computed: Array) -> Array:
    """Return what was measured, or what was computed where the first one is NaN."""
    return np.where(np.isnan(measured), computed, measured)
