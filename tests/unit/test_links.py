"""Links against an enumeration of every rank, group and unit."""

from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from conftest import machine_of
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.cost.links import axis_links, rings_through_boundary

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


@pytest.mark.parametrize("unit_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("size", [2, 4, 16])
def test_aligned_groups_follow_the_published_law(stride, size, unit_ranks):
    expected = 0 if stride * size <= unit_ranks else min(unit_ranks, stride)
    assert rings(stride, size, unit_ranks) == expected


def test_three_ranks_on_nodes_of_four_cross():
    assert rings(1, 3, 4) == 2


def links_of(machine, stride, size):
    return axis_links(machine, np.array([stride]), np.array([size]))


def bandwidth(machine, stride, size, kind="all_reduce"):
    return float(links_of(machine, stride, size).bandwidth_bytes_per_s[kind][0])


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


def test_the_slowest_crossed_level_bounds():
    machine = machine_of(
        units=(1, 2, 8), bandwidths=(200e9, 10e9, 100e9), latencies=(0, 0, 0), ranks_per_node=8
    )
    inside_package, inside_node, across = (
        links_of(machine, s, g) for s, g in ((1, 2), (1, 8), (1, 16))
    )
    assert [int(x.bounding_level[0]) for x in (inside_package, inside_node, across)] == [0, 1, 1]
    assert [int(x.level[0]) for x in (inside_package, inside_node, across)] == [0, 1, 2]
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
    assert links_of(machine, stride, size).ring_seconds[0] == pytest.approx(expected, rel=1e-12)


def test_tree_latency_takes_the_logarithm_of_the_units_joined():
    machine = machine_of(latencies=(1e-6, 1e-5))
    assert links_of(machine, 1, 32).tree_seconds[0] == pytest.approx(2 * 1e-6 + 3 * 1e-5)


def test_a_slower_kind_of_collective():
    from dataclasses import replace

    from conftest import quantity

    machine = machine_of()
    slower = replace(machine.links[1], kind_fraction={"reduce_scatter": quantity(0.5)})
    machine = replace(machine, links=(machine.links[0], slower))
    assert bandwidth(machine, 4, 2, "reduce_scatter") == pytest.approx(10e9)
    assert bandwidth(machine, 4, 2, "all_gather") == pytest.approx(20e9)
