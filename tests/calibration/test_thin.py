"""Thinning keeps what the points that stay cannot tell."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.calibration.fit.thin import spread_products, thinned_collectives
from axonn_tune.spec.points import GemmPoint, LinkPoint


def collectives(seconds, kind="all_gather"):
    return [LinkPoint(kind, 1, 8, 1, True, 1024 * 2**i, value) for i, value in enumerate(seconds)]


@given(
    st.lists(st.floats(1e-6, 1e-3), min_size=1, max_size=20).map(np.cumsum),
    st.sampled_from([0.0, 0.03, 0.2]),
)
def test_lines_between_the_points_that_stay_meet_the_others(seconds, error):
    points = collectives(seconds)
    few = thinned_collectives(points, error)
    assert set(few) <= set(points)
    assert {points[0], points[-1]} <= set(few)
    line = np.interp([p.nbytes for p in points], [p.nbytes for p in few], [p.seconds for p in few])
    assert (np.abs(line / seconds - 1.0) <= error + 1e-12).all()


def test_a_straight_line_keeps_its_ends_and_a_jump_keeps_both_sides():
    straight = [1e-5 + 1e-10 * 1024 * 2**i for i in range(10)]
    assert len(thinned_collectives(collectives(straight), 0.01)) == 2
    jump = [*([1e-5] * 5), *([2e-5] * 5)]
    assert [p.nbytes // 1024 for p in thinned_collectives(collectives(jump), 0.01)] == [
        1,
        16,
        32,
        512,
    ]


def test_kinds_are_thinned_apart():
    points = collectives([1e-5, 2e-5]) + collectives([3e-5, 4e-5], "all_reduce")
    assert set(thinned_collectives(points, 0.5)) == set(points)


def test_products_that_stay_lie_far_from_each_other():
    sizes = [2**i for i in range(8, 15)]
    points = [GemmPoint(m, n, 1024, "NN", "bf16", 1e-3) for m in sizes for n in sizes]
    points += [GemmPoint(256, 256, 1024, "NN", "fp16", 1e-3)]
    few = spread_products(points, 4)
    corners = {(m, n) for m in (256, 16384) for n in (256, 16384)}
    assert {(p.m, p.n) for p in few if p.dtype == "bf16"} == corners
    assert [p.dtype for p in few].count("fp16") == 1
    assert spread_products(points, 1000) == tuple(points)
