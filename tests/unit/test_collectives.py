"""Collective formulas against rings played hop by hop."""

import numpy as np
import pytest

from axonn_tune.cost.collectives import (
    collective_seconds,
    ring_all_reduce_seconds,
    ring_gather_seconds,
)

ALPHA, BETA = 7e-6, 3e9


def play_ring(n_ranks, full_bytes, n_rounds, alpha=ALPHA, beta=BETA):
    """Seconds until every rank of a ring has passed on a chunk in each of the rounds.

    Each rank sends a chunk to the next one as soon as it has received the one of the
    round before; the rounds of a reduce-scatter or all-gather number n_ranks - 1.
    """
    chunk = full_bytes / n_ranks
    ready = [0.0] * n_ranks
    for _ in range(n_rounds):
        sent = [time + alpha + chunk / beta for time in ready]
        ready = [max(ready[i], sent[i - 1]) for i in range(n_ranks)]
    return max(ready)


def priced(kind, nbytes, n_ranks, n_calls=1.0, alpha=ALPHA, tree_alpha=None):
    ring = alpha * (n_ranks - 1)
    tree = (alpha if tree_alpha is None else tree_alpha) * np.log2(n_ranks)
    arrays = (np.array([float(v)]) for v in (n_ranks, BETA, ring, tree))
    return float(collective_seconds(kind, nbytes, n_calls, *arrays)[0])


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 8, 17])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all"])
def test_gathers_and_scatters_are_the_ring(kind, n_ranks):
    expected = play_ring(n_ranks, 1e7, n_ranks - 1)
    assert priced(kind, 1e7, n_ranks) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 8, 17])
def test_large_all_reduce_is_the_ring_twice(n_ranks):
    expected = play_ring(n_ranks, 1e9, 2 * (n_ranks - 1))
    assert priced("all_reduce", 1e9, n_ranks) == pytest.approx(expected, rel=1e-12)


def test_bandwidth_terms_are_the_ring_without_latency():
    for n_ranks in (2, 3, 8):
        gather = play_ring(n_ranks, 1e7, n_ranks - 1, alpha=0.0)
        assert ring_gather_seconds(1e7, n_ranks, BETA) == pytest.approx(gather, rel=1e-12)
        assert ring_all_reduce_seconds(1e7, n_ranks, BETA) == pytest.approx(2 * gather, rel=1e-12)


def test_small_all_reduce_is_a_tree():
    """Up and down a binary tree of 64 ranks: six hops each way, the buffer twice."""
    assert priced("all_reduce", 8.0, 64) == pytest.approx(2 * (6 * ALPHA + 8.0 / BETA), rel=1e-12)


def test_the_faster_algorithm_is_taken():
    for nbytes in np.logspace(1, 10, 40):
        ring = play_ring(32, nbytes, 62)
        tree = 2 * (5 * ALPHA + nbytes / BETA)
        assert priced("all_reduce", nbytes, 32) == pytest.approx(min(ring, tree), rel=1e-12)


def test_point_to_point_is_one_hop():
    assert priced("send_recv", 1e6, 2) == pytest.approx(ALPHA + 1e6 / BETA, rel=1e-12)


@pytest.mark.parametrize(
    "kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]
)
def test_one_rank_communicates_nothing(kind):
    assert priced(kind, 1e9, 1) == 0.0


def test_calls_cost_latency_only():
    once, ten = priced("all_gather", 1e7, 8), priced("all_gather", 1e7, 8, n_calls=10.0)
    assert ten - once == pytest.approx(9 * 7 * ALPHA, rel=1e-9)
