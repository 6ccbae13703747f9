"""The schedule of a pipeline, against its formula, against plain simulation, and in steps."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import whole_seconds

from axonn_tune.simulate.durations import (
    ALONE,
    FILLING,
    FIRST,
    LAST,
    MIDDLE,
    N_KINDS,
    USUAL,
    PassSeconds,
    kind_of,
)
from axonn_tune.simulate.orders import BACKWARD, FORWARD, rank_order
from axonn_tune.simulate.pipeline import passes, pipeline_seconds
from axonn_tune.simulate.pipeline_bound import least_pipeline_seconds
from axonn_tune.simulate.pipeline_schedule import PipelineShape


def durations(forward, backward):
    """The same for all stages."""
    seconds = np.empty((N_KINDS, 1))
    for place in (FIRST, MIDDLE, LAST):
        seconds[kind_of(FORWARD, place)], seconds[kind_of(BACKWARD, place)] = forward, backward
    return seconds


def column_of(seconds):
    """The durations of the only candidate."""
    return PassSeconds(*(each[:, 0] for each in seconds))


@pytest.mark.parametrize("n_stages", [2, 4, 8])
@pytest.mark.parametrize("n_virtual", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 7, 40])
def test_the_bubble_is_that_of_the_paper(n_stages, n_virtual, rounds):
    """(p - 1) / v passes of a whole rank (Narayanan et al., SC21, section 2.2)."""
    n_micro = rounds * n_stages
    seconds = durations(1.0, 2.0)
    got = pipeline_seconds(
        PipelineShape(n_stages, n_virtual), n_micro, PassSeconds.equal(seconds), np.zeros(1)
    )[0]
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


def plainly(p, v, m, seconds, transfer, beside=0.0):
    """Pass by pass: each rank does the next of its list as soon as what it needs is there.

    With virtual stages, a rank need not wait for the further transfer of a pass, unless it is one
    of the forward passes of Megatron-LM's warm-up, or of as many passes at its end.
    """
    last, done, free = p * v - 1, {}, [0.0] * p
    queues = [rank_order(rank, p, v, m).tolist() for rank in range(p)]
    alone = [min(2 * (p - rank - 1) + (v - 1) * p, m * v) for rank in range(p)]
    if v == 1 or not beside:
        alone, beside = [m * v] * p, 0.0
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
                is_here = needed == (FORWARD, last, micro)
                start = max(free[rank], done.get(needed, 0.0) - is_here * beside)
                place = FIRST if stage == 0 else LAST if stage == last else MIDDLE
                free[rank] = start + seconds[kind_of(direction, place)] + transfer
                done[direction, stage, micro] = free[rank] + beside
                number = 2 * m * v - len(queue)
                if number < alone[rank] or len(queue) <= alone[rank]:
                    free[rank] = done[direction, stage, micro]
                queue.pop(0)
    return max(free)


@settings(max_examples=60, deadline=None)
@example(p=2, v=2, number=1, seconds=[1.0] * N_KINDS, transfer=0.0, beside=1.0)
# One round ends as the one before did, and the next one does not.
@example(p=2, v=2, number=21, seconds=[1.0] * N_KINDS, transfer=0.0, beside=2.0)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 42),
    st.lists(st.floats(0.1, 3.0), min_size=N_KINDS, max_size=N_KINDS),
    st.floats(0.0, 0.5),
    st.floats(0.0, 4.0),
)
def test_all_candidates_at_once_are_played_as_one_would_plainly(
    p, v, number, seconds, transfer, beside
):
    n_micro = number if v == 1 else p * (1 + number // 3)
    beside *= v > 1
    column = np.array(seconds)[:, None]
    transfers = np.array([transfer])
    shape, further = PipelineShape(p, v), np.array([beside])
    got = pipeline_seconds(
        shape, n_micro, PassSeconds.equal(column), transfers, beside_seconds=further
    )[0]
    assert got == pytest.approx(plainly(p, v, n_micro, seconds, transfer, beside), rel=1e-9)


@pytest.mark.parametrize(("p", "v", "rounds"), [(2, 2, 9), (4, 3, 8), (8, 2, 6)])
def test_transfers_beside_the_passes_cost_next_to_nothing(p, v, rounds):
    """What is sent beside the passes costs its time in the warm-up and the drain alone."""
    seconds, none, some = durations(1.0, 2.0), np.zeros(1), np.full(1, 0.2)
    shape = PipelineShape(p, v)
    free = pipeline_seconds(shape, rounds * p, PassSeconds.equal(seconds), none)[0]
    beside = pipeline_seconds(
        shape, rounds * p, PassSeconds.equal(seconds), none, beside_seconds=some
    )[0]
    held = pipeline_seconds(shape, rounds * p, PassSeconds.equal(seconds), some)[0]
    n_alone = 2 * (p - 1) + (v - 1) * p
    assert free < beside <= free + 2 * n_alone * 0.2 + 1e-9
    assert held == pytest.approx(free * (3.4 / 3.0))
    assert beside < held


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 30),
    st.lists(st.floats(0.01, 3.0), min_size=N_KINDS, max_size=N_KINDS),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
)
def test_no_pipeline_is_faster_than_its_bound(p, v, rounds, seconds, transfer, beside):
    column, transfers = np.array(seconds)[:, None], np.array([transfer])
    least = least_pipeline_seconds(p, v, rounds * p, PassSeconds.equal(column), transfers)[0]
    further = np.array([beside * (v > 1)])
    shape = PipelineShape(p, v)
    got = pipeline_seconds(
        shape, rounds * p, PassSeconds.equal(column), transfers, beside_seconds=further
    )[0]
    assert least <= got * (1 + 1e-12)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 3])
def test_the_bound_of_equal_stages_is_the_time_itself(p, v):
    seconds, none = durations(1.0, 2.0), np.zeros(1)
    least = least_pipeline_seconds(p, v, 8 * p, PassSeconds.equal(seconds), none)
    got = pipeline_seconds(PipelineShape(p, v), 8 * p, PassSeconds.equal(seconds), none)
    assert least == pytest.approx(got, rel=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 3, 12), (4, 2, 4), (8, 2, 48)])
def test_passes_beside_which_none_can_run_take_their_own_time(p, v, m):
    """Before its passes alternate, rank r runs 2 (p - r - 1) + (v - 1) p forward passes."""
    usual, alone = durations(1.0, 2.0), durations(1.5, 2.25)
    shape = PipelineShape(p, v)
    seconds = PassSeconds(usual, alone, alone)
    played = passes(shape, m, column_of(seconds), 0.0)
    for rank in range(p):
        of_rank = [each for each in played if each.rank == rank]
        n_warmup = min(2 * (p - rank - 1) + (v - 1) * p, m * v)
        are_alone = [each.setting != USUAL for each in of_rank]
        n_between = 2 * m * v - 2 * n_warmup
        assert are_alone == [True] * n_warmup + [False] * n_between + [True] * n_warmup
        for each in of_rank:
            of_kind = (usual if each.setting == USUAL else alone)[each.kind, 0]
            assert each.end_seconds - each.start_seconds == pytest.approx(of_kind, rel=1e-9)
    end = max(each.end_seconds for each in played)
    got = pipeline_seconds(shape, m, seconds, np.zeros(1))[0]
    assert got == pytest.approx(end, rel=1e-12)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 3), (4, 1, 1), (4, 1, 40), (8, 1, 300)])
def test_the_pipeline_fills_and_drains_at_the_own_pace_of_the_ranks_between(p, v, m):
    """The last rank waits for a forward pass of each of them, and the step for a backward pass."""
    usual, filling = durations(1.0, 2.0), durations(0.95, 1.9)
    seconds = PassSeconds(usual, usual, filling)
    shape, none = PipelineShape(p, v), np.zeros(1)
    whole = pipeline_seconds(shape, m, PassSeconds.equal(usual), none)[0]
    got = pipeline_seconds(shape, m, seconds, none)[0]
    assert whole - got == pytest.approx((p - 2) * 0.15, rel=1e-9, abs=1e-9)
    assert least_pipeline_seconds(p, v, m, seconds, none)[0] == pytest.approx(got, rel=1e-12)
    played = passes(shape, m, column_of(seconds), 0.0)
    assert max(each.end_seconds for each in played) == pytest.approx(got, rel=1e-12)
    assert {
        (each.rank, each.direction, each.micro_batch) for each in played if each.setting == FILLING
    } == {(rank, *each) for rank in range(1, p - 1) for each in ((FORWARD, 0), (BACKWARD, m - 1))}


@pytest.mark.parametrize("seed", range(20))
def test_no_pipeline_that_fills_faster_is_shorter_than_its_bound(seed):
    random = np.random.default_rng(seed)
    p, v = int(random.integers(2, 9)), int(random.integers(1, 4))
    m = p * int(random.integers(1, 5))
    usual = random.uniform(0.5, 2.0, (N_KINDS, 1))
    alone = usual * random.uniform(0.8, 1.2, usual.shape)
    filling = alone * random.uniform(0.8, 1.0, alone.shape)
    seconds, transfer = PassSeconds(usual, alone, filling), np.full(1, 0.05)
    got = pipeline_seconds(PipelineShape(p, v), m, seconds, transfer)[0]
    assert 0 < least_pipeline_seconds(p, v, m, seconds, transfer)[0] <= got * (1 + 1e-12)


@pytest.mark.parametrize("m", [3, 8])
def test_without_virtual_stages_no_pass_is_said_to_run_alone(m):
    usual, alone = durations(1.0, 2.0), durations(9.0, 9.0)
    shape = PipelineShape(4)
    seconds = PassSeconds(usual, alone, usual)
    played = passes(shape, m, column_of(seconds), 0.0)
    assert not any(each.setting == ALONE for each in played)
    none = np.zeros(1)
    assert pipeline_seconds(shape, m, seconds, none) == pipeline_seconds(
        shape, m, PassSeconds.equal(usual), none
    )


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 100), (4, 2, 100), (16, 1, 500), (8, 2, 304)])
@pytest.mark.parametrize("spread", [(0.8, 1.3), (0.2, 3.0)])
def test_long_schedules_are_extrapolated_exactly(p, v, m, spread):
    random = np.random.default_rng(0)
    seconds = random.uniform(*spread, (N_KINDS, 100))
    transfer = random.uniform(0.0, 0.3, 100)
    for beside in (np.zeros(100), (v > 1) * random.uniform(0.0, 2.0, 100)):
        shape = PipelineShape(p, v)
        whole = whole_seconds(shape, m, seconds, transfer, beside)
        got = pipeline_seconds(
            shape, m, PassSeconds.equal(seconds), transfer, beside_seconds=beside
        )
        np.testing.assert_allclose(got, whole, rtol=1e-12)
