"""Steps of rings and trees, fitted to collectives that follow the law."""

from dataclasses import replace

import pytest

from axonn_tune.calibration.fit.assemble import with_link_points
from axonn_tune.calibration.fit.hops import with_hops_that_hold
from axonn_tune.calibration.fit.links import LevelShape, fitted_levels
from axonn_tune.calibration.fit.steps import (
    LEAST_RING_FRACTION,
    fitted_hop_steps,
    fitted_ring_steps,
    fitted_tree_steps,
)
from axonn_tune.cost.prices import group_seconds
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.points import LinkPoint

MIB = 2**20
SIZES = (16, 32, 64, 128, 256, 512)
MESSAGES = (64 * MIB, 128 * MIB, 512 * MIB)


def step_seconds(size, chunk):
    """The larger of a latency and a bandwidth; the latency jumps between 128 and 256 ranks."""
    return max(34e-6 if size < 200 else 80e-6, chunk / 90e9)


def timed(kind, size, nbytes, factor=1.0):
    steps = (size - 1) * (2 if kind == "all_reduce" else 1)
    seconds = factor * steps * step_seconds(size, nbytes / size)
    return LinkPoint(kind, 1, size, 1, True, nbytes, seconds)


def gathers(kind="all_gather", factor=1.0):
    return [timed(kind, size, nbytes, factor) for size in SIZES for nbytes in MESSAGES]


def test_steps_are_found_with_their_regimes():
    found = fitted_ring_steps(gathers())
    assert {point.above_ranks for point in found} == {0, 128}
    for point in found:
        size = 16 if point.above_ranks == 0 else 256
        assert point.seconds == pytest.approx(step_seconds(size, point.nbytes), rel=1e-3)


def test_kinds_that_take_equally_long_are_taken_together_and_others_apart():
    alike = fitted_ring_steps(gathers() + gathers("reduce_scatter", 1.05))
    assert {point.kind for point in alike} == {""}
    apart = fitted_ring_steps(gathers() + gathers("reduce_scatter", 1.5))
    assert {point.kind for point in apart} == {"all_gather", "reduce_scatter"}


def test_one_size_of_ring_does_not_tell_a_step_from_a_latency():
    assert fitted_ring_steps([p for p in gathers() if p.size == 64]) == ()


def test_all_reduces_that_beat_the_ring_ran_on_a_tree():
    on_ring = [timed("all_reduce", size, 512 * MIB, 1.1) for size in (16, 32)]
    levels = {256: 5, 512: 6}
    on_tree = [
        LinkPoint("all_reduce", 1, size, 1, True, 64 * MIB, 2 * n * 400e-6)
        for size, n in levels.items()
    ]
    rings = fitted_ring_steps([*gathers(), *on_ring, *on_tree])
    own = [point for point in rings if point.kind == "all_reduce"]
    assert [point.nbytes for point in own] == [16 * MIB, 32 * MIB]
    trees = fitted_tree_steps([*gathers(), *on_ring, *on_tree], rings, unit_ranks=8)
    assert [(p.nbytes, p.seconds) for p in trees] == [(64 * MIB, pytest.approx(400e-6))]


@pytest.mark.parametrize(("factor", "is_on_tree"), [(0.95, True), (1.05, False)])
def test_an_all_reduce_is_held_against_rings_of_its_own_regime(factor, is_on_tree):
    """Steps of rings of up to 128 ranks take less than half as long."""
    fraction = factor * LEAST_RING_FRACTION
    reduces = [timed("all_reduce", size, 512 * MIB, fraction) for size in (256, 512)]
    rings = fitted_ring_steps(gathers())
    assert bool(fitted_tree_steps([*gathers(), *reduces], rings, unit_ranks=8)) == is_on_tree


def test_trees_of_two_nodes_have_steps_apart_from_those_of_more():
    levels = {16: 1, 32: 2, 512: 6}
    on_tree = [
        LinkPoint("all_reduce", 1, size, 1, True, 512 * MIB, 2 * n * (3e-3 if n == 1 else 1e-3))
        for size, n in levels.items()
    ]
    rings = fitted_ring_steps(gathers())
    trees = fitted_tree_steps([*gathers(), *on_tree], rings, unit_ranks=8)
    found = [(p.above_ranks, p.seconds) for p in trees]
    assert found == [(0, pytest.approx(3e-3)), (16, pytest.approx(1e-3))]


def test_no_all_reduce_counts_both_as_a_ring_and_as_a_tree():
    """Two all-reduces of one chunk, one a little faster than twice the gather, one slower."""
    on_ring = [timed("all_reduce", 16, 512 * MIB, 0.92), timed("all_reduce", 32, 1024 * MIB, 1.25)]
    rings = fitted_ring_steps([*gathers(), *on_ring])
    assert [p.nbytes for p in rings if p.kind == "all_reduce"] == [32 * MIB]
    assert fitted_tree_steps([*gathers(), *on_ring], rings, unit_ranks=8) == ()


def test_logs_of_several_numbers_of_nodes_give_a_machine_its_steps():
    machine = with_link_points(load_machine("frontier-2024"), gathers())
    outer = machine.links[-1]
    assert outer.ring_steps.origin == "measured"
    assert [p for p in outer.ring_steps.points if p.above_ranks == 128]
    one_size = [point for point in gathers() if point.size == 16]
    alone = with_link_points(load_machine("dgx-h100"), one_size)
    assert alone.links[-1].ring_steps is None


HOP_BYTES = (64 * 2**10, MIB, 16 * MIB, 256 * MIB)


def hop_seconds(chunk):
    return 2e-6 + chunk / 300e9


def inside(kind, size, nbytes, launch_seconds=20e-6):
    """A ring inside a node, which takes a time to begin whatever its number of ranks."""
    seconds = launch_seconds + (size - 1) * hop_seconds(nbytes / size)
    return LinkPoint(kind, 1, size, 1, True, nbytes, seconds)


def rings_inside(sizes=(2, 4, 8), kinds=("all_gather", "reduce_scatter")):
    return [inside(kind, size, nbytes) for kind in kinds for size in sizes for nbytes in HOP_BYTES]


def test_a_hop_is_what_a_further_rank_adds():
    """The time that a ring takes to begin is in none of its hops."""
    found = fitted_hop_steps(rings_inside())
    assert {point.kind for point in found} == {"all_gather", "reduce_scatter"}
    for point in found:
        assert point.seconds == pytest.approx(hop_seconds(point.nbytes), rel=1e-3)
    chunks = [point.nbytes for point in found if point.kind == "all_gather"]
    assert chunks == [nbytes / 8 for nbytes in HOP_BYTES if nbytes / 8 >= HOP_BYTES[0] / 2]


def test_rings_of_one_size_tell_nothing_of_hops():
    assert fitted_hop_steps(rings_inside(sizes=(8,))) == ()


def test_rings_that_grow_for_nothing_have_no_hops():
    """More ranks that take no longer are served by a switch, or are noise."""
    flat = [
        LinkPoint("all_gather", 1, size, 1, True, size * MIB, 100e-6 / size) for size in (2, 4, 8)
    ]
    assert fitted_hop_steps(flat) == ()


def test_calibrated_nodes_have_the_steps_of_their_hops():
    across = [
        LinkPoint(kind, 8, 2, 8, True, nbytes, 10e-6 + nbytes / 50e9)
        for kind in ("all_gather", "reduce_scatter")
        for nbytes in HOP_BYTES
    ]
    shapes = [LevelShape("intra-node", 1), LevelShape("inter-node", 8)]
    inner, outer = fitted_levels(shapes, [*rings_inside(), *across], ranks_per_node=8)
    assert inner.hop_steps.points == fitted_hop_steps(rings_inside())
    assert outer.hop_steps is None


def test_one_node_alone_has_no_ring_that_leaves_it():
    (level,) = fitted_levels([LevelShape("intra-node", 1)], rings_inside(), ranks_per_node=8)
    assert level.ring_steps is not None
    assert level.hop_steps is None


def test_a_profile_keeps_its_hops_until_they_are_measured_anew():
    machine = load_machine("dgx-h100")
    known = machine.links[0].hop_steps
    assert with_link_points(machine, rings_inside(sizes=(8,))).links[0].hop_steps == known
    anew = with_link_points(machine, rings_inside()).links[0].hop_steps
    assert anew.points != known.points


DGX = replace(load_machine("dgx-b200"), link_points=())
# Its hops take longer than their latency and bytes in messages of 80 MiB.
LEAVING_BYTES = (20 * MIB, 80 * MIB, 320 * MIB)


def measured_as_on(machine):
    """DGX B200, whose hops have steps, with gathers over two nodes as they are on `machine`."""
    seconds = group_seconds(machine, "all_gather", 1, 16, LEAVING_BYTES)
    gathers = [
        LinkPoint("all_gather", 1, 16, 1, True, nbytes, float(each))
        for nbytes, each in zip(LEAVING_BYTES, seconds, strict=True)
    ]
    return replace(DGX, link_points=tuple(gathers))


def test_hops_that_rings_wait_for_hold():
    machine = measured_as_on(DGX)
    assert with_hops_that_hold(machine) == machine


def test_hops_that_rings_hide_do_not_hold():
    plain = replace(DGX, links=(replace(DGX.links[0], hop_steps=None), *DGX.links[1:]))
    found = with_hops_that_hold(measured_as_on(plain))
    assert found.links == plain.links


def test_hops_hold_where_no_ring_leaves_a_node():
    assert with_hops_that_hold(DGX) == DGX
