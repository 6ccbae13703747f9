"""Rings and trees whose steps were measured."""

from dataclasses import replace

import numpy as np
import pytest
from worlds import machine_of

from axonn_tune.cost.collectives import tree_share
from axonn_tune.cost.prices import group_seconds
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.links import Steps
from axonn_tune.spec.points import StepPoint
from axonn_tune.spec.resources import resources

KIB = 1024.0
PLAIN = machine_of(units=(1, 4), bandwidths=(300e9, 80e9), latencies=(1e-6, 1e-5))
# A step of 64 KiB takes 10 us, one of 1 MiB 40 us; above 128 ranks every step takes 90 us.
RING = (
    StepPoint("", 0, 64 * KIB, 10e-6),
    StepPoint("", 0, 1024 * KIB, 40e-6),
    StepPoint("", 128, 64 * KIB, 90e-6),
)
# Steps of trees over two nodes, and the same ones over more.
OVER_TWO = (StepPoint("all_reduce", 0, 1.0, 10e-6), StepPoint("all_reduce", 0, 2.0**26, 300e-6))
OVER_MORE = tuple(replace(point, above_ranks=8) for point in OVER_TWO)
TREE = (*OVER_TWO, *OVER_MORE)


def machine_with(ring=RING, tree=()):
    """A machine whose nodes of four are joined by measured steps."""
    steps = [Steps("published", "made up", points) if points else None for points in (ring, tree)]
    outer = replace(PLAIN.links[1], ring_steps=steps[0], tree_steps=steps[1])
    return replace(PLAIN, links=(PLAIN.links[0], outer))


def seconds(machine, kind, stride, size, nbytes):
    return float(group_seconds(machine, kind, stride, size, nbytes)[0])


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("size", "chunk_kib", "step"), [(8, 64, 10e-6), (128, 1024, 40e-6)])
def test_a_ring_takes_one_step_less_than_it_has_ranks(kind, size, chunk_kib, step):
    got = seconds(machine_with(), kind, 1, size, size * chunk_kib * KIB)
    assert got == pytest.approx((size - 1) * step)


def test_steps_between_two_measured_chunks_lie_on_a_line():
    got = seconds(machine_with(), "all_gather", 1, 8, 8 * 544 * KIB)
    assert got == pytest.approx(7 * 25e-6)


def test_a_large_ring_has_the_steps_of_its_regime():
    short, long = (seconds(machine_with(), "all_gather", 1, n, n * 64 * KIB) for n in (128, 132))
    assert (short, long) == (pytest.approx(127 * 10e-6), pytest.approx(131 * 90e-6))


@pytest.mark.parametrize("stride", [2, 4, 16])
def test_rings_that_share_a_boundary_move_their_chunks_through_it_together(stride):
    """Up to four rings of a node's ranks leave it, whatever the stride."""
    n_rings = min(stride, 4)
    got = seconds(machine_with(), "all_gather", stride, 8, 8 * 64 * KIB)
    one = seconds(machine_with(), "all_gather", 1, 8, 8 * n_rings * 64 * KIB)
    assert got == pytest.approx(one)


@pytest.mark.parametrize(("kind", "size"), [("all_gather", 4), ("send_recv", 16)])
def test_groups_inside_a_node_and_transfers_have_no_such_steps(kind, size):
    args = (kind, 1, size, 2.0**24)
    assert seconds(machine_with(), *args) == seconds(PLAIN, *args)


def test_an_all_reduce_goes_twice_around_the_ring_or_up_and_down_the_tree():
    small, large = 16 * 64 * KIB, 2.0**26
    machine = machine_with(tree=TREE)
    by_ring = [2 * 15 * 10e-6, 2 * 15 * (40e-6 + 30e-6 / (960 * KIB) * (2.0**22 - 2.0**20))]
    per_byte = 290e-6 / (2.0**26 - 1)
    by_tree = [2 * 2 * (10e-6 + per_byte * (small - 1)), 2 * max(2 * 300e-6, large / 80e9)]
    for nbytes, ring, tree in zip((small, large), by_ring, by_tree, strict=True):
        got = seconds(machine, "all_reduce", 1, 16, nbytes)
        assert got == pytest.approx(min(ring, tree))


def test_steps_of_a_tree_hold_by_the_nodes_that_it_joins():
    """Steps of more than two nodes hold for four, with all their ranks or one of each."""
    held, other = machine_with(ring=(), tree=OVER_MORE), machine_with(ring=(), tree=TREE)
    for stride, size in ((1, 16), (4, 4)):
        args = ("all_reduce", stride, size, 2.0**20)
        assert seconds(held, *args) == seconds(other, *args) != seconds(PLAIN, *args)
    for stride, size in ((1, 8), (4, 2)):
        args = ("all_reduce", stride, size, 2.0**20)
        assert seconds(held, *args) == seconds(PLAIN, *args) != seconds(other, *args)


@pytest.mark.parametrize("n_nodes", [4, 8, 64])
@pytest.mark.parametrize("nbytes", [1e4, 2.0**20, 2.0**22])
def test_trees_over_more_nodes_than_two_take_longer_than_measured_by_what_the_law_says(
    n_nodes, nbytes
):
    """Further levels add their hops of 10 us, and a node sends the buffer twice, not once."""
    measured = seconds(machine_with(ring=(), tree=OVER_TWO), "all_reduce", 1, 8, nbytes)
    got = seconds(machine_with(ring=(), tree=OVER_TWO), "all_reduce", 1, 4 * n_nodes, nbytes)
    hops = 2 * (np.log2(n_nodes) - 1) * 1e-5
    assert got == pytest.approx(measured + hops + nbytes / (tree_share(nbytes) * 80e9))


@pytest.mark.parametrize("n_nodes", [4, 8])
def test_a_mebibyte_on_alps_takes_the_measured_time_of_two_nodes_and_the_hops_of_more(n_nodes):
    """It took 164.3 us over two nodes; steps as long on each level of the tree would be 493."""
    got = seconds(load_machine("alps"), "all_reduce", 1, 4 * n_nodes, 2.0**20)
    hops = 2 * (np.log2(n_nodes) - 1) * 14e-6
    assert got == pytest.approx(164.3e-6 + hops + 2.0**20 / (tree_share(2.0**20) * 90e9))


def test_measured_steps_between_two_nodes_take_no_less_than_the_whole_link_once():
    fast = [replace(point, seconds=1e-9) for point in OVER_TWO]
    got = seconds(machine_with(ring=(), tree=fast), "all_reduce", 1, 8, 2.0**26)
    assert got == pytest.approx(2.0**26 / 80e9)


def test_a_kind_with_points_of_its_own_takes_these():
    own = StepPoint("all_reduce", 0, 64 * KIB, 15e-6)
    slow_tree = (StepPoint("all_reduce", 0, 1.0, 1e-3),)
    machine = machine_with((*RING, own), slow_tree)
    assert seconds(machine, "all_reduce", 1, 8, 8 * 64 * KIB) == pytest.approx(2 * 7 * 15e-6)
    assert seconds(machine, "all_gather", 1, 8, 8 * 64 * KIB) == pytest.approx(7 * 10e-6)


@pytest.mark.parametrize(
    ("key", "small", "large"), [("bandwidth", 10e-6, 25e-6), ("latency", 5e-6, 35e-6)]
)
def test_better_links_shorten_their_part_of_a_step(key, small, large):
    """Twice the bandwidth halves what 1 MiB takes more than 64 KiB, half the latency the rest."""
    machine = machine_with(RING[:2])
    level = machine.links[1].name
    better = next(r for r in resources(machine) if r.key == f"{level}.{key}").improved(2.0)
    got = [seconds(better, "all_gather", 1, 8, 8 * chunk * KIB) for chunk in (64, 1024)]
    assert got == [pytest.approx(7 * small), pytest.approx(7 * large)]


def test_steps_of_several_rings_at_once_keep_their_own_latency():
    together = (StepPoint("", 0, 64 * KIB, 100e-6, n_rings=4),)
    machine = machine_with((*RING[:2], *together))
    level = machine.links[1].name
    wider = next(r for r in resources(machine) if r.key == f"{level}.bandwidth").improved(2.0)
    for each in (machine, wider):
        assert seconds(each, "all_gather", 4, 8, 8 * 64 * KIB) == pytest.approx(7 * 100e-6)


def test_many_calls_have_small_chunks():
    sizes = np.array([8 * 64 * KIB])
    one = group_seconds(machine_with(), "all_gather", 1, 8, sizes)
    assert one[0] < group_seconds(machine_with(), "all_gather", 1, 8, 2 * sizes)[0] < 2 * one[0]


@pytest.mark.parametrize(
    ("stride", "size", "nbytes", "bytes_per_s"),
    [
        (16, 32, 7168 * 28672 / 16 * 4, 0.92e9),  # a matrix of nanoGPT
        # The message with which AxoNN timed rings.
        (8, 64, 16 * 2048 * 4096 * 10 * 2, 5 * 2**30),
        (128, 20, 16 * 2048 * 4096 * 10 * 2, 5 * 2**30),
    ],
)
def test_eight_rings_of_frontier_share_a_node_as_was_seen(stride, size, nbytes, bytes_per_s):
    got = seconds(load_machine("frontier-2024"), "all_reduce", stride, size, nbytes)
    moved = 2 * (size - 1) / size * nbytes
    assert moved / got == pytest.approx(bytes_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("stride", "gib_per_s"), [(1, 34.031), (2, 20.62), (4, 10.18), (8, 10.18 / 2), (16, 10.18 / 2)]
)
@pytest.mark.parametrize(("kind", "size"), [("all_gather", 64), ("reduce_scatter", 256)])
def test_rings_of_frontier_that_share_a_node_get_what_the_authors_measured(
    kind, size, stride, gib_per_s
):
    """Megatron-AxoNN 885d2e7, comm_model.py: comments beside the bandwidths of strides 1, 2 and 4.

    More rings than four, of which the authors measured none, share what four got together.
    """
    nbytes = size * 16.0 * 2**20
    got = seconds(load_machine("frontier-2024"), kind, stride, size, nbytes)
    bytes_per_s = (size - 1) / size * nbytes / got
    assert bytes_per_s == pytest.approx(gib_per_s * 2**30, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "n_ranks", "mib", "milliseconds"),
    [
        *(("all_gather", 64, 1024, 14.86), ("all_gather", 128, 256, 4.94)),
        *(("all_gather", 256, 1024, 15.1), ("all_gather", 512, 128, 15.28)),
        *(("all_gather", 512, 1024, 22.28), ("reduce_scatter", 256, 1024, 14.507)),
        *(("reduce_scatter", 1024, 256, 27.507), ("reduce_scatter", 1024, 1024, 31.625)),
    ],
)
def test_rings_of_february_2025_keep_their_pace_over_many_dies_of_frontier(
    kind, n_ranks, mib, milliseconds
):
    """axonn-ai/sc2025-pccl-reproducer at 5a6353f, data/all_gather_3 and data/reduce_scatter_3."""
    got = seconds(load_machine("frontier-202502"), kind, 1, n_ranks, mib * 2.0**20)
    assert 1e3 * got == pytest.approx(milliseconds, rel=0.1)


@pytest.mark.parametrize("n_rings", [2, 4])
@pytest.mark.parametrize("chunk_kib", [32, 128, 256])
def test_small_steps_of_rings_that_share_a_node_of_frontier_are_those_of_one(n_rings, chunk_kib):
    """What was measured is a bandwidth: it says nothing of the steps of small chunks."""
    machine = load_machine("frontier-2024")
    nbytes = 256 * chunk_kib * 2.0**10
    several = seconds(machine, "all_gather", n_rings, 256, nbytes)
    alone = seconds(machine, "all_gather", 1, 256, n_rings * nbytes)
    assert several == pytest.approx(alone)


def machine_with_hops(points=RING[:2], outer=()):
    """A machine whose hops inside nodes of four were measured."""
    inner = replace(PLAIN.links[0], hop_steps=Steps("measured", "made up", points))
    return replace(PLAIN, links=(inner, machine_with(outer).links[1]))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(("chunk_kib", "step"), [(64, 10e-6), (1024, 40e-6)])
def test_hops_of_rings_that_leave_a_node_take_their_measured_steps(kind, chunk_kib, step):
    """Sixteen ranks on four nodes have twelve hops inside nodes."""
    chunk = chunk_kib * KIB
    got = seconds(machine_with_hops(), kind, 1, 16, 16 * chunk)
    plain = seconds(PLAIN, kind, 1, 16, 16 * chunk)
    assert got - plain == pytest.approx(12 * (step - 1e-6 - chunk / 300e9))


@pytest.mark.parametrize(
    ("kind", "stride", "size"),
    [("all_gather", 1, 4), ("all_gather", 4, 8), ("send_recv", 1, 16), ("all_to_all", 1, 16)],
)
def test_other_groups_have_no_such_hops(kind, stride, size):
    """A group inside a node, one without a hop inside nodes, a transfer and an all-to-all."""
    args = (kind, stride, size, size * 1024 * KIB)
    assert seconds(machine_with_hops(), *args) == seconds(PLAIN, *args)


def test_a_hop_is_not_faster_than_its_latency_and_its_bytes():
    quick = machine_with_hops((StepPoint("", 0, 64 * KIB, 0.1e-6),))
    args = ("all_gather", 1, 16, 16 * 64 * KIB)
    assert seconds(quick, *args) == seconds(PLAIN, *args)


def test_steps_of_the_outermost_level_stand_for_the_hops_inside():
    args = ("all_gather", 1, 16, 16 * 64 * KIB)
    assert seconds(machine_with_hops(outer=RING), *args) == seconds(machine_with(), *args)


@pytest.mark.parametrize(("key", "step"), [("bandwidth", 25e-6), ("latency", 35e-6)])
def test_better_links_inside_a_node_shorten_its_hops(key, step):
    """Half of what 1 MiB takes more than 64 KiB, or half of the 10 us of the latter, goes."""
    machine = machine_with_hops()
    level = machine.links[0].name
    better = next(r for r in resources(machine) if r.key == f"{level}.{key}").improved(2.0)
    args = ("all_gather", 1, 16, 16 * 1024 * KIB)
    without = replace(better.links[0], hop_steps=None)
    bare = replace(better, links=(without, PLAIN.links[1]))
    alpha, beta = (1e-6, 600e9) if key == "bandwidth" else (0.5e-6, 300e9)
    delay = step - alpha - 1024 * KIB / beta
    assert seconds(better, *args) - seconds(bare, *args) == pytest.approx(12 * delay)


def test_an_unknown_kind_of_a_step_is_refused():
    with pytest.raises(InputError, match="kind is 'gather'; allowed: nothing, all_gather, "):
        StepPoint("gather", 0, 1.0, 1e-6)
