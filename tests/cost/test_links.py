"""Links against an enumeration of every rank, group and unit."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from worlds import machine_of, machines, quantity

from axonn_tune.cost.boundaries import rings_through_boundary
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.links import axis_links
from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import group_seconds, lanes
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.layout import AXES, ORDERS, Layout, grid_layout
from axonn_tune.spec.plan import RING_KINDS
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

GIB = 2.0**30


def groups(stride, size, n_ranks):
    """The groups of an axis as lists of ranks."""
    span = stride * size
    return [
        [block + residue + i * stride for i in range(size)]
        for block in range(0, n_ranks, span)
        for residue in range(stride)
    ]


def count_rings(stride, size, unit_ranks):
    """Rings that leave the busiest unit, counted over whole periods of blocks and units."""
    n_ranks = lcm(stride * size, unit_ranks)
    leaving = np.zeros(n_ranks // unit_ranks, dtype=int)
    for ranks in groups(stride, size, n_ranks):
        units = [rank // unit_ranks for rank in ranks]
        for unit in set(units):
            # A ring in rank order enters and leaves a unit once, unless it lies inside.
            leaving[unit] += len(set(units)) > 1
    return leaving.max()


def rings(stride, size, unit_ranks):
    return int(rings_through_boundary(np.array([stride]), np.array([size]), unit_ranks)[0])


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_rings_equal_the_enumeration(stride, size, unit_ranks):
    assert rings(stride, size, unit_ranks) == count_rings(stride, size, unit_ranks)


@pytest.mark.parametrize("unit_ranks", range(1, 9))
def test_rings_of_small_axes_equal_the_enumeration(unit_ranks):
    axes = [(stride, size) for stride in range(1, 9) for size in range(1, 9)]
    found = rings_through_boundary(*np.array(axes).T, unit_ranks)
    assert found.tolist() == [count_rings(*axis, unit_ranks) for axis in axes]


@pytest.mark.parametrize("unit_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_aligned_groups_follow_the_published_law(stride, size, unit_ranks):
    expected = 0 if stride * size <= unit_ranks else min(unit_ranks, stride)
    assert rings(stride, size, unit_ranks) == expected


def test_three_ranks_on_nodes_of_four_cross():
    assert rings(1, 3, 4) == 2


@pytest.mark.timeout(10)
def test_a_prime_number_of_a_million_ranks_takes_no_time():
    primes = np.full(20, 1_000_003)
    assert rings_through_boundary(np.ones_like(primes), primes, 4).tolist() == [2] * 20


def links_of(machine, stride, size):
    return axis_links(machine, np.array([stride]), np.array([size]))


def all_reduces_of(machine, stride, size):
    return links_of(machine, stride, size).kinds["all_reduce"]


def bandwidth(machine, stride, size, kind="all_reduce"):
    return float(links_of(machine, stride, size).kinds[kind].bandwidth_bytes_per_s[0])


@pytest.mark.parametrize(("stride", "gib"), [(1, 80), (2, 40), (4, 20), (8, 20), (256, 20)])
def test_sharing_between_nodes_is_the_authors_table(perlmutter, stride, gib):
    assert bandwidth(perlmutter, stride, 8) == pytest.approx(gib * GIB)


@pytest.mark.parametrize(("stride", "size", "gib"), [(1, 2, 76), (1, 4, 225), (2, 2, 76)])
def test_listed_rings_win_inside_a_node(perlmutter, stride, size, gib):
    assert bandwidth(perlmutter, stride, size) == pytest.approx(gib * GIB)


def test_listed_rings_do_not_apply_where_some_groups_cross():
    """Size 2 at stride 2 lies inside nodes of four but crosses nodes of two."""
    listed = machine_of(units=(1, 2), ranks_per_node=2, rings=[(2, 2, 1e15)])
    assert bandwidth(listed, 2, 2) == pytest.approx(80e9 / 2)


def test_listed_rings_apply_at_their_own_stride_and_size_only():
    """Eight ranks a node; a ring is listed at stride 2 and size 2, and no other."""
    listed = machine_of(units=(1, 8), ranks_per_node=8, rings=[(2, 2, 1e15)])
    got = [bandwidth(listed, *ring) for ring in ((2, 2), (1, 2), (4, 2), (2, 4))]
    assert got == [1e15, 300e9, 300e9, 300e9]


def test_the_slowest_crossed_level_bounds():
    machine = machine_of(
        units=(1, 2, 8), bandwidths=(200e9, 10e9, 100e9), latencies=(0, 0, 0), ranks_per_node=8
    )
    inside_package, inside_node, across = (
        links_of(machine, s, g) for s, g in ((1, 2), (1, 8), (1, 16))
    )
    found = (inside_package, inside_node, across)
    assert [int(x.kinds["all_reduce"].bounding_level[0]) for x in found] == [0, 1, 1]
    assert [int(x.level[0]) for x in found] == [0, 1, 2]
    assert bandwidth(machine, 8, 4) == pytest.approx(min(10e9 / 2, 100e9 / 8))


def walk_ring(machine, stride, size):
    """Sum of the latencies of the hops of one group's ring, without the closing one."""
    ranks = [i * stride for i in range(size)]
    total = 0.0
    for here, there in pairwise(ranks):
        crossed = [
            link for link in machine.links if here // link.unit_ranks != there // link.unit_ranks
        ]
        total += crossed[-1].latency_seconds.value
    return total


@pytest.mark.parametrize("n_levels", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 64])
def test_ring_latency_is_the_walk_around_it(n_levels, stride, size):
    machine = machine_of(
        units=(1, 2, 8, 32)[:n_levels],
        bandwidths=(1e9,) * n_levels,
        latencies=(1e-6, 1e-5, 1e-4, 1e-3)[:n_levels],
        ranks_per_node=1,
    )
    expected = walk_ring(machine, stride, size)
    assert all_reduces_of(machine, stride, size).ring_seconds[0] == pytest.approx(
        expected, rel=1e-12
    )


def test_tree_latency_takes_the_logarithm_of_the_units_joined():
    machine = machine_of(latencies=(1e-6, 1e-5))
    assert all_reduces_of(machine, 1, 32).tree_seconds[0] == pytest.approx(2 * 1e-6 + 3 * 1e-5)


def test_a_slower_kind_of_collective():
    machine = machine_of()
    slower = replace(machine.links[1], kind_fraction={"reduce_scatter": quantity(0.5)})
    machine = replace(machine, links=(machine.links[0], slower))
    assert bandwidth(machine, 4, 2, "reduce_scatter") == pytest.approx(10e9)
    assert bandwidth(machine, 4, 2, "all_gather") == pytest.approx(20e9)


# Against enumeration, on random machines ----------------------------------------------------

STRIDES, SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.sampled_from([1, 2, 3, 4, 5, 8])


def crossed(machine, stride, size):
    """Each level that a group of the axis leaves, with the rings through its busiest unit."""
    counted = {
        index: count_rings(stride, size, link.unit_ranks)
        for index, link in enumerate(machine.links)
    }
    return {index: n_rings for index, n_rings in counted.items() if n_rings}


@given(machines(), STRIDES, SIZES)
def test_bandwidth_is_the_smallest_share_of_the_crossed_levels(machine, stride, size):
    levels = crossed(machine, stride, size)
    shares = {i: machine.links[i].bandwidth_bytes_per_s.value / n for i, n in levels.items()}
    got = links_of(machine, stride, size)
    assert got.level[0] == max(levels, default=-1)
    leaves_node = any(machine.links[i].unit_ranks >= machine.ranks_per_node for i in levels)
    listed = {
        (ring.stride, ring.size): ring.bandwidth_bytes_per_s.value
        for ring in machine.ring_bandwidths
    }
    expected = min(shares.values(), default=np.inf)
    if (stride, size) in listed and not leaves_node:
        expected = listed[stride, size]
    elif shares:
        bounding = int(got.kinds["all_reduce"].bounding_level[0])
        assert shares[bounding] == min(shares.values())
    for kind, of_kind in got.kinds.items():
        if kind != "all_to_all":
            assert of_kind.bandwidth_bytes_per_s[0] == pytest.approx(expected, rel=1e-12)
        else:
            assert of_kind.bandwidth_bytes_per_s[0] <= expected * (1 + 1e-12)


@pytest.mark.parametrize("n_units", [2, 3, 8])
def test_an_all_to_all_sends_all_that_is_for_other_units_through_the_boundary(n_units):
    """Add up what each rank of a unit of four has for each rank elsewhere."""
    n_ranks, nbytes, boundary = 4 * n_units, 1e9, 80e9
    machine = machine_of(units=(1, 4), bandwidths=(1e15, boundary), latencies=(0.0, 0.0))
    of_pair = nbytes / n_ranks
    leaving = sum(
        of_pair for here in range(n_ranks) for there in range(n_ranks) if here < 4 <= there
    )
    links = links_of(machine, 1, n_ranks).kinds
    sent = (1 - 1 / n_ranks) * nbytes / links["all_to_all"].bandwidth_bytes_per_s[0]
    assert sent == pytest.approx(leaving / boundary, rel=1e-12)
    apart = links_of(machine, 4, n_units).kinds
    assert apart["all_to_all"].bandwidth_bytes_per_s == apart["all_gather"].bandwidth_bytes_per_s


@pytest.mark.parametrize("n_units", [2, 3, 8])
def test_tokens_that_are_sent_once_pass_a_boundary_once_for_each_unit(n_units):
    """Counted over all choices of two experts, of which each rank of a unit of four holds one."""
    n_ranks, of_token, boundary = 4 * n_units, 1e6, 80e9
    machine = machine_of(units=(1, 4), bandwidths=(1e15, boundary), latencies=(0.0, 0.0))
    choices = list(combinations(range(n_ranks), 2))
    n_copies = sum(len({expert // 4 for expert in choice}) for choice in choices) / len(choices)
    ones = np.ones(1, dtype=int)
    links = axis_links(machine, ones, n_ranks * ones, Experts(n_ranks, 2, 64)).kinds
    exchanged = 2 * of_token  # each choice is of two ranks
    seconds = exchanged / links["all_to_all"].bandwidth_bytes_per_s[0]
    assert seconds == pytest.approx(4 * n_copies * of_token / boundary, rel=1e-12)
    copied = axis_links(machine, ones, n_ranks * ones).kinds
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "send_recv"):
        assert links[kind].bandwidth_bytes_per_s == copied[kind].bandwidth_bytes_per_s


def test_only_the_group_of_experts_sends_tokens():
    machine = machine_of(units=(1, 4), bandwidths=(1e15, 80e9), latencies=(0.0, 0.0))
    axes = Megatron3D(has_experts=True).axes
    layout = Layout({"tensor": 1, "context": 1, "data": 16, "pipeline": 1, "expert": 16})
    placements = Placements.of([layout], axes=axes)
    copied = placement_links(machine, placements)
    once = placement_links(machine, placements, Experts(16, 4, 64))
    slower = [
        group
        for group in copied
        if copied[group].kinds["all_to_all"].bandwidth_bytes_per_s[0]
        < once[group].kinds["all_to_all"].bandwidth_bytes_per_s[0]
    ]
    assert slower == ["expert"]


@pytest.mark.parametrize(("stride", "size", "hop"), [(1, 2, 3e-6), (1, 64, 1e-5), (4, 16, 1e-5)])
def test_an_all_to_all_waits_for_its_longest_hop_only(stride, size, hop):
    """All messages of a rank travel at once: inside a unit of four, or between units."""
    machine = machine_of(units=(1, 4), bandwidths=(1e15, 1e15), latencies=(3e-6, 1e-5))
    of_kind = group_seconds(machine, "all_to_all", stride, size, 1e-9)
    assert of_kind[0] == pytest.approx(hop, rel=1e-9)
    assert of_kind <= group_seconds(machine, "all_gather", stride, size, 1e-9)


def longest_walk(machine, stride, size):
    """Latency of the slowest group's walk around its ring, over whole periods of everything."""
    n_ranks = lcm(stride * size, *(link.unit_ranks for link in machine.links))

    def hop(here, there):
        units = [link.unit_ranks for link in machine.links]
        outermost = max(i for i, unit in enumerate(units) if here // unit != there // unit)
        return machine.links[outermost].latency_seconds.value

    return max(
        sum(hop(*pair) for pair in pairwise(ranks)) for ranks in groups(stride, size, n_ranks)
    )


UNITS = [(1,), (1, 4), (1, 8), (1, 3), (1, 2, 8), (1, 2, 4, 16), (1, 3, 12)]


def tower(units):
    """Levels of these units, each with ten times the latency of the one inside it."""
    return machine_of(
        units=units,
        bandwidths=(1e9,) * len(units),
        latencies=[1e-6 * 10**i for i in range(len(units))],
        ranks_per_node=1,
    )


def is_aligned(stride, size, unit):
    """Units hold whole groups or groups whole units, and so do the strides."""
    span = stride * size
    return (span % unit == 0 or unit % span == 0) and (stride % unit == 0 or unit % stride == 0)


@given(st.sampled_from(UNITS), st.integers(1, 12), st.integers(1, 13))
def test_ring_latency_of_aligned_groups_is_the_longest_walk(units, stride, size):
    assume(all(is_aligned(stride, size, unit) for unit in units))
    got = all_reduces_of(tower(units), stride, size).ring_seconds[0]
    assert got == pytest.approx(longest_walk(tower(units), stride, size), rel=1e-12)


@pytest.mark.parametrize(
    ("units", "stride", "size"),
    [((1, 4), 1, 7), ((1, 3), 1, 5), ((1, 4), 1, 11), ((1, 2, 8), 3, 5), ((1, 2, 4, 16), 5, 6)],
)
def test_ring_latency_of_a_straddling_group_is_the_longest_walk(units, stride, size):
    """Ranks 7 to 13 on nodes of four: 7 | 8 9 10 11 | 12 13 leaves a node twice."""
    got = all_reduces_of(tower(units), stride, size).ring_seconds[0]
    assert got == pytest.approx(longest_walk(tower(units), stride, size), rel=1e-12)


@given(st.sampled_from(UNITS), st.integers(1, 12), st.integers(1, 13))
def test_ring_latency_lies_between_the_innermost_and_the_longest_walk(units, stride, size):
    got = all_reduces_of(tower(units), stride, size).ring_seconds[0]
    assert got >= (size - 1) * 1e-6 * (1 - 1e-12)
    assert got <= longest_walk(tower(units), stride, size) * (1 + 1e-12)


@pytest.mark.parametrize("n_levels", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 8, 32])
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_tree_latency_joins_units_in_pairs_level_by_level(n_levels, stride, size):
    """Join ranks of the same unit in pairs, then those units, and so on outwards."""
    machine = tower((1, 2, 8, 32)[:n_levels])
    members = {i * stride for i in range(size)}
    expected = 0.0
    for index, link in enumerate(machine.links):
        outer = machine.links[index + 1].unit_ranks if index + 1 < n_levels else None
        joined = {rank // outer * outer for rank in members} if outer else {0}
        per_unit = len(members) / len(joined)
        while per_unit > 1:
            expected, per_unit = expected + link.latency_seconds.value, per_unit / 2
        members = joined
    got = all_reduces_of(machine, stride, size).tree_seconds[0]
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_levels", [1, 2, 3, 4])
def test_a_lone_rank_crosses_nothing(n_levels):
    got = links_of(tower((1, 2, 8, 32)[:n_levels]), 8, 1)
    of_kind = got.kinds["all_reduce"]
    assert (got.level[0], of_kind.bounding_level[0]) == (-1, -1)
    assert (of_kind.ring_seconds[0], of_kind.tree_seconds[0]) == (0.0, 0.0)


@given(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 4), st.sampled_from(ORDERS))
def test_every_axis_of_a_placement_gets_the_links_of_its_own_groups(sizes, order):
    """The stride of an axis is the product of the sizes of the letters before its own."""
    machine = tower((1, 2, 8))
    links = placement_links(machine, Placements.of([grid_layout(*sizes)], (order,)))
    by_letter = dict(zip("xyzd", sizes, strict=True))
    for axis in AXES:
        before = order[: order.index(axis[0])]
        stride = int(np.prod([by_letter[letter] for letter in before] or [1]))
        group = (np.array([stride]), np.array([by_letter[axis[0]]]))
        alone = axis_links(machine, *group, n_ranks=np.array([np.prod(sizes)]))
        assert links[axis].level[0] == alone.level[0]
        own, other = (x.kinds["all_reduce"] for x in (links[axis], alone))
        assert own.ring_seconds[0] == other.ring_seconds[0]
        assert own.bandwidth_bytes_per_s == other.bandwidth_bytes_per_s


def test_axes_queue_on_one_lane_where_their_outermost_links_are_of_one_level():
    machine = load_machine("frontier")  # packages of two, nodes of eight
    grids = [
        (grid_layout(2, 4, 4, 1), [1, 2, 3, 0]),  # a level each
        (grid_layout(1, 2, 4, 4), [0, 2, 3, 4]),
        (grid_layout(2, 2, 2, 4), [1, 2, 2, 4]),  # Y and Z inside a node
        (grid_layout(1, 1, 16, 4), [0, 0, 3, 3]),  # both across nodes
    ]
    placements = Placements.of([grid for grid, _ in grids])
    found = lanes(placement_links(machine, placements))
    assert found.T.tolist() == [expected for _, expected in grids]


def test_a_group_of_one_rank_crosses_nothing():
    assert [rings(stride, 1, 4) for stride in (1, 2, 3, 8)] == [0, 0, 0, 0]


@pytest.mark.parametrize("n_gpus", [2, 3, 5, 6, 7, 8])
def test_a_job_that_fits_in_a_node_does_not_use_the_network(n_gpus):
    """Six GPUs divide no node of eight, and still stand in one."""
    machine = machine_of(units=(1, 8), ranks_per_node=8)
    placements = Placements.of([grid_layout(1, 1, n_gpus, 1), grid_layout(1, 1, n_gpus, 4)])
    alone, among_others = placement_links(machine, placements)["z"].level
    assert alone == 0
    assert among_others == (0 if 8 % n_gpus == 0 else 1)


def test_a_job_that_fits_in_a_rack_is_as_fast_as_on_one_that_it_fills():
    whole, filled = load_machine("gb200-nvl72"), load_machine("gb200-nvl72-64")
    placements = Placements.of([grid_layout(1, 2, 32, 1)])
    links = [placement_links(replace(m, link_points=()), placements)["z"] for m in (whole, filled)]
    bandwidths = [each.kinds["all_gather"].bandwidth_bytes_per_s for each in links]
    assert bandwidths[0] == bandwidths[1]


def test_links_that_are_taken_for_some_groups_are_those_of_these_groups():
    machine = load_machine("frontier")
    stride, size = np.array([1, 1, 8, 64]), np.array([2, 8, 4, 16])
    rows = np.array([3, 1, 1])
    taken = axis_links(machine, stride, size).take(rows)
    alone = axis_links(machine, stride[rows], size[rows])
    assert list(taken.kinds) == list(alone.kinds)
    for kind, links in taken.kinds.items():
        assert links is taken.kinds[kind]
        for name in ("bandwidth_bytes_per_s", "bounding_level", "ring_seconds", "tree_seconds"):
            np.testing.assert_array_equal(getattr(links, name), getattr(alone.kinds[kind], name))


# All-reduces on trees -----------------------------------------------------------------------


def passes_of_trees(machine, stride, size):
    """How often the buffer passes the boundary that bounds a tree, in shares of 80 GB/s."""
    return float(all_reduces_of(machine, stride, size).tree_s_per_byte[0]) * 80e9


@pytest.mark.parametrize(("n_nodes", "passes"), [(2, 1.0), (3, 2.0), (4, 2.0), (64, 2.0)])
@pytest.mark.parametrize("stride", [1, 2, 4])
def test_a_tree_leaves_each_of_two_nodes_once_and_each_of_more_twice(stride, n_nodes, passes):
    """Nodes of four, whose boundary the trees of all groups of the axis share."""
    machine = machine_of(bandwidths=(1e15, 80e9))
    got = passes_of_trees(machine, stride, 4 // stride * n_nodes)
    assert got == pytest.approx(passes * stride, rel=1e-12)


@pytest.mark.parametrize(("stride", "n_inside"), [(1, 4), (2, 2)])
def test_slow_links_of_gpus_bound_a_tree_by_the_chain_inside_the_node(stride, n_inside):
    machine = machine_of(bandwidths=(80e9, 1e15))
    for n_nodes in (2, 8):
        got = passes_of_trees(machine, stride, n_inside * n_nodes)
        assert got == pytest.approx(2 * (n_inside - 1) / n_inside, rel=1e-12)


def test_a_rank_alone_on_each_of_two_nodes_passes_its_own_link_as_it_leaves_the_node():
    machine = machine_of(bandwidths=(80e9, 1e15))
    assert passes_of_trees(machine, 4, 2) == pytest.approx(1.0)


def test_three_ranks_on_two_nodes_have_a_chain_of_two():
    machine = machine_of(bandwidths=(80e9, 1e15))
    assert passes_of_trees(machine, 1, 3) == pytest.approx(1.0)


def test_pods_send_as_much_as_the_nodes_that_trees_join():
    """Two pods of two nodes are four nodes; a rank of a node in each of two pods makes two."""
    machine = machine_of(units=(1, 4, 8), bandwidths=(1e15, 1e15, 80e9), latencies=(0.0,) * 3)
    assert passes_of_trees(machine, 1, 16) == pytest.approx(2.0)
    assert passes_of_trees(machine, 8, 2) == pytest.approx(8 * 1.0)


def test_a_tree_inside_a_node_sends_the_buffer_twice_over_the_listed_ring():
    machine = machine_of(bandwidths=(1e15, 1e15), rings=[(1, 2, 40e9)])
    assert passes_of_trees(machine, 1, 2) == pytest.approx(2 * 80 / 40)
    assert passes_of_trees(machine, 1, 4) == pytest.approx(2 * 80e9 / 1e15)


@given(machines(), STRIDES, SIZES, st.floats(1.0, 1e12), st.sampled_from(RING_KINDS))
def test_a_collective_takes_no_less_than_the_boundaries_that_it_passes(
    machine, stride, size, nbytes, kind
):
    """`least_seconds` adds these up, and must not hold up what runs alone."""
    links = links_of(machine, stride, size)
    passes = links.all_reduce_passes if kind == "all_reduce" else moved_fraction(kind, size)
    least = float((links.occupied_s_per_byte * passes).max()) * nbytes
    assert least <= float(group_seconds(machine, kind, stride, size, nbytes)[0]) * (1 + 1e-9)


def test_a_ring_is_no_bound_of_what_trees_send_over_two_nodes():
    machine = machine_of(bandwidths=(1e15, 80e9))
    links = links_of(machine, 1, 8)
    least = (links.occupied_s_per_byte * links.all_reduce_passes).max()
    assert least == pytest.approx(1 / 80e9)
    assert links_of(machine, 1, 16).all_reduce_passes.max() == pytest.approx(2 * 15 / 16)
