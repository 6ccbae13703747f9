"""Laws of a search: what it ranks, what it leaves out, and how far it can be trusted."""

import math
import re
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from build import (
    every_configuration_of,
    layout_of,
    number,
    plan_of,
    prediction_of,
    ranking_of,
    search_of,
)
from prices import gemm_seconds
from worlds import machine_of, quantity

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.candidates import nearest_counts
from axonn_tune.search.one_layout import why_not
from axonn_tune.search.rank import best_of
from axonn_tune.search.uncertainty import tied
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Gemm
from axonn_tune.spec.resources import resources
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3, zeropp

MODEL = Model("m", 6, 256, 8, 1024, 128)
JOB = Job(8, 16, 128)
GIB = 2.0**30
STRATEGIES = [AXONN, Axonn4D(pipelined=True), Megatron3D(), zero3(), zeropp()]


def with_memory(machine, nbytes):
    return replace(machine, gpu=replace(machine.gpu, memory_bytes=quantity(nbytes)))


def split_memory(search):
    """A capacity that about half of the configurations exceed."""
    whole = every_configuration_of(search)
    return sorted(p.memory_bytes for p in whole)[len(whole) // 2]


# Order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_ranking_is_every_configuration_best_first(strategy):
    """Candidates that fit come by time, then the others by memory; a layout stands for its best."""
    machine = machine_of(jitter=0.02, slowdown=0.1)
    search = search_of(MODEL, Job(8, 8, 128), machine, strategy, recomputes=("none", "full"))
    search = search.on(with_memory(machine, split_memory(search)))
    capacity = search.scenario.machine.gpu.memory_bytes.value
    every = every_configuration_of(search)
    assert [p.place for p in every] == list(range(1, len(every) + 1))
    n_fit = sum(p.memory_bytes <= capacity for p in every)
    assert 0 < n_fit < len(every)
    assert [p.fits for p in every] == [True] * n_fit + [False] * (len(every) - n_fit)
    assert [p.fits for p in every] == [p.memory_bytes <= capacity for p in every]
    seconds = [p.step_seconds for p in every[:n_fit]]
    needed = [p.memory_bytes for p in every[n_fit:]]
    assert seconds == sorted(seconds) and needed == sorted(needed)
    assert all(p.memory_capacity_bytes == capacity for p in every)

    ranking = ranking_of(search)
    assert ranking.n_evaluated == n_fit
    assert ranking.rejected["out of memory"] == len(every) - n_fit
    best = {}
    for p in every[:n_fit]:
        best.setdefault(str(p.layout), p)
    shown = [ranking.prediction(row) for row in range(len(ranking))]
    assert [str(p.layout) for p in shown] == list(best)
    for p, expected in zip(shown, best.values(), strict=True):
        assert p.step_seconds == pytest.approx(expected.step_seconds, rel=1e-12)
        assert (p.configuration.micro_batch, p.configuration.recompute) == (
            expected.configuration.micro_batch,
            expected.configuration.recompute,
        )


def test_the_rates_of_a_prediction_are_those_of_its_step():
    """Six FLOPs for each parameter of a product and token, attention, and twice the forward pass
    again with full recomputation; the bubble and waits are no computation."""
    search = search_of(MODEL, JOB, machine_of(), Megatron3D(n_virtual=(1,)), micro_batch=1)
    tokens = 16 * 128
    forward = 6 * (2 * 12 * 256 * 256 + 4 * 128 * 256)
    flops = 3 * tokens * (forward + 2 * 256 * 1024)
    for recompute, again in (("none", 0.0), ("full", tokens * forward)):
        p = prediction_of(
            replace(search, recomputes=(recompute,)),
            layout_of(search.scenario.strategy, pipeline=2, data=4),
        )
        assert p.tflops_per_gpu == pytest.approx(flops / p.step_seconds / 8 / 1e12)
        assert p.hardware_tflops_per_gpu == pytest.approx((flops + again) / p.step_seconds / 8e12)
        assert p.mfu == pytest.approx(flops / p.step_seconds / 8 / 300e12)
        assert p.hfu == pytest.approx((flops + again) / p.step_seconds / 8 / 300e12)
        assert p.tokens_per_second_per_gpu == pytest.approx(tokens / p.step_seconds / 8)
        assert p.bubble_seconds > 0 and p.exposed_communication_seconds > 0
        parts = p.compute_seconds + p.exposed_communication_seconds + p.bubble_seconds
        assert parts == pytest.approx(p.step_seconds)
        share = p.exposed_communication_seconds / p.step_seconds
        assert p.exposed_communication_fraction == pytest.approx(share)


# What fits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_why_a_layout_does_not_fit_is_its_leanest_configuration(strategy):
    search = search_of(MODEL, JOB, machine_of(), strategy)
    every = every_configuration_of(search)
    by_layout = {}
    for p in every:
        by_layout.setdefault(str(p.layout), []).append(p)
    configurations = max(by_layout.values(), key=len)
    leanest = min(configurations, key=lambda p: p.memory_bytes)
    capacity = leanest.memory_bytes - 0.3 * GIB
    small = search.on(with_memory(machine_of(), capacity))
    text = why_not(small, leanest.layout)
    term = leanest.largest_memory_term
    assert f"needs {leanest.memory_bytes / GIB:.1f} GiB of {capacity / GIB:.1f} GiB" in text
    assert "0.3 GiB short" in text
    largest = leanest.memory_terms_bytes[term] / GIB
    assert text.endswith(f"largest term: {term}, {largest:.1f} GiB")
    micro_batch, recompute = re.search(r"micro-batch (\d+), recompute (\w+)\)", text).groups()
    named = [
        p
        for p in configurations
        if (p.configuration.micro_batch, p.configuration.recompute) == (int(micro_batch), recompute)
    ]
    assert min(p.memory_bytes for p in named) == pytest.approx(leanest.memory_bytes)
    # With room for exactly that one it fits.
    enough = search.on(with_memory(machine_of(), leanest.memory_bytes * (1 + 1e-9)))
    assert "allowed; with its best configuration" in why_not(enough, leanest.layout)


def test_why_a_layout_is_not_the_best_says_where_it_ranks():
    search = search_of(MODEL, JOB, machine_of(), AXONN)
    ranking = ranking_of(search)
    for row in (0, 1, len(ranking) - 1):
        p = ranking.prediction(row)
        slower = p.step_seconds / ranking.prediction(0).step_seconds
        text = why_not(search, p.layout)
        place = f"ranks {row + 1} of {len(ranking)}"
        assert f"{place} and takes {slower:.3f} times as long as the best" in text
        assert (
            f"(micro-batch {p.configuration.micro_batch}, recompute {p.configuration.recompute})"
            in text
        )


def test_nothing_fits_says_from_how_many_gpus_it_would():
    """The first doubling on which every rank has room, found by trying."""
    machine = machine_of()
    search = search_of(MODEL, Job(2, 64, 128), machine, AXONN)
    least = {}
    for n_gpus in (2, 4, 8, 16):
        wider = search.on_gpus(n_gpus)
        least[n_gpus] = min(p.memory_bytes for p in every_configuration_of(wider))
    assert least[16] < least[8] < least[4] < least[2]
    for enough, too_few in ((4, 2), (8, 4), (16, 8)):
        for capacity in (least[enough], (least[enough] + least[too_few]) / 2):
            small = search.on(with_memory(machine, capacity))
            with pytest.raises(NoCandidateError) as caught:
                ranking_of(small)
            text = str(caught.value)
            assert f"fits from {enough} GPUs" in text
            needed = f"needs {least[2] / GIB:.1f} GiB per GPU, which has {capacity / GIB:.1f} GiB"
            assert f"fits on no grid of 2 gpu: the smallest {needed}" in text
    hopeless = search.on(with_memory(machine, 1e8))  # less than what is reserved
    with pytest.raises(NoCandidateError, match="no larger number of GPUs that was tried is enough"):
        ranking_of(hopeless)


@pytest.mark.parametrize(
    ("wanted", "counts"),
    [
        ({9, 12}, [9, 12]),
        ({1}, [1]),
        ({10}, []),
        ({11, 8, 9, 30}, [9, 11]),
        ({8, 6}, [8]),
        ({13, 14}, [13]),
        ({74}, [74]),
        ({75, 76}, [76]),
        ({1024}, [1024]),
        ({1034}, []),
    ],
)
def test_the_nearest_counts_lie_on_both_sides(wanted, counts):
    """Counts within 1023 of ten are found."""
    assert list(nearest_counts(10, lambda n: n in wanted)) == counts


def test_the_nearest_smaller_count_is_at_most_1023_away():
    assert list(nearest_counts(3000, lambda n: n == 1984)) == [1984]
    assert list(nearest_counts(3000, lambda n: n == 3000 - 1024)) == []


def test_of_counts_far_away_only_multiples_of_powers_of_two_are_tried():
    """A prime million of GPUs has 100,000 numbers within a tenth of it on each side."""
    tried = []
    prime = 1_000_003
    assert not nearest_counts(prime, lambda n: tried.append(n) is not None, farthest=100_000)
    assert {prime + i for i in range(-64, 65) if i} <= set(tried) and len(tried) < 1000
    assert len(tried) == len(set(tried))
    for count in tried:
        assert count % 2 ** max(abs(count - prime).bit_length() - 7, 0) == 0


def test_only_multiples_of_a_step_are_tried():
    tried = []
    assert not nearest_counts(64, lambda n: tried.append(n) is not None, farthest=20, step=8)
    assert sorted(tried) == [48, 56, 72, 80]


@pytest.mark.parametrize("detail", ["time", "interval", "chance"])
def test_the_best_of_a_search_is_the_first_of_its_ranking(detail):
    search = search_of(MODEL, JOB, machine_of(), AXONN, micro_batch=1)
    found = best_of(search, detail)
    first = ranking_of(search).top(1)[0]
    assert found.prediction.step_seconds == first.step_seconds
    if detail == "time":
        assert found.prediction.step_seconds_interval is None
    else:
        ends = found.prediction.step_seconds_interval
        assert ends == pytest.approx(first.step_seconds_interval, rel=1e-12)
    assert found.prediction.p_best == (first.p_best if detail == "chance" else None)
    nothing = best_of(search.on(with_memory(machine_of(), 1e8)), detail)
    assert nothing.prediction is None and "fits on no grid" in nothing.reason


# How far it can be trusted -----------------------------------------------------------------------


def test_an_interval_holds_nine_tenths_of_the_normal_law():
    for p in ranking_of(search_of(MODEL, JOB, machine_of(), AXONN)).top(5):
        low, high = p.step_seconds_interval
        assert low < p.step_seconds < high
        ends = NormalDist().inv_cdf(0.95) * p.spread_fraction
        assert math.log(high / p.step_seconds) == pytest.approx(ends, rel=1e-3)
        assert math.log(p.step_seconds / low) == pytest.approx(ends, rel=1e-3)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        (AXONN, {"x": 2, "z": 2, "data": 2}),
        (Megatron3D(n_virtual=(2,)), {"data": 2, "tensor": 2, "pipeline": 2}),
        (zero3(), {"shard": 4, "replica": 2}),
    ],
)
def test_a_spread_is_what_each_number_moves_and_what_the_model_leaves_out(strategy, layout):
    """Each number one standard deviation worse, products that were not timed off by a tenth
    each alike, and a fiftieth for all the rest; independent ones add in squares."""
    machine = machine_of(slowdown=0.2, jitter=0.02)
    model = replace(MODEL, n_layers=8)
    search = search_of(model, JOB, machine, strategy, micro_batch=1, recomputes=("none",))
    sizes = layout_of(strategy, **layout)
    p = ranking_of(search.of_layout(sizes)).top(1)[0]
    squares = 0.02**2
    for resource in resources(machine):
        worse = prediction_of(search.on(resource.improved(math.exp(-0.3))), sizes)
        squares += math.log(worse.step_seconds / p.step_seconds) ** 2
    n_virtual = strategy.n_virtual[0]
    plan = plan_of(strategy, model, JOB, n_virtual=n_virtual, **layout)
    of_name = {}
    for phase in plan.microstep.phases:
        for i, op in enumerate(phase.operations):
            if isinstance(op, Gemm):
                seconds = gemm_seconds(op.m, op.n, op.k, op.mode, machine, "bf16", True)
                slowest = 1 + 0.02 * math.sqrt(2 * math.log(8))
                key = (phase.name, len(of_name), i)
                of_name[key] = p.n_microsteps * phase.repeats * slowest * number(seconds)
    squares += sum((0.1 * s / p.step_seconds) ** 2 for s in of_name.values())
    assert p.spread_fraction == pytest.approx(math.sqrt(squares), rel=1e-3)
    assert p.p_best == 1.0


def test_only_the_fastest_rows_that_fit_are_compared():
    """Thirty-two of them; each has a chance, together one, and the fastest a good one."""
    search = search_of(MODEL, Job(64, 64, 128), machine_of(), AXONN)
    ranking = ranking_of(search)
    assert len(ranking) > 40
    top = ranking.top()
    assert all(p.p_best is not None and p.spread_fraction > 0 for p in top[:32])
    assert all(p.p_best is None and p.spread_fraction is None for p in top[32:])
    assert sum(p.p_best for p in top[:32]) == pytest.approx(1.0)
    assert len(ranking.top(3)) == 3 and len(ranking.top(10**6)) == len(ranking)


def test_rows_that_differ_by_half_with_numbers_known_well_are_told_apart():
    """The numbers that all share move all alike; only what is left out draws them apart."""
    search = search_of(MODEL, JOB, machine_of(), AXONN, micro_batch=1, recomputes=("none",))
    top = ranking_of(search).top()
    fastest = top[0].step_seconds
    for p in top:
        if p.p_best is not None and p.step_seconds > 1.5 * fastest:
            assert p.p_best < 0.01
    # Two standard deviations of a difference of 2 % errors are 5.7 %.
    near = [p for p in top if p.step_seconds < 1.05 * fastest]
    assert sum(p.p_best for p in near) > 0.5


def test_how_many_rows_hold_a_share_of_the_probability():
    shares = np.array([0.1, 0.4, 0.3, 0.2])
    counts = {0.3: 1, 0.4: 1, 0.41: 2, 0.7: 2, 0.9: 3, 0.91: 4, 1.0: 4}
    for share, count in counts.items():
        assert tied(shares, share) == count
