"""The paper's model with every size and bandwidth different, and the host's part of a step."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from build import layout_of, number, operations, plan_of, prediction_of, search_of
from hypothesis import given
from hypothesis import strategies as st
from prices import attention_seconds, gemm_seconds
from worlds import machine_of, quantity

from axonn_tune.cost import paper
from axonn_tune.cost.memory_bound import memory_bound_seconds
from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import CollectivePrices, host_seconds
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, MemoryBound
from axonn_tune.spec.points import AttentionPoint
from axonn_tune.strategies.axonn.axonn4d import AXONN
from axonn_tune.strategies.zero.zero import zero3

approx = partial(pytest.approx, rel=1e-9)

MODEL = Model("toy", 3, 60, 6, 128, 16, n_kv_heads=3, ffn_hidden_size=210)


def paper_seconds(model, job, grid, beta):
    """Bandwidth terms of rings, layer by layer: what each rank sends over what its ring carries.

    A ring over G ranks passes (G - 1)/G of a buffer on, an all-reduce twice; 2 bytes for each
    element, 4 for the gradients of data parallelism.
    """
    size = grid.sizes

    def ring(axis, nbytes):
        return (size[axis] - 1) / size[axis] * nbytes / beta[axis]

    m = job.global_batch * job.seq_len / (size["z"] * size["data"])
    h, kv = model.hidden_size, model.n_kv_heads * model.head_dim
    total = 0.0
    for k, n, over_k, over_n in (
        (h, h + 2 * kv, "x", "y"),
        (h, h, "y", "x"),
        (h, model.ffn_hidden_size, "x", "y"),
        (model.ffn_hidden_size, h, "y", "x"),
    ):
        block = k * n / (size["x"] * size["y"])
        total += 3 * ring("z", 2 * block)  # gathered twice, scattered once
        total += 2 * ring("data", 4 * block / size["z"])
        total += 2 * ring(over_k, 2 * m * n / size[over_n])
        total += 2 * ring(over_n, 2 * m * k / size[over_k])
    return model.n_layers * total


SIDE = st.sampled_from([1, 2, 3, 5, 7])
BETA = st.floats(1e6, 1e12)


@given(
    st.lists(st.tuples(SIDE, SIDE, SIDE, SIDE), min_size=1, max_size=4),
    st.tuples(BETA, BETA, BETA, BETA),
)
def test_the_papers_model_is_its_rings_layer_by_layer(sizes, betas):
    grids = [grid_layout(*each) for each in sizes]
    placements = Placements.of(grids)
    job = Job(n_gpus=64, global_batch=4, seq_len=16)
    beta = dict(zip(("x", "y", "z", "data"), betas, strict=True))
    links = {
        axis: SimpleNamespace(
            kinds={
                "all_reduce": SimpleNamespace(bandwidth_bytes_per_s=np.full(len(placements), value))
            }
        )
        for axis, value in beta.items()
    }
    seconds = paper.communication_seconds(MODEL, job, placements, links)
    assert seconds == approx([paper_seconds(MODEL, job, g, beta) for g in grids])


# Launches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backward", "n_kernels"), [(False, 2 + 3), (True, 4 + 3)])
def test_unfused_attention_launches_its_products_and_three_kernels_for_the_softmax(
    backward, n_kernels
):
    """Products with keys and with values, twice as many backward; scale, mask and softmax."""
    operation = Attention("a", 2.0, 4.0, 256, 64, backward, fused=False)
    machine = machine_of()
    slower = replace(machine, kernels=replace(machine.kernels, launch_seconds=quantity(1.0)))
    launches = number(attention_seconds(operation, slower, "bf16"))
    launches -= number(attention_seconds(operation, machine, "bf16"))
    assert launches == approx(n_kernels * (1.0 - 5e-6))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("modes", [(0.3, 1.0, 0.5), (1.0, 0.3, 0.5), (0.5, 0.4, 1.0)])
def test_batched_products_of_attention_have_the_modes_that_they_have(backward, modes):
    """Q K^T is NT and P V is NN, whatever is fastest; no operand is copied."""
    machine = machine_of(modes=modes, memory_bandwidth=1e13)
    machine = replace(machine, kernels=replace(machine.kernels, launch_seconds=quantity(1e-15)))
    s, d, batch = 2048, 128, 8
    operation = Attention("a", 2.0, 4.0, s, d, backward, fused=False)
    products = sum(
        number(gemm_seconds(s * batch, n, k, mode, machine, "bf16", kernel_tuning=False))
        for n, k, mode in ((s, d, "NT"), (d, s, "NN"))
    )
    softmax = (3 if backward else 2) * 2.0 * batch * s * s / (0.8 * 1e13)
    expected = (2 if backward else 1) * products + softmax
    assert number(attention_seconds(operation, machine, "bf16")) == approx(expected)


def test_measured_attention_depends_on_sequences_times_heads():
    """Few heads of many sequences are as many rows as many heads of few."""
    plain, points = machine_of(), []
    for n, ratio in ((1, 1.0), (64, 3.0)):
        operation = Attention("a", float(n), 1.0, 256, 64, False, True)
        seconds = ratio * number(attention_seconds(operation, plain, "bf16"))
        points.append(AttentionPoint(n, 1, 256, 64, False, True, "bf16", seconds))
    machine = replace(plain, kernels=replace(plain.kernels, attention_points=tuple(points)))
    ratios = []
    for n, heads in ((8.0, 1.0), (2.0, 4.0), (1.0, 8.0)):
        operation = Attention("a", n, heads, 256, 64, False, True)
        seconds = (number(attention_seconds(operation, m, "bf16")) for m in (machine, plain))
        measured, formula = seconds
        ratios.append(measured / formula)
    # Eight lie halfway between one and 64 in doublings.
    assert ratios == approx([3.0**0.5] * 3)


@pytest.mark.parametrize("nbytes", [1e-3, 1.0, 2.0])
def test_the_smallest_kernel_is_launched(nbytes):
    assert number(memory_bound_seconds(nbytes, machine_of(), "copy", "bf16")) >= 5e-6


def issued(plan):
    """Operations that the host issues in a micro-step, those over nothing left out."""
    count = 0
    for op in operations(plan.microstep):
        if isinstance(op, Collective):
            count += number(plan.candidates.size(op.axis)) > 1
        elif isinstance(op, MemoryBound):
            count += number(op.nbytes) > 0
        else:
            count += 1
    return count


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (AXONN, {"x": 2, "z": 2}),
        (AXONN, {"x": 1, "y": 4}),
        (zero3(), {"shard": 2, "replica": 2}),
        (zero3(), {"shard": 4}),
    ],
)
def test_a_slow_host_needs_its_time_for_every_operation(strategy, sizes):
    job = Job(4, 8, 64)
    model = Model("m", 4, 128, 8, 512, 64)
    plan = plan_of(strategy, model, job, **sizes)
    machine = machine_of()
    slow = replace(machine, kernels=replace(machine.kernels, issue_seconds=quantity(2.0)))
    assert host_seconds(plan.microstep.phases, plan.candidates, 2.0) == [2.0 * issued(plan)]
    # So slow that nothing else matters: the step is what the host issues.
    fixed = {axis: sizes.get(axis, 1) for axis in strategy.axes.names}
    search = search_of(model, job, slow, strategy, fixed=fixed, micro_batch=1, recomputes=("none",))
    prediction = prediction_of(search, layout_of(strategy, **sizes))
    n_micro = prediction.n_microsteps
    end = host_seconds(plan.step_end.phases, plan.candidates, 2.0)[0]
    sync = end + n_micro * 2.0 * issued(plan)
    if plan.sync_microstep:
        sync += host_seconds(plan.sync_microstep.phases, plan.candidates, 2.0)[0] - 2.0 * issued(
            plan
        )
    assert prediction.step_seconds == approx(sync, rel=1e-6)
    assert n_micro > 1


# The busiest link --------------------------------------------------------------------------------


def test_links_carry_no_more_than_they_can_whatever_the_lanes():
    """Bytes of each axis through a boundary, all-reduces twice, over what it carries."""
    machine = machine_of(units=(1, 4), bandwidths=(1e9, 4e9), latencies=(0.0, 0.0))
    placements = Placements.of([grid_layout(2, 2, 4, 1)])
    table = CandidateTable(placements, np.zeros(1, np.int64), np.ones(1, np.int64))
    model, job = Model("m", 4, 128, 8, 512, 64), Job(16, 16, 64)
    plan = plan_of(AXONN, model, job, x=2, y=2, z=4)
    prices = CollectivePrices(placement_links(machine, placements), table)
    moved = {"x": 0.0, "y": 0.0, "z": 0.0, "data": 0.0}
    for op in operations(plan.microstep):
        if isinstance(op, Collective):
            twice = 2 if op.kind == "all_reduce" else 1
            n = number(table.size(op.axis))
            moved[op.axis] += twice * (n - 1) / n * number(op.nbytes)
    # X and Y stay inside the node of four. Each GPU has its own link of 1e9 bytes/s, through
    # which all three go; out of the node go four rings of Z, together 4e9 bytes/s.
    gpu = (moved["x"] + moved["y"] + moved["z"]) / 1e9
    node = 4 * moved["z"] / 4e9
    assert prices.least_seconds(plan.microstep.phases) == approx([max(gpu, node)])
