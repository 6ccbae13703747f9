"""Laws of nature, over random models, machines and grids."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import machine_of, worlds

from axonn_tune.io.presets import load_machine
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, ORDERS, grid_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, Gemm, MemoryBound
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.memory import memory_bytes
from axonn_tune.strategies.axonn.axonn4d import AXONN

SLACK = 1 + 1e-9


def step_seconds(world, **job_changes):
    model, job, machine, recompute, table = world
    job = replace(job, **job_changes)
    scenario = Scenario(model, job, machine, AXONN)
    return Evaluator.of(scenario, table.executed(recompute, 1)).evaluate().step_seconds


@given(worlds())
def test_never_faster_than_the_flops_at_peak(world):
    """Products and the causal half of attention run at the advertised rate at most."""
    model, job, machine, recompute, table = world
    plan = AXONN.plan(model, job, table.executed(recompute, 1))
    flops = sum(
        phase.repeats * op.flops * (0.5 if isinstance(op, Attention) else 1.0)
        for phase in plan.microstep.phases
        for op in phase.operations
        if isinstance(op, Gemm | Attention)
    )
    bound = plan.n_microsteps * flops / machine.peak_flops_per_s(job.dtype)
    assert (step_seconds(world) * SLACK >= bound).all()


@given(worlds())
def test_never_faster_than_the_memory(world):
    """The bytes of the kernels that move bytes, at the advertised bandwidth."""
    model, job, machine, recompute, table = world
    plan = AXONN.plan(model, job, table.executed(recompute, 1))
    moved = np.zeros(len(table))
    for part, times in ((plan.microstep, plan.n_microsteps), (plan.step_end, 1.0)):
        for phase in part.phases:
            for op in phase.operations:
                if isinstance(op, MemoryBound):
                    moved = moved + times * phase.repeats * op.nbytes
    bound = moved / machine.gpu.memory_bandwidth_bytes_per_s.value
    assert (step_seconds(world) * SLACK >= bound).all()


def buffer_bytes(plan, table, row):
    """Bytes of the buffers of each axis in one step, of all-reduces and of other collectives."""
    summed, others = dict.fromkeys(AXES, 0.0), dict.fromkeys(AXES, 0.0)
    for part, times in ((plan.microstep, plan.n_microsteps[row]), (plan.step_end, 1.0)):
        for phase in part.phases:
            for op in phase.operations:
                if isinstance(op, Collective):
                    nbytes = np.broadcast_to(op.nbytes, len(table))[row]
                    kind = summed if op.kind == "all_reduce" else others
                    kind[op.axis] += times * phase.repeats * nbytes
    return summed, others


def least_units(stride, size, n_ranks, unit_ranks, larger):
    """The least number of units, but more than one, that a group has in one larger unit."""
    numbers = []
    for block in range(0, n_ranks, stride * size):
        for first in range(block, block + stride):
            units = {(first + i * stride) // unit_ranks * unit_ranks for i in range(size)}
            for larger_ranks in larger:
                numbers += Counter(unit // larger_ranks for unit in units).values()
    return min((number for number in numbers if number > 1), default=1)


def rings_by_unit(stride, size, n_ranks, unit_ranks):
    """Rings of an axis that leave each unit, by looking at every group of the machine."""
    leaving = np.zeros(-(-n_ranks // unit_ranks))
    for block in range(0, n_ranks, stride * size):
        for first in range(block, block + stride):
            units = {(first + i * stride) // unit_ranks for i in range(size)}
            if len(units) > 1:
                leaving[list(units)] += 1
    return leaving


def boundary_seconds(world):
    """The least time for which the busiest unit's boundary is at work, for each candidate."""
    model, job, machine, recompute, table = world
    plan = AXONN.plan(model, job, table.executed(recompute, 1))
    bounds = np.zeros(len(table))
    for row, placement in enumerate(table.placement):
        strides = table.placements.strides[:, placement]
        sizes = table.placements.sizes[:, placement]
        n_ranks = int(sizes.prod())
        summed, others = buffer_bytes(plan, table, row)
        unit_ranks = [*(level.unit_ranks for level in machine.links), n_ranks]
        for index, level in enumerate(machine.links):
            carried = 0.0
            for axis, stride, size in zip(AXES, strides, sizes, strict=True):
                group = stride, size, n_ranks, level.unit_ranks
                # Trees send less than a ring where they join few units.
                passes = 2 * (1 - 1 / least_units(*group, unit_ranks[index + 1 :]))
                sent = passes * summed[axis] + (1 - 1 / size) * others[axis]
                carried = carried + sent * rings_by_unit(*group)
            busiest = float(np.max(carried)) / level.bandwidth_bytes_per_s.value
            bounds[row] = max(bounds[row], busiest)
    return bounds


def without_listed_rings(world):
    """A listed ring bandwidth replaces the formula inside a node and may be above it."""
    model, job, machine, recompute, table = world
    return model, job, replace(machine, ring_bandwidths=()), recompute, table


@given(worlds())
def test_never_faster_than_the_busiest_boundary(world):
    """Bytes that the rings of all axes carry out of a unit, over its bandwidth."""
    world = without_listed_rings(world)
    assert (step_seconds(world) * SLACK >= boundary_seconds(world)).all()


@pytest.mark.parametrize(
    "grid", [grid_layout(2, 2, 2, 1), grid_layout(2, 2, 16, 1), grid_layout(4, 1, 16, 1)]
)
def test_never_faster_than_a_boundary_that_both_lanes_share(grid):
    """A node's links outside are as fast as those of its four GPUs together."""
    machine = machine_of(units=(1, 4), bandwidths=(1e9, 4e9), latencies=(0.0, 0.0))
    model = Model("toy", 8, 256, 4, 1024, 256)
    job = Job(grid.n_ranks, 4 * grid.size("z"), 256)
    world = (model, job, machine, "none", CandidateTable.single(Configuration(grid)))
    assert (step_seconds(world) * SLACK >= boundary_seconds(world)).all()


@pytest.mark.parametrize(
    "name",
    [
        *("perlmutter", "frontier", "alps", "dgx-a100", "dgx-h100"),
        *("dgx-b300", "gb200-nvl72", "gb300-nvl72-64", "h800", "mi300x", "mi355x"),
    ],
)
@pytest.mark.parametrize("order", ["xyzd", "zxyd"])
def test_shipped_machines_carry_no_more_than_their_links(name, order):
    """The law where the shipped numbers make both lanes meet."""
    model = Model("toy", 8, 4096, 32, 32000, 2048)
    grids = [
        grid_layout(2, 4, 8, 4),
        grid_layout(4, 4, 4, 4),
        grid_layout(1, 8, 32, 1),
        grid_layout(8, 1, 2, 16),
    ]
    placements = Placements.of(grids, (order,))
    rows = np.arange(len(placements))
    table = CandidateTable(placements, rows, np.ones(rows.shape, np.int64))
    world = (model, Job(256, 512, 2048), load_machine(name), "full", table)
    world = without_listed_rings(world)
    assert (step_seconds(world) * SLACK >= boundary_seconds(world)).all()


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


def faster_ring(machine, index, factor):
    rings = machine.ring_bandwidths
    better = replace(
        rings[index], bandwidth_bytes_per_s=rings[index].bandwidth_bytes_per_s.scaled(factor)
    )
    return replace(machine, ring_bandwidths=(*rings[:index], better, *rings[index + 1 :]))


def scaled_kernels(machine, factor):
    """Each kernel's own rate, the least gap between kernels, and interference, one by one."""
    kernels = machine.kernels
    for name, by in (
        ("flash_forward_fraction", factor),
        ("flash_backward_fraction", factor),
        ("memory_fraction", factor),
        ("launch_seconds", 1 / factor),
        ("slowdown_fraction", 1 / factor),
    ):
        better = replace(kernels, **{name: getattr(kernels, name).scaled(by)})
        yield replace(machine, kernels=better)


def equal_gpus(machine, factor):
    return replace(machine, jitter_fraction=machine.jitter_fraction.scaled(1 / factor))


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


@pytest.mark.slow
@given(worlds(), st.floats(1.01, 10.0))
def test_better_hardware_is_never_slower(world, factor):
    model, job, machine, recompute, table = world
    evaluator = Evaluator.of(Scenario(model, job, machine, AXONN), table.executed(recompute, 1))
    base = evaluator.evaluate().step_seconds
    better = [
        faster_links(machine, factor),
        *(faster_level(machine, i, factor) for i in range(len(machine.links))),
        *(faster_ring(machine, i, factor) for i in range(len(machine.ring_bandwidths))),
        *scaled_kernels(machine, factor),
        equal_gpus(machine, factor),
        shorter_latency(machine, factor),
        faster_gpu(machine, factor),
        faster_memory(machine, factor),
    ]
    for improved in better:
        assert (evaluator.on(improved).evaluate().step_seconds <= base * SLACK).all()


@given(worlds())
def test_overlap_is_never_slower_than_none(world):
    off = step_seconds(world, overlap=Overlap(False, False, False))
    on = step_seconds(world, overlap=Overlap(True, True, True))
    assert (on <= off * SLACK).all()


@pytest.mark.parametrize("switch", ["oar", "ors", "oag"])
@given(world=worlds())
def test_each_overlap_alone_is_never_slower(switch, world):
    with_it = replace(world[1].overlap, **{switch: True})
    without = replace(world[1].overlap, **{switch: False})
    on = step_seconds(world, overlap=with_it)
    assert (on <= step_seconds(world, overlap=without) * SLACK).all()


@given(worlds())
def test_one_rank_does_not_communicate(world):
    model, job, machine, recompute, _ = world
    alone = replace(job, n_gpus=1)
    table = CandidateTable.single(Configuration(grid_layout(1, 1, 1, 1)))
    times = Evaluator.of(
        Scenario(model, alone, machine, AXONN), table.executed(recompute, 1)
    ).evaluate()
    assert times.exposed_communication_seconds[0] == 0.0
    no_links = faster_links(shorter_latency(machine, 1e9), 1e-9)
    again = Evaluator.of(
        Scenario(model, alone, no_links, AXONN), table.executed(recompute, 1)
    ).evaluate()
    assert again.step_seconds[0] == times.step_seconds[0]


@given(worlds(), st.randoms(use_true_random=False))
def test_permuting_candidates_permutes_results(world, random):
    model, job, machine, recompute, table = world
    order = list(range(len(table)))
    random.shuffle(order)
    shuffled = (model, job, machine, recompute, table.take(np.array(order)))
    assert step_seconds(shuffled) == pytest.approx(step_seconds(world)[order], rel=1e-12)


@pytest.mark.slow
@given(worlds())
def test_one_at_a_time_equals_all_at_once(world):
    model, job, machine, recompute, table = world
    together = step_seconds(world)
    memory, _ = memory_bytes(Scenario(model, job, machine, AXONN), table.executed(recompute, 1))
    for row in range(len(table)):
        placement = table.placements.take(
            slice(int(table.placement[row]), int(table.placement[row]) + 1)
        )
        single = CandidateTable(placement, np.zeros(1, np.int64), table.micro_batch[row : row + 1])
        alone = (model, job, machine, recompute, single)
        assert step_seconds(alone) == pytest.approx(together[row : row + 1], rel=1e-12)
        assert (
            memory_bytes(Scenario(model, job, machine, AXONN), single.executed(recompute, 1))[0]
            == memory[row]
        )


@pytest.mark.sweep
@given(worlds())
def test_orders_that_move_only_axes_of_one_rank_agree(world):
    model, job, machine, recompute, table = world
    grid = table.placements.layout(0)
    present = [letter for letter, axis in zip("xyzd", AXES, strict=True) if grid.size(axis) > 1]
    by_kept = {}
    for order in ORDERS:
        single = CandidateTable.single(Configuration(grid, order=order))
        seconds = step_seconds((model, job, machine, recompute, single))[0]
        by_kept.setdefault("".join(c for c in order if c in present), []).append(seconds)
    for same in by_kept.values():
        assert same == pytest.approx([same[0]] * len(same), rel=1e-12)


@given(worlds())
def test_exposed_time_lies_within_the_step(world):
    model, job, machine, recompute, table = world
    times = Evaluator.of(
        Scenario(model, job, machine, AXONN), table.executed(recompute, 1)
    ).evaluate()
    assert (times.exposed_communication_seconds >= -1e-12 * times.step_seconds).all()
    assert (times.exposed_communication_seconds < times.step_seconds).all()


@given(worlds())
def test_memory_shrinks_with_recomputation_and_grows_with_the_micro_batch(world):
    model, job, machine, _, table = world
    held = [
        memory_bytes(Scenario(model, job, machine, AXONN), table.executed(r, 1))[0]
        for r in ("none", "selective", "full")
    ]
    assert (held[0] * SLACK >= held[1]).all()
    # Full recomputation forms the norms' outputs of one block, which selective does not keep, and
    # gathers another weight next to the head's.
    shapes = AXONN.shapes(model, job, table)
    of_one_block = shapes.norm_output_bytes + shapes.linears["qkv"].weight_bytes
    of_one_block *= 1.0 + machine.memory_reserve.fragmentation_fraction.value
    assert (held[1] * SLACK + of_one_block >= held[2]).all()
    # As many micro-steps as before: a single one needs no memory to add up its gradients.
    larger = CandidateTable(table.placements, table.placement, 2 * table.micro_batch)
    twice = Scenario(model, replace(job, global_batch=2 * job.global_batch), machine, AXONN)
    assert (memory_bytes(twice, larger.executed("none", 1))[0] > held[0]).all()
