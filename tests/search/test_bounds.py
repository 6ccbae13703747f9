"""A search that bounds times finds what a search that plays every candidate finds."""

from dataclasses import replace

import numpy as np
import pytest
from build import ranking_of, search_of
from worlds import machine_of, quantity

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.bounds import contender_times, every_time
from axonn_tune.search.rank import _first_of_each
from axonn_tune.simulate.durations import N_KINDS, PassSeconds
from axonn_tune.simulate.passes import Passes
from axonn_tune.simulate.step import PlayedStep
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import ORDERS
from axonn_tune.spec.machine import MemoryReserve
from axonn_tune.spec.model import Model
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D


def random_search(random):
    """A search whose candidates do not all fit in memory, mostly through pipelines."""
    n_layers = int(random.choice([4, 8, 12]))
    model = Model("m", n_layers, int(random.choice([256, 1024])), 8, 2048, 256)
    n_gpus = int(random.choice([4, 8, 16]))
    job = Job(n_gpus, n_gpus * int(random.choice([2, 8, 24])), 256)
    machine = machine_of(
        bandwidths=tuple(10.0 ** random.uniform(9.0, 11.5, 2)),
        jitter=random.uniform(0.0, 0.1),
        slowdown=random.uniform(0.0, 0.3),
    )
    reserve = MemoryReserve(quantity(1.0), replace(quantity(0.3), spread_fraction=0.5))
    machine = replace(machine, memory_reserve=reserve)
    strategy = random.choice([Axonn4D(pipelined=True), Axonn4D(), Megatron3D(), Megatron3D()])
    recomputes = ("none", "selective", "full")
    is_partial = bool(random.random() < 0.5)
    search = search_of(
        model, job, machine, strategy, recomputes=recomputes, partial_recompute=is_partial
    )
    needed = ranking_of(replace(search, include_oom=True, every_configuration=True)).memory_bytes
    capacity = float(np.quantile(needed, random.uniform(0.1, 0.7)))
    gpu = replace(machine.gpu, memory_bytes=quantity(capacity))
    return search.on(replace(machine, gpu=gpu))


def assert_same(bounded, whole):
    """Assert that two rankings, and what nearly fits in both, have equal rows."""
    for row in range(len(whole)):
        assert bounded.table.configuration(row) == whole.table.configuration(row)
    for name in ("step_seconds", "exposed_seconds", "bubble_seconds", "memory_bytes", "fits"):
        np.testing.assert_allclose(getattr(bounded, name), getattr(whole, name), rtol=1e-12)
    assert bounded.n_evaluated == whole.n_evaluated
    assert bounded.rejected == whole.rejected
    assert (bounded.near is None) == (whole.near is None)
    if bounded.near is not None:
        assert_same(bounded.near, whole.near)


@pytest.mark.slow
def test_bounds_change_no_ranking():
    n_bounded = n_near = n_left_out = 0
    for seed in range(24):
        random = np.random.default_rng(seed)
        search = replace(random_search(random), n_best=random.choice([None, 1, 2, 5]))
        try:
            whole = ranking_of(replace(search, exhaustive=True))
        except NoCandidateError:
            with pytest.raises(NoCandidateError):
                ranking_of(search)
            continue
        bounded = ranking_of(search)
        assert_same(bounded, whole)
        assert whole.n_bounded == 0
        n_bounded += bounded.n_bounded
        n_near += bounded.near is not None
        n_left_out += bounded.n_left_out
        assert bounded.n_left_out == whole.n_left_out
    assert n_bounded > 100
    assert n_near > 1
    assert n_left_out > 100


@pytest.mark.slow
def test_bounds_in_all_orders_change_no_ranking():
    """What nearly fits, too, is the same as where every order of every layout is played."""
    n_bounded = n_near = 0
    for seed in range(24):
        random = np.random.default_rng(100 + seed)
        search = random_search(random)
        scenario = replace(search.scenario, strategy=Axonn4D())
        constraints = replace(search.constraints, orders=tuple(ORDERS))
        search = replace(search, scenario=scenario, constraints=constraints)
        search = replace(search, n_best=random.choice([1, 2, 5]))
        try:
            whole = ranking_of(replace(search, exhaustive=True))
        except NoCandidateError:
            continue
        bounded = ranking_of(search)
        assert_same(bounded, whole)
        assert bounded.n_left_out == whole.n_left_out
        n_bounded += bounded.n_bounded
        n_near += bounded.near is not None
    assert n_bounded > 1000
    assert n_near > 1


def random_steps(random, n_tables, n_candidates):
    """Steps of a few pipelines each, without a plan."""

    def some(low, high, *shape):
        return random.uniform(low, high, (*shape, n_candidates))

    sleeps = random.random() < 0.2
    for _ in range(n_tables):
        n_stages, n_virtual = (int(random.choice([2, 3, 4])), int(random.choice([1, 2, 3])))
        n_virtual = 1 if sleeps else n_virtual
        n_micro = n_stages * random.integers(1, 12, n_candidates)
        passes = Passes(
            np.full(n_candidates, n_stages),
            np.full(n_candidates, n_virtual),
            schedule=ONE_F_ONE_B,
            places=(),
            n_micro=n_micro,
            durations=PassSeconds(*(some(0.5, 1.5, N_KINDS) / n_micro for _ in range(3))),
            transfer_seconds=some(0.0, 0.1) / n_micro,
            beside_seconds=some(0.0, 0.1) / n_micro * (n_virtual > 1),
            handover_seconds=(0.02, 0.01) if sleeps else (0.0, 0.0),
            sync_seconds=some(0.0, 0.1),
            work_seconds=some(1.0, 2.0),
        )
        yield PlayedStep(some(0.0, 0.2), some(0.0, 1.0), passes)


@pytest.mark.slow
def test_the_best_of_each_placement_is_among_the_contenders():
    """What nearly fits and beats all that fits is there, too, in hundreds of random tables."""
    for seed in range(300):
        random = np.random.default_rng(seed)
        steps = list(random_steps(random, n_tables=3, n_candidates=8))
        placement = random.integers(0, 4, 24)
        fits = random.random(24) < 0.7
        rows, times = contender_times(steps, placement, fits)
        _, every = every_time(steps)
        np.testing.assert_array_equal(times, every[:, rows])
        seconds = every[0]
        for number in np.unique(placement):
            fitting = np.flatnonzero((placement == number) & fits)
            best = min(seconds[fitting], default=np.inf)
            near = np.flatnonzero((placement == number) & ~fits & (seconds < best))
            wanted = [each[seconds[each].argmin()] for each in (fitting, near) if each.size]
            assert set(wanted) <= set(rows)


def test_recomputing_is_timed_only_where_less_does_not_fit():
    n_slower = 0
    for seed in range(6):
        random = np.random.default_rng(seed)
        search = replace(random_search(random), exhaustive=True)
        search = replace(search, scenario=replace(search.scenario, strategy=Axonn4D()))
        try:
            whole = ranking_of(search)
        except NoCandidateError:
            continue
        bounded = ranking_of(replace(search, exhaustive=False))
        assert_same(bounded, whole)
        n_slower += bounded.n_bounded
    assert n_slower > 20


@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_each_placement_is_the_first_of_the_sorted_rows(seed):
    random = np.random.default_rng(seed)
    placement = random.integers(0, 40, 300)
    keys = [random.random(300), random.integers(0, 3, 300), random.random(300) < 0.3]
    keys[0][random.random(300) < 0.5] = np.inf
    by_keys = np.lexsort(keys)
    _, first = np.unique(placement[by_keys], return_index=True)
    np.testing.assert_array_equal(_first_of_each(placement, keys), np.sort(by_keys[first]))
