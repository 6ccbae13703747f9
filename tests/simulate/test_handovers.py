"""Hand-overs over which two stages stand still together: by hand, and as hosts would run them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_tune.simulate.durations import FIRST, LAST, MIDDLE, N_KINDS, PassSeconds, kind_of
from axonn_tune.simulate.orders import BACKWARD, FORWARD
from axonn_tune.simulate.pipeline import passes, pipeline_seconds
from axonn_tune.simulate.pipeline_schedule import PipelineShape

SLEEP = 0.1
HANDOVER = (4 * SLEEP, 2 * SLEEP)


def durations(forward=1.0, backward=2.0):
    """The same for all stages."""
    seconds = np.zeros(N_KINDS)
    for place in (FIRST, MIDDLE, LAST):
        seconds[kind_of(FORWARD, place)], seconds[kind_of(BACKWARD, place)] = forward, backward
    return seconds


def total(n_stages, n_micro, seconds, handover=HANDOVER):
    arguments = PipelineShape(n_stages), n_micro, PassSeconds.equal(seconds[:, None]), np.zeros(1)
    return pipeline_seconds(*arguments, handover_seconds=handover)[0]


def test_two_micro_batches_in_two_stages_are_those_counted_by_hand():
    """Both stages sleep from 1 to 1.4 s, from 4.4 to 5 s, and from 8 to 8.2 s."""
    played = passes(
        PipelineShape(2), 2, PassSeconds.equal(durations()), 0.0, handover_seconds=HANDOVER
    )
    times = [
        (each.rank, each.direction, each.micro_batch, each.start_seconds, each.end_seconds)
        for each in played
    ]
    expected = [
        (0, FORWARD, 0, 0.0, 1.0),
        (0, FORWARD, 1, 1.4, 2.4),
        (0, BACKWARD, 0, 5.0, 7.0),
        (0, BACKWARD, 1, 8.2, 10.2),
        (1, FORWARD, 0, 1.4, 2.4),
        (1, BACKWARD, 0, 2.4, 4.4),
        (1, FORWARD, 1, 5.0, 6.0),
        (1, BACKWARD, 1, 6.0, 8.0),
    ]
    assert np.allclose(times, expected, rtol=1e-12)
    assert total(2, 2, durations()) == pytest.approx(10.2, rel=1e-12)


@pytest.mark.parametrize(("n_stages", "n_messages"), [(2, 6), (3, 12), (8, 12)])
def test_a_further_micro_batch_costs_six_sleeps_for_each_neighbour(n_stages, n_messages):
    more = total(n_stages, 101, durations()) - total(n_stages, 100, durations())
    assert more == pytest.approx(3.0 + n_messages * SLEEP, rel=1e-9)


def program(rank, n_stages, n_micro):
    """What a host does: passes, and the neighbour of each message of shapes, one by one."""
    warmup = min(n_stages - 1 - rank, n_micro)
    below, above = ([rank - 1] if rank else []), ([rank + 1] if rank < n_stages - 1 else [])
    steps, gradient = [], []
    for micro in range(n_micro):
        # The residual stream comes, then a gradient goes back, and then the mask comes.
        steps += [*2 * below, *2 * gradient, *2 * below, "F"]
        gradient = []
        if micro < warmup:
            steps += 4 * above
        else:
            steps += [*6 * above, "B"]
            gradient = below
    steps += 2 * gradient
    return steps + warmup * [*2 * above, "B", *2 * below]


def plainly(n_stages, n_micro, seconds, sleep):
    """Run the hosts' programs; a message passes when both have come to it and slept."""
    left = [program(rank, n_stages, n_micro) for rank in range(n_stages)]
    free = [0.0] * n_stages
    while any(left):
        for rank in range(n_stages):
            place = FIRST if rank == 0 else LAST if rank == n_stages - 1 else MIDDLE
            while left[rank] and left[rank][0] in ("F", "B"):
                direction = FORWARD if left[rank].pop(0) == "F" else BACKWARD
                free[rank] += seconds[kind_of(direction, place)]
            if left[rank]:
                other = left[rank][0]
                if left[other] and left[other][0] == rank:
                    free[rank] = free[other] = max(free[rank], free[other]) + sleep
                    left[rank].pop(0)
                    left[other].pop(0)
    return max(free)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 7),
    st.integers(1, 40),
    st.lists(st.floats(0.01, 3.0), min_size=N_KINDS, max_size=N_KINDS),
    st.floats(0.01, 0.5),
)
def test_hand_overs_are_those_of_hosts_that_pass_every_message_by_itself(p, m, seconds, sleep):
    got = total(p, m, np.array(seconds), (4 * sleep, 2 * sleep))
    assert got == pytest.approx(plainly(p, m, seconds, sleep), rel=1e-9)


@pytest.mark.parametrize("n_micro", [70, 300])
def test_long_schedules_with_hand_overs_are_extrapolated_exactly(n_micro):
    seconds = np.linspace(0.3, 1.1, N_KINDS)
    assert total(4, n_micro, seconds) == pytest.approx(
        plainly(4, n_micro, seconds, SLEEP), rel=1e-9
    )
