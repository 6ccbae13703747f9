"""Collective formulas against rings played hop by hop."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import machine_of, quantity

from axonn_tune.cost.collectives import (
    chain_passes,
    collective_seconds,
    moved_fraction,
    tree_passes,
    tree_share,
)
from axonn_tune.cost.links import axis_links
from axonn_tune.cost.prices import group_seconds
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.links import TreeLimits
from axonn_tune.spec.plan import KINDS

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


def rounds_until_all_have_all(n_ranks):
    """Pass chunks around a ring until every rank holds every chunk; count the rounds.

    Each rank starts with its own chunk and passes on what it received last. The same
    rounds run backwards, with sums in the place of copies, are a reduce-scatter.
    """
    held = [{rank} for rank in range(n_ranks)]
    newest = list(range(n_ranks))
    n_rounds = 0
    while any(len(chunks) < n_ranks for chunks in held):
        newest = [newest[rank - 1] for rank in range(n_ranks)]
        for rank, chunk in enumerate(newest):
            assert chunk not in held[rank], "a chunk came twice"
            held[rank].add(chunk)
        n_rounds += 1
    return n_rounds


def rounds_until_all_have_the_sum(n_ranks):
    """Scatter-reduce, then gather: each chunk as the set of ranks whose part is in its sum."""
    sums = [[{rank} for _ in range(n_ranks)] for rank in range(n_ranks)]
    n_rounds = 0
    while any(len(part) < n_ranks for parts in sums for part in parts):
        sent = [(rank, (rank - n_rounds) % n_ranks) for rank in range(n_ranks)]
        carried = [(rank, chunk, set(sums[rank][chunk])) for rank, chunk in sent]
        for rank, chunk, part in carried:
            sums[(rank + 1) % n_ranks][chunk] |= part
        n_rounds += 1
    return n_rounds


def levels_of_a_binary_tree(n_ranks):
    """Rounds in which pairs add up until one rank has the sum of all."""
    parts, n_rounds = n_ranks, 0
    while parts > 1:
        parts, n_rounds = (parts + 1) // 2, n_rounds + 1
    return n_rounds


def priced(kind, nbytes, n_ranks, n_calls=1.0, alpha=ALPHA, tree_alpha=None):
    ring = alpha * (n_ranks - 1)
    tree = (alpha if tree_alpha is None else tree_alpha) * np.log2(n_ranks)
    arrays = (np.array([float(v)]) for v in (n_ranks, BETA, ring, tree, 2.0 / BETA))
    return float(collective_seconds(kind, nbytes, n_calls, *arrays)[0])


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 8, 17])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gathers_and_scatters_are_the_ring(kind, n_ranks):
    expected = play_ring(n_ranks, 1e7, rounds_until_all_have_all(n_ranks))
    assert priced(kind, 1e7, n_ranks) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 8, 17])
def test_large_all_reduce_is_the_ring_twice(n_ranks):
    expected = play_ring(n_ranks, 1e9, rounds_until_all_have_the_sum(n_ranks))
    assert priced("all_reduce", 1e9, n_ranks) == pytest.approx(expected, rel=1e-12)


def test_bandwidth_terms_are_the_ring_without_latency():
    for n_ranks in (2, 3, 8):
        gather = play_ring(n_ranks, 1e7, n_ranks - 1, alpha=0.0)
        for kind, passes in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
            moved = moved_fraction(kind, n_ranks) * 1e7 / BETA
            assert moved == pytest.approx(passes * gather, rel=1e-12)


def test_small_all_reduce_is_a_tree():
    """Up and down a binary tree of 64 ranks: six hops each way, the buffer twice at its share."""
    expected = 2 * (6 * ALPHA + 8.0 / (0.9 * 0.92 * BETA))
    assert priced("all_reduce", 8.0, 64) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_ranks", [2, 4, 32, 1024])
def test_tree_latency_is_the_height_of_the_tree(n_ranks):
    expected = 2 * levels_of_a_binary_tree(n_ranks) * ALPHA
    assert priced("all_reduce", 0.0, n_ranks) == pytest.approx(expected, rel=1e-12)


def test_the_faster_algorithm_is_taken():
    for nbytes in np.logspace(1, 10, 40):
        ring = play_ring(32, nbytes, 62)
        tree = 2 * (5 * ALPHA + nbytes / (tree_share(nbytes) * BETA))
        assert priced("all_reduce", nbytes, 32) == pytest.approx(min(ring, tree), rel=1e-12)


def test_point_to_point_is_one_hop():
    for n_ranks in (2, 8):  # to a neighbour, however many there are
        got = priced("send_recv", 1e6, n_ranks)
        assert got == pytest.approx(ALPHA + 1e6 / BETA, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_communicates_nothing(kind):
    assert priced(kind, 1e9, 1) == 0.0
    assert moved_fraction(kind, 1) == 0.0


def test_calls_cost_latency_only():
    once, ten = priced("all_gather", 1e7, 8), priced("all_gather", 1e7, 8, n_calls=10.0)
    assert ten - once == pytest.approx(9 * 7 * ALPHA, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_calls", [1.0, 3.0, 40.0])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e10])
def test_calls_are_the_buffer_in_equal_parts(kind, n_calls, nbytes):
    """So many calls, each of a part of the buffer, one after the other."""
    in_parts = n_calls * priced(kind, nbytes / n_calls, 8)
    assert priced(kind, nbytes, 8, n_calls=n_calls) == pytest.approx(in_parts, rel=1e-12)


@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.integers(1, 6144), st.floats(0, 1e11), st.integers(1, 50)), min_size=1),
)
def test_columns_are_priced_one_by_one(kind, columns):
    n_ranks, nbytes, n_calls = (
        np.array(column, dtype=float) for column in zip(*columns, strict=True)
    )
    ring, tree = ALPHA * (n_ranks - 1), ALPHA * np.log2(n_ranks)
    betas = np.full(n_ranks.shape, BETA)
    together = collective_seconds(kind, nbytes, n_calls, n_ranks, betas, ring, tree, 2.0 / betas)
    alone = [priced(kind, size, n, n_calls=calls) for n, size, calls in columns]
    assert together == pytest.approx(alone, rel=1e-12)


@given(st.integers(2, 512), st.floats(1.0, 1e11))
def test_an_all_reduce_moves_at_most_a_gather_and_a_scatter(n_ranks, nbytes):
    both = priced("reduce_scatter", nbytes, n_ranks) + priced("all_gather", nbytes, n_ranks)
    assert priced("all_reduce", nbytes, n_ranks) <= both * (1 + 1e-12)
    # However it is done, each rank sends and receives what it lacks of the sum.
    least = 2 * (n_ranks - 1) / n_ranks * nbytes / BETA
    assert priced("all_reduce", nbytes, n_ranks) >= least * (1 - 1e-12)


def parents(n_nodes):
    """The parent of each node but the root, in a tree whose leaves and inner nodes alternate.

    A node stands as high as its number has zeros at the end. The root is node 0, above the tree of
    all others; a parent that would be out of bounds gives way to its own.
    """
    of_node = {}
    for node in range(1, n_nodes):
        lowest = node & -node
        without = node - lowest
        above = without | 2 * lowest
        of_node[node] = above if above < n_nodes else without
    return of_node


def halves_sent(n_nodes):
    """How many halves of the buffer each node sends: to its parents, and to its children.

    The second tree is the mirrored first one, or for odd numbers the first one shifted.
    """
    sent = [0] * n_nodes
    for number in range(2):
        places = [(node + number) % n_nodes for node in range(n_nodes)]
        if n_nodes % 2 == 0 and number == 1:
            places = list(reversed(range(n_nodes)))
        for node, parent in parents(n_nodes).items():
            sent[places[node]] += 1
            sent[places[parent]] += 1
    return sent


@pytest.mark.parametrize("n_nodes", [2, *range(4, 40)])
def test_the_busiest_node_of_two_trees_sends_its_halves(n_nodes):
    assert tree_passes(n_nodes) == max(halves_sent(n_nodes)) / 2


def test_three_nodes_count_as_nccl_counts_them():
    """The busiest sends three halves, and NCCL's tuner counts as many as of more nodes."""
    assert sorted(halves_sent(3)) == [2, 3, 3]
    assert tree_passes(3) == 2.0


@pytest.mark.parametrize("n_units", [1, 2, 4, 8])
def test_the_links_of_a_chain_are_spread_over_its_units(n_units):
    """Each link but that to the outside carries the buffer once up and once down."""
    sent = sum(2 for _ in range(n_units - 1))
    assert chain_passes(n_units) == pytest.approx(sent / n_units)


@pytest.mark.parametrize(
    ("mebibytes", "factor"), [(1, 0.5), (8, 0.8), (16, 0.7), (64, 0.8), (256, 0.9), (1024, 1.0)]
)
def test_the_share_of_a_tree_is_that_of_nccls_tuner(mebibytes, factor):
    assert tree_share(mebibytes * 2.0**20) == pytest.approx(0.92 * factor)


@given(st.floats(0, 1e12), st.floats(1.0, 10.0))
def test_more_bytes_take_a_tree_longer(nbytes, factor):
    more = factor * nbytes
    assert nbytes / tree_share(nbytes) <= more / tree_share(more) * (1 + 1e-12)


def nccl_takes_a_ring(nbytes, n_nodes, n_inside, n_nics, nic_bandwidth, most_of_channel):
    """Whether NCCL expects a ring to move a large buffer sooner than trees (tuning.cc).

    Each NIC has a channel; over two nodes the chain inside a node may be twice as fast as a NIC.
    """
    n_ranks = n_nodes * n_inside
    of_ring = n_nics * nic_bandwidth * n_ranks / (2 * (n_ranks - 1))
    of_chain = nic_bandwidth * (2 if n_nodes == 2 else 1)
    of_tree = n_nics * min(0.92 * of_chain, most_of_channel) / 2
    return bool(of_ring > of_tree * tree_share(nbytes) / 0.92)


AMPERE, HOPPER = {2: 23.6e9, 4: 17.8e9, 16: 17.8e9}, {2: 41.4e9, 4: 36.0e9, 16: 36.0e9}


@pytest.mark.parametrize(
    ("n_nodes", "mebibytes"), [(2, 48), (2, 192), (2, 4096), (4, 1024), (16, 1024)]
)
@pytest.mark.parametrize(
    ("name", "n_inside", "n_nics", "nic_bandwidth", "most"),
    [
        ("dgx-a100", 8, 8, 25e9, AMPERE),
        ("a100-800g", 8, 4, 25e9, AMPERE),
        ("a100-400g", 8, 4, 12.5e9, AMPERE),
        ("alps", 4, 4, 22.5e9, HOPPER),
    ],
)
def test_large_all_reduces_run_on_what_nccl_chooses(
    name, n_inside, n_nics, nic_bandwidth, most, n_nodes, mebibytes
):
    """Trees beat rings over two nodes of Alps and of slow NICs, but not of A100 with fast ones."""
    machine, nbytes = load_machine(name), mebibytes * 2.0**20
    no_tree = TreeLimits(quantity(1.0), quantity(1.0))
    outer = replace(machine.links[1], tree_limits=no_tree, tree_steps=None)
    on_rings = replace(machine, links=(machine.links[0], outer))
    got, ring = (
        float(group_seconds(each, "all_reduce", 1, n_nodes * n_inside, nbytes)[0])
        for each in (machine, on_rings)
    )
    expected = nccl_takes_a_ring(nbytes, n_nodes, n_inside, n_nics, nic_bandwidth, most[n_nodes])
    assert (got == ring) is expected


@pytest.mark.parametrize(("stride", "size", "limit"), [(1, 128, 2e9), (1, 8, 4e9), (2, 64, 1e9)])
def test_trees_take_no_less_than_the_library_expects_of_them(stride, size, limit):
    """Groups that share a boundary share its limit; hops between nodes take a millisecond."""
    limits = TreeLimits(quantity(4e9), quantity(2e9))
    plain = machine_of(units=(1, 4), bandwidths=(1e15, 1e15), latencies=(0.0, 1e-3))
    bound = replace(plain, links=(plain.links[0], replace(plain.links[1], tree_limits=limits)))
    nbytes = 2.0**18
    n_nodes = size * stride // 4
    hops = 2e-3 * np.log2(n_nodes)
    links = axis_links(bound, np.array([stride]), np.array([size])).kinds["all_reduce"]
    assert links.least_tree_s_per_byte == pytest.approx(2.0 / limit)
    got = float(group_seconds(bound, "all_reduce", stride, size, nbytes)[0])
    expected = hops + 2.0 * nbytes / limit * 0.92 / tree_share(nbytes)
    ring = 2e-3 * (n_nodes - 1)
    assert got == pytest.approx(min(expected, ring))
    assert float(group_seconds(plain, "all_reduce", stride, size, nbytes)[0]) == pytest.approx(hops)


def test_limits_of_trees_are_none_of_groups_inside_a_node():
    limits = TreeLimits(quantity(1.0), quantity(1.0))
    plain = machine_of(units=(1, 4), bandwidths=(80e9, 1e15), latencies=(1e-3, 0.0))
    bound = replace(plain, links=(plain.links[0], replace(plain.links[1], tree_limits=limits)))
    inside, same = (group_seconds(each, "all_reduce", 1, 4, 2.0**18) for each in (bound, plain))
    assert inside == same
