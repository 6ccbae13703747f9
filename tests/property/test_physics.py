"""Laws of nature, over random models, machines and grids."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import worlds
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.cost.links import rings_through_boundary
from axonn_tune.search.evaluate import Evaluator, memory_bytes
from axonn_tune.search.problem import Search
from axonn_tune.spec.grid import AXES, ORDERS, CandidateTable, Grid, Placements
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.plan import Collective, Gemm
from axonn_tune.strategies import axonn4d

SLACK = 1 + 1e-9


def step_seconds(world, **changes):
    model, job, machine, recompute, table = world
    job = replace(job, **changes.pop("job", {}))
    machine = changes.pop("machine", machine)
    return Evaluator(Search(model, job, machine), recompute, table).evaluate().step_seconds


@given(worlds())
def test_never_faster_than_the_flops_at_peak(world):
    model, job, machine, recompute, table = world
    plan = axonn4d.plan(model, job, recompute, table)
    flops = sum(
        phase.repeats * op.flops
        for phase in plan.microstep
        for op in phase.operations
        if isinstance(op, Gemm)
    )
    bound = plan.n_microsteps * flops / machine.peak_flops_per_s(job.dtype)
    assert (step_seconds(world) * SLACK >= bound).all()


@given(worlds())
def test_never_faster_than_the_busiest_link(world):
    """Bytes that the rings of each axis must carry out of a unit, over its bandwidth.

    Where a listed ring bandwidth replaces the formula inside a node it may be faster.
    """
    model, job, machine, recompute, table = world
    machine = replace(machine, ring_bandwidths=())
    plan = axonn4d.plan(model, job, recompute, table)
    strides = table.placements.strides[:, table.placement]
    sizes = table.placements.sizes[:, table.placement]
    for level in machine.links:
        for axis in range(4):
            rings = rings_through_boundary(strides[axis], sizes[axis], level.unit_ranks)
            carried = np.zeros(len(table))
            for phases, times in ((plan.microstep, plan.n_microsteps), (plan.step_end, 1.0)):
                for phase in phases:
                    for op in phase.operations:
                        if isinstance(op, Collective) and op.axis == AXES[axis]:
                            share = (1 - 1 / sizes[axis]) * op.nbytes
                            twice = 2 if op.kind == "all_reduce" else 1
                            carried += times * phase.repeats * twice * share
            bound = carried * rings / level.bandwidth_bytes_per_s.value
            assert (step_seconds(world, machine=machine) * SLACK >= bound).all()


def faster_links(machine, factor):
    links = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s.scaled(factor))
        for link in machine.links
    )
    rings = tuple(
        replace(ring, bandwidth_bytes_per_s=ring.bandwidth_bytes_per_s.scaled(factor))
        for ring in machine.ring_bandwidths
    )
    return replace(machine, links=links, ring_bandwidths=rings)


def faster_level(machine, index, factor):
    link = machine.links[index]
    better = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s.scaled(factor))
    return replace(machine, links=(*machine.links[:index], better, *machine.links[index + 1 :]))


def shorter_latency(machine, factor):
    links = tuple(
        replace(link, latency_seconds=link.latency_seconds.scaled(1 / factor))
        for link in machine.links
    )
    return replace(machine, links=links)


def faster_gpu(machine, factor):
    peaks = {dtype: q.scaled(factor) for dtype, q in machine.gpu.peak_flops_per_s.items()}
    return replace(machine, gpu=replace(machine.gpu, peak_flops_per_s=peaks))


def faster_memory(machine, factor):
    bandwidth = machine.gpu.memory_bandwidth_bytes_per_s.scaled(factor)
    return replace(machine, gpu=replace(machine.gpu, memory_bandwidth_bytes_per_s=bandwidth))


@given(worlds(), st.floats(1.01, 10.0))
def test_better_hardware_is_never_slower(world, factor):
    machine, base = world[2], step_seconds(world)
    better = [
        faster_links(machine, factor),
        *(faster_level(machine, i, factor) for i in range(len(machine.links))),
        shorter_latency(machine, factor),
        faster_gpu(machine, factor),
        faster_memory(machine, factor),
    ]
    for improved in better:
        assert (step_seconds(world, machine=improved) <= base * SLACK).all()


@given(worlds())
def test_overlap_is_never_slower_than_none(world):
    off = step_seconds(world, job={"overlap": Overlap(False, False, False)})
    on = step_seconds(world, job={"overlap": Overlap(True, True, True)})
    assert (on <= off * SLACK).all()


@pytest.mark.parametrize("switch", ["oar", "ors", "oag"])
@given(world=worlds())
def test_each_overlap_alone_is_never_slower(switch, world):
    with_it = replace(world[1].overlap, **{switch: True})
    without = replace(world[1].overlap, **{switch: False})
    on = step_seconds(world, job={"overlap": with_it})
    assert (on <= step_seconds(world, job={"overlap": without}) * SLACK).all()


@given(worlds())
def test_one_rank_does_not_communicate(world):
    model, job, machine, recompute, _ = world
    alone = replace(job, n_gpus=1)
    table = CandidateTable.single(Grid(1, 1, 1, 1))
    times = Evaluator(Search(model, alone, machine), recompute, table).evaluate()
    assert times.exposed_communication_seconds[0] == 0.0
    no_links = faster_links(shorter_latency(machine, 1e9), 1e-9)
    again = Evaluator(Search(model, alone, no_links), recompute, table).evaluate()
    assert again.step_seconds[0] == times.step_seconds[0]


@given(worlds(), st.randoms(use_true_random=False))
def test_permuting_candidates_permutes_results(world, random):
    model, job, machine, recompute, table = world
    order = list(range(len(table)))
    random.shuffle(order)
    shuffled = (model, job, machine, recompute, table.take(np.array(order)))
    assert step_seconds(shuffled) == pytest.approx(step_seconds(world)[order], rel=1e-12)


@given(worlds())
def test_one_at_a_time_equals_all_at_once(world):
    model, job, machine, recompute, table = world
    together = step_seconds(world)
    memory, _ = memory_bytes(Search(model, job, machine), recompute, table)
    for row in range(len(table)):
        placement = table.placements.take(
            slice(int(table.placement[row]), int(table.placement[row]) + 1)
        )
        single = CandidateTable(placement, np.zeros(1, np.int64), table.micro_batch[row : row + 1])
        alone = (model, job, machine, recompute, single)
        assert step_seconds(alone) == pytest.approx(together[row : row + 1], rel=1e-12)
        assert memory_bytes(Search(model, job, machine), recompute, single)[0] == memory[row]


@given(worlds())
def test_orders_that_move_only_axes_of_one_rank_agree(world):
    model, job, machine, recompute, table = world
    grid = table.placements.grid(0)
    present = [letter for letter, axis in zip("xyzd", AXES, strict=True) if getattr(grid, axis) > 1]
    by_kept = {}
    for order in ORDERS:
        placements = Placements.of([grid], (order,))
        single = CandidateTable(placements, np.zeros(1, np.int64), np.ones(1, np.int64))
        seconds = step_seconds((model, job, machine, recompute, single))[0]
        by_kept.setdefault("".join(c for c in order if c in present), []).append(seconds)
    for same in by_kept.values():
        assert same == pytest.approx([same[0]] * len(same), rel=1e-12)


@given(worlds())
def test_exposed_time_lies_within_the_step(world):
    model, job, machine, recompute, table = world
    times = Evaluator(Search(model, job, machine), recompute, table).evaluate()
    assert (times.exposed_communication_seconds >= -1e-12 * times.step_seconds).all()
    assert (times.exposed_communication_seconds < times.step_seconds).all()


@given(worlds())
def test_memory_shrinks_with_recomputation_and_grows_with_the_micro_batch(world):
    model, job, machine, _, table = world
    held = [
        memory_bytes(Search(model, job, machine), r, table)[0]
        for r in ("none", "selective", "full")
    ]
    assert (held[0] >= held[1]).all()
    assert (held[1] * SLACK >= held[2]).all()
    larger = CandidateTable(table.placements, table.placement, 2 * table.micro_batch)
    assert (memory_bytes(Search(model, job, machine), "none", larger)[0] > held[0]).all()
