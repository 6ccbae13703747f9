"""Measured collectives, kernels and attention cost what was measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prices import attention_seconds
from worlds import machine_of, quantity

from axonn_tune.api.searching import build_search
from axonn_tune.cost.curve import Curve, Spline, spline_through
from axonn_tune.cost.links import axis_links, ring_share
from axonn_tune.cost.memory_bound import memory_bound_seconds
from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import CollectivePrices, group_seconds
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import AXONN_AXES, grid_layout
from axonn_tune.spec.links import RingShare
from axonn_tune.spec.plan import Attention, Collective
from axonn_tune.spec.points import AttentionPoint, LinkPoint, MemoryPoint
from axonn_tune.spec.resources import resources
from axonn_tune.step.explain import explain

SIZES = (2**10, 2**16, 2**22)
SECONDS = (1e-4, 3e-4, 9e-3)


def with_points(machine, kind="all_gather", stride=1, size=4, n_rings=1, factor=1.0):
    points = tuple(
        LinkPoint(kind, stride, size, n_rings, True, nbytes, factor * seconds)
        for nbytes, seconds in zip(SIZES, SECONDS, strict=True)
    )
    return replace(machine, link_points=machine.link_points + points)


def test_a_measured_collective_takes_the_measured_time():
    machine = with_points(machine_of())
    assert group_seconds(machine, "all_gather", 1, 4, SIZES) == pytest.approx(SECONDS)
    between = (2**16 + 2**22) / 2
    expected = (SECONDS[1] + SECONDS[2]) / 2
    assert group_seconds(machine, "all_gather", 1, 4, between) == pytest.approx(expected)
    # Nothing is said of other kinds, strides and sizes.
    for kind, stride, size in (("all_reduce", 1, 4), ("all_gather", 4, 4), ("all_gather", 1, 2)):
        got = group_seconds(machine, kind, stride, size, SIZES)
        assert got == pytest.approx(group_seconds(machine_of(), kind, stride, size, SIZES))


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.lists(st.floats(2**10, 2**22), max_size=5))
def test_a_latency_and_a_bandwidth_are_met_at_every_size(alpha, beta, sizes):
    points = tuple(
        LinkPoint("all_gather", 1, 4, 1, True, n, 3 * alpha + 0.75 * n / beta) for n in SIZES
    )
    got = group_seconds(replace(machine_of(), link_points=points), "all_gather", 1, 4, sizes)
    assert got == pytest.approx(3 * alpha + 0.75 * np.array(sizes) / beta)


def test_part_of_an_axis_says_nothing_of_the_whole():
    machine = with_points(machine_of(), stride=2, n_rings=1)
    got = group_seconds(machine, "all_gather", 2, 4, SIZES)
    assert got == pytest.approx(group_seconds(machine_of(), "all_gather", 2, 4, SIZES))


def test_attention_is_that_of_the_engines_library():
    """Where it was not measured, what was measured stands for it."""

    def point(seconds, library):
        return AttentionPoint(1, 8, 1024, 64, False, True, "bf16", seconds, library=library)

    def seconds(machine, library):
        operation = Attention("a", 1.0, 8.0, 1024.0, 64, False, True, library=library)
        return attention_seconds(operation, machine, "bf16").item()

    machine = machine_of()
    points = (point(2e-4, "flash-attention"), point(1e-4, "cudnn"))
    both = replace(machine, kernels=replace(machine.kernels, attention_points=points))
    assert seconds(both, "flash-attention") == pytest.approx(2e-4)
    assert seconds(both, "cudnn") == pytest.approx(1e-4)
    unnamed = (point(3e-4, ""),)
    other = replace(machine, kernels=replace(machine.kernels, attention_points=unnamed))
    assert seconds(other, "cudnn") == pytest.approx(3e-4)
    with pytest.raises(InputError, match="library is 'fa9'; allowed: flash-attention, cudnn"):
        point(1e-4, "fa9")


def test_a_release_without_a_mask_is_its_own_with_one_before_another_release():
    """Where a library was not measured at all, the one that was measured first stands for it."""

    def point(seconds, masked, library):
        sizes = (1, 8, 4096, 64)
        return AttentionPoint(*sizes, True, True, "bf16", seconds, masked=masked, library=library)

    points = (
        point(1e-4, True, "cudnn"),
        point(1.5e-4, False, "cudnn"),
        point(2e-4, True, "cudnn-9.13"),
    )
    machine = machine_of()
    machine = replace(machine, kernels=replace(machine.kernels, attention_points=points))

    def seconds(masked, library):
        sizes = (1.0, 8.0, 4096.0, 64)
        operation = Attention("a", *sizes, True, True, masked=masked, library=library)
        return attention_seconds(operation, machine, "bf16").item()

    assert seconds(True, "cudnn-9.13") == pytest.approx(2e-4)
    assert seconds(False, "cudnn-9.13") == pytest.approx(2e-4)
    # A kernel without a mask does half of what was measured, the work of a causal one.
    assert seconds(False, "cudnn") == pytest.approx(0.75e-4)
    assert seconds(True, "flash-attention") == pytest.approx(1e-4)
    assert seconds(False, "flash-attention") == pytest.approx(0.75e-4)


def on_switch(machine):
    level = replace(machine.links[0], is_switch=True)
    return replace(machine, links=(level, *machine.links[1:]))


def test_on_a_switch_one_group_tells_of_all_groups_of_as_many_ranks():
    plain = machine_of(units=(1, 8), ranks_per_node=8)
    points = tuple(
        LinkPoint("all_gather", 1, 2, 1, False, nbytes, seconds)
        for nbytes, seconds in zip(SIZES, SECONDS, strict=True)
    )
    switched = replace(on_switch(plain), link_points=points)
    for stride in (1, 2, 4):
        got = group_seconds(switched, "all_gather", stride, 2, SIZES)
        assert got == pytest.approx(SECONDS)
    # The law holds for groups that leave the node, have other sizes, or stand on no switch.
    for stride, size in ((8, 2), (1, 4), (1, 16)):
        got = group_seconds(switched, "all_gather", stride, size, SIZES)
        assert got == pytest.approx(group_seconds(plain, "all_gather", stride, size, SIZES))
    without = replace(plain, link_points=points)
    got = group_seconds(without, "all_gather", 1, 2, SIZES)
    assert got == pytest.approx(group_seconds(plain, "all_gather", 1, 2, SIZES))


def test_a_machine_of_one_node_may_be_one_switch():
    machine = on_switch(machine_of(units=(1,), bandwidths=(1e11,), latencies=(0.0,)))
    machine = with_points(machine, size=2)
    assert machine.switch_ranks == 4
    assert group_seconds(machine, "all_gather", 2, 2, SIZES) == pytest.approx(SECONDS)


def test_a_switch_joins_single_ranks():
    level = machine_of().links[1]
    with pytest.raises(InputError, match="is_switch is true; allowed: only where unit_ranks is 1"):
        replace(level, is_switch=True)


def test_one_size_of_message_is_no_curve():
    point = LinkPoint("all_gather", 1, 4, 1, True, 2**28, 1e-2)
    machine = replace(machine_of(), link_points=(point,))
    got = group_seconds(machine, "all_gather", 1, 4, SIZES)
    assert got == pytest.approx(group_seconds(machine_of(), "all_gather", 1, 4, SIZES))


@given(st.lists(st.floats(1, 1e10), min_size=2, max_size=6, unique=True), st.floats(0, 1e11))
def test_more_bytes_never_take_less_time(sizes, work):
    sizes = sorted(sizes)
    seconds = np.cumsum(np.linspace(1e-6, 1e-3, len(sizes)))
    got = Curve.through(sizes, seconds).at([work, work * 1.5 + 1])
    assert got[1] >= got[0] > 0


def test_every_call_of_a_bucket_takes_its_own_time():
    machine = with_points(machine_of(), kind="all_reduce", stride=1, size=4)
    table = CandidateTable.single(Configuration(grid_layout(1, 1, 1, 4)))
    prices = CollectivePrices(placement_links(machine, table.placements), table)
    nbytes, calls = np.array([4.0 * 2**16]), np.array([4.0])
    got = prices.seconds(Collective("g", "all_reduce", nbytes, "data", calls))
    assert got == pytest.approx(4 * SECONDS[1])


def test_only_collectives_that_send_the_same_share_a_price():
    machine = machine_of()
    table = CandidateTable.single(Configuration(grid_layout(1, 1, 4, 4)))
    links = placement_links(machine, table.placements)
    known = {}
    prices = CollectivePrices(links, table, known=known)
    first = Collective("first", "all_gather", np.array([1e9]), "z")
    same = replace(first, name="same", nbytes=np.array([1e9]))
    others = [
        replace(first, name="more", nbytes=np.array([2e9])),
        replace(first, name="calls", n_calls=8.0),
        replace(first, name="axis", axis="data"),
        replace(first, name="kind", kind="all_reduce"),
    ]
    assert prices.seconds(same) == prices.seconds(first)
    assert len(known) == 1
    for other in others:
        assert prices.seconds(other) == CollectivePrices(links, table).seconds(other)
        assert prices.seconds(other) != prices.seconds(first)


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_what_is_sent_on_a_placement_costs_the_same_alone(kind):
    """Weights are the same for all micro-batches of a placement, activations are not."""
    machine = machine_of()
    configurations = [
        Configuration(grid_layout(1, 1, z, 16 // z), micro_batch=micro_batch)
        for z in (4, 2)
        for micro_batch in (1, 2, 4)
    ]
    one_placement = CandidateTable.of(configurations, AXONN_AXES)
    rows = np.array([0, 0, 0, 3, 3, 3])
    table = replace(one_placement, placement=rows)
    links = placement_links(machine, table.placements)
    prices = CollectivePrices(links, table)
    weights = np.repeat([1e9, 3e9], 3)
    for number, nbytes in enumerate((weights, weights * table.micro_batch)):
        got = prices.seconds(Collective(f"sent{number}", kind, nbytes, "z"))
        for i in range(len(table)):
            alone = CollectivePrices(links, table.take([i]))
            of_one = alone.seconds(Collective("sent", kind, nbytes[[i]], "z"))
            np.testing.assert_array_equal(got[[i]], of_one)


def test_candidates_that_recompute_differently_share_a_price():
    machine = machine_of()
    configuration = Configuration(grid_layout(1, 1, 4, 4), micro_batch=2)
    more = replace(configuration, recompute="full")
    other = replace(configuration, micro_batch=4)
    table = CandidateTable.of([configuration, other], AXONN_AXES)
    table = table.joined(table.executed("full", 1)).take(np.array([0, 3, 2, 1]))
    assert table.configuration(2) == more
    known = {}
    prices = CollectivePrices(placement_links(machine, table.placements), table, known=known)
    sent = Collective("sent", "all_gather", np.array([1e9, 2e9, 1e9, 2e9]), "z")
    got = prices.seconds(sent)
    (of_senders,) = known.values()
    assert of_senders.shape == (2,)
    np.testing.assert_array_equal(got, of_senders[[0, 1, 0, 1]])
    assert got[1] > got[0]
    np.testing.assert_array_equal(prices.seconds(sent, slice(1, 3)), got[1:3])


def test_a_floor_of_shared_links_is_no_longer_than_what_was_measured():
    """Links that turn out faster than their level says must not be held up by it."""
    machine = with_points(machine_of(), factor=1e-4)
    strides, sizes = (np.array([value]) for value in (1, 4))
    occupied = axis_links(machine, strides, sizes).occupied_s_per_byte
    fastest = min(1e-4 * t / (0.75 * n) for n, t in zip(SIZES, SECONDS, strict=True))
    assert occupied.max() <= fastest * (1 + 1e-12)


def test_latency_by_kind():
    plain = machine_of(units=(1,), bandwidths=(1e11,), latencies=(1e-6,))
    slow = replace(plain.links[0], kind_latency_seconds={"all_gather": quantity(1e-4)})
    machine = replace(plain, links=(slow,))
    assert group_seconds(machine, "all_gather", 1, 4, 0.0) == pytest.approx(3e-4)
    assert group_seconds(machine, "reduce_scatter", 1, 4, 0.0) == pytest.approx(3e-6)


def test_shares_of_rings():
    level = replace(
        machine_of().links[0],
        ring_shares=(
            RingShare("all_reduce", 2, quantity(20e9)),
            RingShare("all_reduce", 8, quantity(10e9)),
        ),
    )
    got = ring_share(level, "all_reduce", np.array([1, 2, 4, 8, 16]))
    assert got == pytest.approx([20e9, 20e9, np.sqrt(20e9 * 10e9), 10e9, 5e9])
    law = ring_share(level, "all_gather", np.array([1, 4]))
    assert law == pytest.approx([300e9, 75e9])


def test_kernels_take_the_time_of_their_kind():
    points = (
        MemoryPoint("gelu", "bf16", 1000, 1e-5),
        MemoryPoint("gelu", "bf16", 3000, 2e-5),
        MemoryPoint("gelu", "fp32", 1000, 9e-5),
    )
    machine = machine_of()
    machine = replace(machine, kernels=replace(machine.kernels, memory_points=points))
    got = memory_bound_seconds([0.0, 500.0, 2000.0, 6000.0], machine, "gelu", "bf16")
    assert got == pytest.approx([0.0, 1e-5, 1.5e-5, 3.5e-5])
    assert memory_bound_seconds(1000.0, machine, "gelu", "fp16") > 0
    plain = memory_bound_seconds(1000.0, machine_of(), "add", "bf16")
    assert memory_bound_seconds(1000.0, machine, "add", "bf16") == plain


@pytest.mark.parametrize("fused", [True, False])
def test_attention_takes_its_measured_time_and_scales_between(fused):
    plain = machine_of()

    def seconds(machine, heads, backward=False):
        op = Attention("a", 2.0, heads, 1024, 64, backward, fused)
        return float(attention_seconds(op, machine, "bf16"))

    points = tuple(
        AttentionPoint(2, h, 1024, 64, False, fused, "bf16", 1.7 * seconds(plain, h))
        for h in (4, 16)
    )
    machine = replace(plain, kernels=replace(plain.kernels, attention_points=points))
    for heads in (4, 8, 16, 64):
        assert seconds(machine, heads) == pytest.approx(1.7 * seconds(plain, heads), rel=1e-9)
    assert seconds(machine, 4, backward=True) == seconds(plain, 4, backward=True)


def test_attention_in_8_bits_takes_its_own_measured_time():
    """Where it was not measured, it takes as long as in the job's type."""

    def point(dtype, seconds, masked=True):
        return AttentionPoint(1, 8, 1024, 64, False, True, dtype, seconds, masked=masked)

    def seconds(points, number_format, masked=True):
        plain = machine_of()
        machine = replace(plain, kernels=replace(plain.kernels, attention_points=points))
        operation = Attention("a", 1.0, 8.0, 1024, 64, False, True)
        operation = replace(operation, number_format=number_format, masked=masked)
        return attention_seconds(operation, machine, "bf16").item()

    points = (point("bf16", 3e-4), point("fp8", 2e-4), point("bf16", 8e-4, masked=False))
    assert seconds(points, "") == pytest.approx(3e-4)
    assert seconds(points, "fp8") == pytest.approx(2e-4)
    assert seconds(points, "fp8", masked=False) == seconds(points, "", masked=False)
    assert seconds(points[:1], "fp8") == pytest.approx(3e-4)
    assert seconds((), "fp8") == seconds((), "")


def test_attention_with_a_window_takes_its_own_measured_time():
    """Heads of another size take what whole attention takes for the blocks that a window cuts."""
    plain = machine_of()

    def seconds(machine, window, head_dim=64, number_format=""):
        op = Attention("a", 1.0, 8.0, 4096, head_dim, False, True, window=window)
        op = replace(op, number_format=number_format)
        return attention_seconds(op, machine, "bf16").item()

    sizes = (1, 8, 4096, 64, False, True)
    points = (
        AttentionPoint(*sizes, "bf16", 9e-4),
        AttentionPoint(*sizes, "bf16", 2e-4, window=128),
        AttentionPoint(*sizes, "fp8", 1e-4, window=128),
    )
    machine = replace(plain, kernels=replace(plain.kernels, attention_points=points))
    assert seconds(machine, 0) == pytest.approx(9e-4)
    assert seconds(machine, 128) == pytest.approx(2e-4)
    assert seconds(machine, 128, number_format="fp8") == pytest.approx(1e-4)
    for of_heads in (machine, plain):
        whole = seconds(of_heads, 0, 128)
        n_keys = 256 - 128**2 / 4096
        assert seconds(of_heads, 128, 128) == pytest.approx(whole * n_keys / 4096 * 2)
        assert seconds(of_heads, 4000, 128) == pytest.approx(whole)
    with pytest.raises(InputError, match=r"window is 5000; allowed: 0 to 4096"):
        replace(points[1], window=5000)


def test_unfused_attention_computes_the_scores_outside_a_window_too():
    def seconds(window):
        op = Attention("a", 1.0, 8.0, 4096, 64, False, False, window=window)
        return attention_seconds(op, machine_of(), "bf16").item()

    assert seconds(128) == seconds(0)


def test_attention_without_a_mask_takes_its_own_measured_time():
    """A square without a mask has twice the work of a causal one of its length."""
    plain = machine_of()

    def seconds(machine, masked, backward=False, n_launches=1.0):
        op = Attention("a", 1.0, 8.0, 2048, 64, backward, True, n_launches=n_launches)
        return float(attention_seconds(replace(op, masked=masked), machine, "bf16"))

    causal = seconds(plain, True)
    points = tuple(
        AttentionPoint(1, 8, 2048, 64, False, True, "bf16", factor * causal, masked=masked)
        for factor, masked in ((1.5, True), (2.4, False))
    )
    machine = replace(plain, kernels=replace(plain.kernels, attention_points=points))
    assert seconds(machine, True) == pytest.approx(1.5 * causal)
    assert seconds(machine, False) == pytest.approx(1.2 * causal)
    assert seconds(machine, False, n_launches=3.0) == pytest.approx(3.6 * causal)
    # Where it was not measured it is as fast as with a mask.
    half = replace(plain, kernels=replace(plain.kernels, attention_points=points[:1]))
    assert seconds(half, False) == seconds(half, True) == pytest.approx(1.5 * causal)
    assert seconds(machine, False, backward=True) == seconds(plain, True, backward=True)


def test_an_explanation_names_the_level_of_the_operations_own_kind():
    """All-gathers are held up inside the node, all-reduces across nodes."""
    machine = machine_of(bandwidths=(300e9, 80e9))
    slow_gathers = replace(machine.links[0], kind_fraction={"all_gather": quantity(0.01)})
    machine = replace(machine, links=(slow_gathers, machine.links[1]))
    search = build_search("tiny", 8, machine, order="zyxd")
    found = explain(best_of_layout(search, "1x1x8x1"))
    levels = {op.kind: op.bound_by for op in found.operations if op.axis == "z"}
    assert levels["all_gather"] == "level0" and levels["reduce_scatter"] == "level1"


def test_more_of_a_link_speeds_up_what_was_measured_across_it():
    machine = with_points(machine_of(units=(1, 4)), size=8)
    by_name = {resource.name: resource for resource in resources(machine)}
    inner, outer = (by_name[f"level{i} bandwidth"].improved(2.0) for i in (0, 1))
    before = group_seconds(machine, "all_gather", 1, 8, SIZES)
    assert group_seconds(inner, "all_gather", 1, 8, SIZES) == pytest.approx(before)
    faster = group_seconds(outer, "all_gather", 1, 8, SIZES)
    assert faster[0] == pytest.approx(before[0])  # all of it latency
    assert faster[2] == pytest.approx(SECONDS[0] + (SECONDS[2] - SECONDS[0]) / 2)
    quicker = group_seconds(by_name["level1 latency"].improved(2.0), "all_gather", 1, 8, SIZES)
    assert quicker[0] == pytest.approx(before[0] / 2)


def test_placements_of_a_search_find_their_curves():
    machine = with_points(machine_of(), kind="all_reduce", stride=2, size=4, n_rings=2)
    placements = Placements.of([grid_layout(2, 4, 1, 1), grid_layout(4, 2, 1, 1)], ("xyzd",))
    curve = placement_links(machine, placements)["y"].kinds["all_reduce"].curve
    assert curve.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("seconds", "beyond"),
    [
        ((1.0, 2.0), 3.0),  # along the line
        ((2.0, 2.0), 2.0),  # level
        ((3.0, 2.0), 2.0),  # a line that falls is level
        ((0.1, 2.0), 3.0),  # no steeper than in proportion
    ],
)
def test_beyond_the_largest_size_the_last_line_goes_on(seconds, beyond):
    assert Curve.through((5.0, 10.0), seconds).at(15.0) == pytest.approx(beyond)


def test_one_size_says_all_in_proportion():
    assert Curve.through([10.0], [1.0]).at([5.0, 20.0]) == pytest.approx([1.0, 2.0])


def test_equal_points_have_one_spline():
    points, values = np.array([[0.0], [1.0], [3.0]]), np.array([1.0, 2.0, 5.0])
    known = spline_through(points, values)
    assert spline_through(points.copy(), values.copy()) is known
    places = np.linspace(-1.0, 4.0, 11)[:, None]
    np.testing.assert_array_equal(known(places), Spline(points, values)(places))
    assert spline_through(points, values + 1.0) is not known
    assert spline_through(points.reshape(1, 3), values[:1]) is not known


def test_points_that_a_linear_function_meets_say_nothing_about_its_error():
    line = Spline(np.array([[0.0], [1.0]]), np.array([1.0, 2.0]))
    assert line.leave_one_out_error() == 0.0
    bent = Spline(np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 2.0, 5.0]))
    assert bent.leave_one_out_error() > 0.0


def test_points_of_one_size_count_with_their_mean_in_any_order():
    """On a switch the groups of all strides take as long, and may have points of one size."""
    machine = load_machine("dgx-h100")
    points = [
        LinkPoint("all_gather", stride, 2, 1, False, nbytes, seconds)
        for stride, nbytes, seconds in ((1, 2**20, 1e-4), (1, 2**26, 1e-3), (4, 2**26, 3e-3))
    ]
    for order in (points, points[::-1]):
        links = replace(machine, link_points=tuple(order))
        assert group_seconds(links, "all_gather", 1, 2, 2**26)[0] == pytest.approx(2e-3)
