"""The schedule of a pipeline, against its formula, against plain simulation, and in steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_tune.simulate import pipeline
from axonn_tune.simulate.orders import BACKWARD, FORWARD, rank_order
from axonn_tune.simulate.pipeline import (
    FIRST,
    LAST,
    MIDDLE,
    N_KINDS,
    kind_of,
    least_pipeline_seconds,
    pipeline_seconds,
)


def durations(forward, backward):
    """The same for all stages."""
    seconds = np.empty((N_KINDS, 1))
    for place in (FIRST, MIDDLE, LAST):
        seconds[kind_of(FORWARD, place)], seconds[kind_of(BACKWARD, place)] = forward, backward
    return seconds


@pytest.mark.parametrize("n_stages", [2, 4, 8])
@pytest.mark.parametrize("n_virtual", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
def test_the_bubble_is_that_of_the_paper(n_stages, n_virtual, rounds):
    """(p - 1) / v passes of a whole rank (Narayanan et al., SC21, section 2.2)."""
    n_micro = rounds * n_stages
    seconds = durations(1.0, 2.0)
    got = pipeline_seconds(n_stages, n_virtual, n_micro, seconds, np.zeros(1))[0]
    assert got == pytest.approx(3.0 * (n_micro * n_virtual + n_stages - 1), rel=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 5), (4, 1, 3), (4, 2, 8), (3, 3, 9)])
def test_each_rank_does_every_pass_once_and_forward_first(p, v, m):
    for rank in range(p):
        order = list(map(tuple, rank_order(rank, p, v, m).tolist()))
        assert len(order) == len(set(order)) == 2 * m * v
        place = {each: i for i, each in enumerate(order)}
        for direction, chunk, micro in order:
            if direction == FORWARD:
                assert place[FORWARD, chunk, micro] < place[BACKWARD, chunk, micro]


def most_held(rank, p, v, m):
    """Most passes of a rank that have gone forward and not yet backward."""
    held = most = 0
    for direction, _, _ in rank_order(rank, p, v, m):
        held += 1 if direction == FORWARD else -1
        most = max(most, held)
    return most


@pytest.mark.parametrize(("p", "m"), [(2, 6), (4, 9), (8, 8), (4, 2)])
def test_no_rank_holds_more_micro_batches_than_stages_behind_it(p, m):
    assert [most_held(rank, p, 1, m) for rank in range(p)] == [min(p - r, m) for r in range(p)]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 8), (4, 2, 8), (4, 3, 16), (3, 4, 6), (4, 2, 4)])
def test_virtual_stages_hold_one_round_for_each_but_the_last(p, v, m):
    """Megatron-LM's warm-up: two passes for each rank behind, p for each further virtual stage."""
    expected = [min(2 * (p - rank - 1) + (v - 1) * p + 1, m * v) for rank in range(p)]
    assert [most_held(rank, p, v, m) for rank in range(p)] == expected


def plainly(p, v, m, seconds, transfer):
    """Pass by pass: each rank does the next of its list as soon as what it needs is there."""
    last, done, free = p * v - 1, {}, [0.0] * p
    queues = [rank_order(rank, p, v, m).tolist() for rank in range(p)]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                direction, chunk, micro = queue[0]
                stage = chunk * p + rank
                if direction == FORWARD:
                    needed = (FORWARD, stage - 1, micro) if stage else None
                elif stage < last:
                    needed = (BACKWARD, stage + 1, micro)
                else:
                    needed = (FORWARD, last, micro)
                if needed is not None and needed not in done:
                    break
                start = max(free[rank], done.get(needed, 0.0))
                place = FIRST if stage == 0 else LAST if stage == last else MIDDLE
                free[rank] = start + seconds[kind_of(direction, place)] + transfer
                done[direction, stage, micro] = free[rank]
                queue.pop(0)
    return max(free)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 42),
    st.lists(st.floats(0.1, 3.0), min_size=N_KINDS, max_size=N_KINDS),
    st.floats(0.0, 0.5),
)
def test_all_candidates_at_once_are_played_as_one_would_plainly(p, v, number, seconds, transfer):
    n_micro = number if v == 1 else p * (1 + number // 3)
    column = np.array(seconds)[:, None]
    got = pipeline_seconds(p, v, n_micro, column, np.array([transfer]))[0]
    assert got == pytest.approx(plainly(p, v, n_micro, seconds, transfer), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 30),
    st.lists(st.floats(0.01, 3.0), min_size=N_KINDS, max_size=N_KINDS),
    st.floats(0.0, 0.5),
)
def test_no_pipeline_is_faster_than_its_bound(p, v, rounds, seconds, transfer):
    column, transfers = np.array(seconds)[:, None], np.array([transfer])
    least = least_pipeline_seconds(p, v, rounds * p, column, transfers)[0]
    assert least <= pipeline_seconds(p, v, rounds * p, column, transfers)[0] * (1 + 1e-12)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 3])
def test_the_bound_of_equal_stages_is_the_time_itself(p, v):
    seconds, none = durations(1.0, 2.0), np.zeros(1)
    least = least_pipeline_seconds(p, v, 8 * p, seconds, none)
    assert least == pytest.approx(pipeline_seconds(p, v, 8 * p, seconds, none), rel=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 100), (4, 2, 100), (16, 1, 500), (8, 2, 304)])
@pytest.mark.parametrize("spread", [(0.8, 1.3), (0.2, 3.0)])
def test_long_schedules_are_extrapolated_exactly(p, v, m, spread):
    random = np.random.default_rng(0)
    seconds = random.uniform(*spread, (N_KINDS, 100))
    transfer = random.uniform(0.0, 0.3, 100)
    order = pipeline._schedule(pipeline._Shape("1f1b", p, v, ()), m)
    whole, _, _ = pipeline._played(order, pipeline._durations(seconds, transfer))
    np.testing.assert_allclose(pipeline_seconds(p, v, m, seconds, transfer), whole, rtol=1e-12)
