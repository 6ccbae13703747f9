"""Steps of rings and trees, fitted to collectives that follow the law."""

import pytest

from axonn_tune.calibration.fit.assemble import with_link_points
from axonn_tune.calibration.fit.steps import fitted_ring_steps, fitted_tree_steps
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
