"""Schedules that split the backward pass or enter from both ends, against the papers' bubbles."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import whole_seconds

from axonn_tune.simulate.durations import (
    FILLING,
    FIRST,
    LAST,
    MIDDLE,
    N_KINDS,
    PassSeconds,
    kind_of,
)
from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT, ordered_passes, rank_order
from axonn_tune.simulate.pipeline import passes, pipeline_seconds
from axonn_tune.simulate.pipeline_bound import least_pipeline_seconds
from axonn_tune.simulate.pipeline_schedule import PipelineShape

NEW = ("zb-h1", "dualpipe")
EVERY = pytest.mark.parametrize("schedule", NEW)
SHAPES = pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 14), (6, 16), (8, 40)])


def durations(forward, inputs, weights):
    """The same for all stages."""
    seconds = np.empty((N_KINDS, 1))
    for place in (FIRST, MIDDLE, LAST):
        for direction, value in (
            (FORWARD, forward), (BACKWARD, inputs + weights), (INPUT, inputs), (WEIGHT, weights)
        ):  # fmt: skip
            seconds[kind_of(direction, place)] = value
    return seconds


def bubble(schedule, p, m, forward, inputs, weights):
    seconds = durations(forward, inputs, weights)
    whole = pipeline_seconds(
        PipelineShape(p, 1, schedule), m, PassSeconds.equal(seconds), np.zeros(1)
    )[0]
    return whole - m * (forward + inputs + weights)


@SHAPES
@pytest.mark.parametrize(
    ("forward", "inputs", "weights"), [(1, 1, 1), (1, 1.3, 1), (1.5, 1.2, 1), (2, 1, 0.5)]
)
def test_the_bubble_of_zb_h1_is_the_papers(p, m, forward, inputs, weights):
    """(p - 1)(T_F + T_B - T_W), T_B of inputs only (Qi et al., table 2); forward no shorter than W.

    The first rank waits at least for the gradients to come back through all other ranks.
    """
    expected = (p - 1) * (forward + inputs - weights)
    assert bubble("zb-h1", p, m, forward, inputs, weights) == pytest.approx(expected)


@SHAPES
@pytest.mark.parametrize(("one", "weights"), [(1.0, 1.0), (1.0, 0.5), (3.0, 2.0)])
def test_the_bubble_of_dualpipe_is_the_reports(p, m, one, weights):
    """(p / 2 - 1)(F&B + B - 3 W), B with W (arXiv 2412.19437, table 2).

    F is as long as B without W, and F&B takes as long as both.
    """
    backward = one + weights
    expected = (p / 2 - 1) * (one + backward + backward - 3 * weights)
    assert bubble("dualpipe", p, m, one, one, weights) == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 6]), st.integers(0, 4), *[st.floats(0.2, 3.0)] * 3)
def test_splitting_never_takes_longer_than_1f1b(p, more, forward, inputs, weights):
    m = 2 * p + 2 * more
    usual = bubble("1f1b", p, m, forward, inputs, weights)
    assert usual == pytest.approx((p - 1) * (forward + inputs + weights))
    for schedule in NEW:
        assert -1e-9 <= bubble(schedule, p, m, forward, inputs, weights) <= usual + 1e-9


@EVERY
@SHAPES
def test_each_stage_does_everything_once(schedule, p, m):
    played = passes(
        PipelineShape(p, 1, schedule), m, PassSeconds.equal(durations(1.0, 1.0, 1.0)[:, 0]), 0.0
    )
    done = Counter((each.direction, each.stage, each.micro_batch) for each in played)
    assert set(done.values()) == {1}
    for stage in range(p):
        for micro in range(m):
            assert done[FORWARD, stage, micro]
            is_split = done[INPUT, stage, micro]
            assert is_split == done[WEIGHT, stage, micro] != done[BACKWARD, stage, micro]


@EVERY
@SHAPES
def test_nothing_starts_before_what_it_needs(schedule, p, m):
    random = np.random.default_rng(p * m)
    seconds = random.uniform(0.2, 2.0, N_KINDS)
    played = passes(PipelineShape(p, 1, schedule), m, PassSeconds.equal(seconds), 0.1)
    ends = {}
    for each in played:
        direction = BACKWARD if each.direction == INPUT else each.direction
        ends[direction, each.stage, each.micro_batch] = each.end_seconds
    for each in played:
        stage, micro = each.stage, each.micro_batch
        if each.direction == FORWARD:
            needed = (FORWARD, stage - 1, micro) if stage else None
        elif each.direction == WEIGHT:
            needed = (BACKWARD, stage, micro)
        else:
            needed = (BACKWARD, stage + 1, micro) if stage < p - 1 else (FORWARD, stage, micro)
        assert needed is None or ends[needed] <= each.start_seconds + 1e-9
    for rank in range(p):
        mine = [each for each in played if each.rank == rank]
        assert all(a.end_seconds <= b.start_seconds + 1e-9 for a, b in pairwise(mine))


def slots(schedule, rank, p, m):
    """The passes of each slot of a rank."""
    found = {}
    for number, _, *each in ordered_passes(schedule, rank, p, 1, m).T.tolist():
        found.setdefault(number, []).append(tuple(each))
    return [tuple(slot) for slot in found.values()]


def most_held(order):
    """Most micro-batches that have gone forward and whose gradients are not all formed."""
    held = most = 0
    for slot in order:
        for direction, _, _ in slot:
            held += {FORWARD: 1, BACKWARD: -1, WEIGHT: -1, INPUT: 0}[direction]
        most = max(most, held)
    return most


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 40)])
def test_activations_are_those_of_the_papers(p, m):
    """p micro-batches on every rank (Qi et al., section 2.1); p + 1 with two directions."""
    assert [most_held(slots("zb-h1", rank, p, m)) for rank in range(p)] == [p] * p
    of_dual = [most_held(slots("dualpipe", rank, p, m // 2)) for rank in range(p)]
    assert max(of_dual) <= p + 1


@EVERY
@pytest.mark.parametrize(("p", "m"), [(4, 200), (8, 304)])
def test_long_schedules_are_extrapolated_exactly(schedule, p, m):
    random = np.random.default_rng(0)
    seconds = random.uniform(0.8, 1.3, (N_KINDS, 20))
    transfer = random.uniform(0.0, 0.3, 20)
    shape = PipelineShape(p, 1, schedule)
    whole = whole_seconds(shape, m, seconds, transfer)
    got = pipeline_seconds(shape, m, PassSeconds.equal(seconds), transfer)
    np.testing.assert_allclose(got, whole, rtol=1e-12)


@EVERY
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 6, 8]),
    st.integers(0, 60),
    st.lists(st.floats(0.01, 3.0), min_size=N_KINDS, max_size=N_KINDS),
    st.floats(0.0, 0.5),
)
def test_no_pipeline_is_faster_than_its_bound(schedule, p, more, seconds, transfer):
    of_passes = PassSeconds.equal(np.array(seconds)[:, None])
    arguments = 2 * p + 2 * more, of_passes, np.array([transfer])
    got = pipeline_seconds(PipelineShape(p, 1, schedule), *arguments)[0]
    assert 0 < least_pipeline_seconds(p, 1, *arguments, schedule)[0] <= got * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", *NEW])
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([2, 4, 6]),
    st.integers(0, 150),
    st.lists(st.sampled_from([1.0, 1.0001, 1.01, 1.1]), min_size=N_KINDS, max_size=N_KINDS),
    st.sampled_from([0.0, 0.01]),
)
def test_schedules_that_repeat_late_are_extrapolated_exactly(schedule, p, more, seconds, transfer):
    """The slower of two stages that take nearly as long sets the pace after many rounds."""
    m = 2 * p + 2 * more
    seconds, transfer = np.array(seconds)[:, None], np.array([transfer])
    shape = PipelineShape(p, 1, schedule)
    whole = whole_seconds(shape, m, seconds, transfer)
    got = pipeline_seconds(shape, m, PassSeconds.equal(seconds), transfer)
    np.testing.assert_allclose(got, whole, rtol=1e-11)


@SHAPES
def test_directions_of_dualpipe_mirror_each_other(p, m):
    for rank in range(p):
        order = slots("dualpipe", rank, p, m // 2)
        mirrored = slots("dualpipe", p - 1 - rank, p, m // 2)
        flipped = [tuple((d, 1 - flow, micro) for d, flow, micro in slot) for slot in mirrored]
        assert order == flipped


def plainly(p, v, m, seconds, transfer, places):
    """1F1B pass by pass, with the duration of each virtual stage's own kind."""
    done, free = {}, [0.0] * p
    queues = [rank_order(rank, p, v, m).tolist() for rank in range(p)]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                direction, chunk, micro = queue[0]
                stage = chunk * p + rank
                if direction == FORWARD:
                    needed = (FORWARD, stage - 1, micro) if stage else None
                elif stage < p * v - 1:
                    needed = (BACKWARD, stage + 1, micro)
                else:
                    needed = (FORWARD, stage, micro)
                if needed is not None and needed not in done:
                    break
                start = max(free[rank], done.get(needed, 0.0))
                free[rank] = start + seconds[kind_of(direction, places[stage])] + transfer
                done[direction, stage, micro] = free[rank]
                queue.pop(0)
    return max(free)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 5), (4, 1, 30), (4, 2, 24), (3, 3, 60)])
def test_every_stage_may_have_times_of_its_own(p, v, m):
    random = np.random.default_rng(p * v * m)
    places = (0, *random.integers(1, 6, p * v - 2), 2)
    places = tuple(int(place) for place in places)
    seconds = random.uniform(0.2, 2.0, kind_of(FORWARD, 6))
    arguments = m, PassSeconds.equal(seconds[:, None]), np.full(1, 0.1)
    got = pipeline_seconds(PipelineShape(p, v, "1f1b", places), *arguments)[0]
    assert got == pytest.approx(plainly(p, v, m, seconds, 0.1, places), rel=1e-9)
    # The bound is the time of the rank with most to do: all others wait in their start and drain.
    of_ranks = [
        sum(seconds[kind_of(d, place)] + 0.1 for place in places[rank::p] for d in (0, 1))
        for rank in range(p)
    ]
    least = least_pipeline_seconds(p, v, *arguments, "1f1b", places)[0]
    assert least == pytest.approx(m * max(of_ranks))
    assert least <= got


@pytest.mark.parametrize(
    ("schedule", "v", "backward"),
    [("1f1b", 1, BACKWARD), ("1f1b", 2, BACKWARD), ("zb-h1", 1, INPUT), ("dualpipe", 1, None)],
)
def test_a_pipeline_fills_and_drains_with_one_pass_of_each_rank_between(schedule, v, backward):
    """With several virtual stages it is that of the first one; with two flows there is none."""
    p, m = 4, 16
    seconds = PassSeconds.equal(durations(1.0, 1.0, 1.0)[:, 0])
    played = passes(PipelineShape(p, v, schedule), m, seconds, 0.0)
    filling = {
        (each.stage, each.direction, each.micro_batch) for each in played if each.setting == FILLING
    }
    ends = ((FORWARD, 0), (backward, m - 1))
    between = range(1, p - 1) if backward is not None else ()
    assert filling == {(stage, *each) for stage in between for each in ends}


def test_a_long_stage_between_bounds_a_pipeline_that_fills_faster():
    usual = np.tile([[1.0], [2.0], [1.0], [1.0]], (3, 1))
    usual[kind_of(FORWARD, MIDDLE)] = 10.0
    usual[kind_of(BACKWARD, MIDDLE)] = 20.0
    seconds, none = PassSeconds(usual, usual, 0.9 * usual), np.zeros(1)
    got = pipeline_seconds(PipelineShape(3), 12, seconds, none)[0]
    own = 12 * 30.0 - 3.0
    assert got == pytest.approx(1.0 + own + 2.0)
    assert least_pipeline_seconds(3, 1, 12, seconds, none)[0] == pytest.approx(got)
    assert least_pipeline_seconds(3, 1, 12, seconds, none, places=(0, 1, 2))[0] == pytest.approx(
        own
    )
