"""Laws of a timeline: who is charged for a standstill, and links that need longer than lanes."""

import numpy as np
import pytest

from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.player import play
from axonn_tune.simulate.program import compile_program
from axonn_tune.simulate.timeline import timeline
from axonn_tune.spec.plan import Collective, MemoryBound, Phase

LANES = {"a": 1, "b": 2, "alone": 0}
NONE = Interference(0.0, 0.0)


def kernel(name, *waits_for):
    return MemoryBound(name, 1.0, "copy", waits_for)


def collective(name, axis, *waits_for):
    return Collective(name, "all_gather", 1.0, axis, 1.0, ("compute", *waits_for))


def played(operations, seconds, least=0.0):
    phases = [Phase("p", tuple(operations))]
    events = timeline(phases, lambda op: seconds[op.name], LANES, NONE, least)
    return {event.operation.name: event for event in events}


@pytest.mark.parametrize(("a", "b"), [(2.0, 5.0), (5.0, 2.0)])
@pytest.mark.parametrize("least", [0.0, 4.0, 5.9, 6.1, 10.0])
def test_links_that_need_longer_hold_up_the_collective_that_ends_last(a, b, least):
    """A kernel of one second, then both collectives; computation stands still to the end."""
    operations = [kernel("k"), collective("ca", "a"), collective("cb", "b")]
    events = played(operations, {"k": 1.0, "ca": a, "cb": b}, least)
    shorter, longer = sorted(("ca", "cb"), key=lambda name: events[name].end_seconds)
    assert events[shorter].end_seconds == 1.0 + min(a, b)
    assert events[longer].end_seconds == max(1.0 + max(a, b), least)
    exposed = sum(event.exposed_seconds for event in events.values())
    assert exposed == pytest.approx(events[longer].end_seconds - 1.0)
    assert events[shorter].exposed_seconds == min(a, b)


def test_a_group_of_one_rank_has_no_event():
    operations = [kernel("k"), collective("c", "alone"), kernel("l", "c")]
    events = played(operations, {"k": 1.0, "c": 9.0, "l": 2.0})
    assert list(events) == ["k", "l"] and events["l"].end_seconds == 3.0


def test_a_standstill_is_charged_to_what_held_up_and_to_what_that_had_followed():
    """Two collectives in a queue: the second waits for the first, the kernel for the second."""
    operations = [
        kernel("k"),
        collective("c1", "a"),
        collective("c2", "a"),
        kernel("beside"),
        kernel("after", "c2"),
    ]
    seconds = {"k": 1.0, "c1": 3.0, "c2": 2.0, "beside": 0.5, "after": 1.0}
    events = played(operations, seconds)
    spans = {name: (e.start_seconds, e.end_seconds) for name, e in events.items()}
    assert spans == {
        "k": (0.0, 1.0),
        "c1": (1.0, 4.0),
        "c2": (4.0, 6.0),
        "beside": (1.0, 1.5),
        "after": (6.0, 7.0),
    }
    # From 1.5 to 4 the first one was waited for, from 4 to 6 the second.
    assert (events["c1"].exposed_seconds, events["c2"].exposed_seconds) == (2.5, 2.0)


def test_what_was_waited_for_across_lanes_is_charged_for_its_own_part():
    """A collective starts when another group's has ended, which had run beside a kernel."""
    operations = [
        kernel("k"),
        collective("c1", "a"),
        collective("c2", "b", "c1"),
        kernel("beside"),
        kernel("after", "c2"),
    ]
    seconds = {"k": 1.0, "c1": 3.0, "c2": 2.0, "beside": 3.5, "after": 1.0}
    events = played(operations, seconds)
    assert events["c2"].start_seconds == 4.0 and events["after"].start_seconds == 6.0
    assert (events["c1"].exposed_seconds, events["c2"].exposed_seconds) == (0.0, 1.5)


@pytest.mark.parametrize(
    ("alone", "end"),
    [
        # Beside the kernel from 2 to 7 s a collective needs half as long again.
        (1.0, 3.5),
        (3.0, 6.5),
        # In 5 s beside the kernel it does 10/3 s of its work, and the rest alone.
        (4.0, 7.0 + 4.0 - 5.0 / 1.5),
        (3.4, 7.0 + 3.4 - 5.0 / 1.5),
    ],
)
def test_a_collective_does_less_beside_a_kernel_that_starts_late(alone, end):
    phases = [Phase("p", (kernel("k"), collective("c", "a"), kernel("beside")))]
    seconds = {"k": 2.0, "c": alone, "beside": 5.0}
    slower = Interference(0.0, 0.5)
    events = timeline(phases, lambda op: seconds[op.name], LANES, slower)
    ends = {event.operation.name: event.end_seconds for event in events}
    assert ends == pytest.approx({"k": 2.0, "c": end, "beside": 7.0})


@pytest.mark.parametrize("other_lane", [False, True])
@pytest.mark.parametrize(("alone", "end"), [(3.0, 7.0), (4.0, 7.0 + 4.0 - 5.0 / 1.5)])
def test_what_is_awaited_ends_as_late_as_it_was_delayed(alone, end, other_lane):
    """The kernel after it starts when the slowed collective has ended, in both players."""
    first = (collective("c0", "b"), kernel("wait", "c0")) if other_lane else (kernel("k"),)
    ops = (*first, collective("c", "a"), kernel("beside"), kernel("after", "c"))
    seconds = {"c0": 1.5, "wait": 0.5, "k": 2.0, "c": alone, "beside": 5.0, "after": 1.0}
    phases, slower = [Phase("p", ops)], Interference(0.0, 0.5)
    events = timeline(phases, lambda op: seconds[op.name], LANES, slower)
    assert events[-1].start_seconds == pytest.approx(end)

    def seconds_of(indices):
        return np.array([sum(seconds[ops[op].name] for _, op in indices)])

    program = compile_program(phases, LANES)
    at_once = play(program, (1,), seconds_of, lambda index: seconds_of([index]), slower)
    assert at_once.seconds == pytest.approx([end + 1.0])
    assert at_once.exposed_seconds == pytest.approx([end - 7.0 + (1.5 if other_lane else 0.0)])


def test_a_phase_waits_for_the_host_and_hides_collectives_meanwhile():
    """The host issues the second phase at 6: a kernel of 1 second, and 4 of a collective beside."""
    phases = [
        Phase("p", (kernel("k"), collective("c", "a"))),
        Phase("q", (kernel("l", "c"),)),
    ]
    seconds = {"k": 1.0, "c": 4.0, "l": 2.0}

    def seconds_of(indices):
        operations = [phases[i].operations[j] for i, j in indices]
        return np.array([sum(seconds[op.name] for op in operations)])

    for issued, end, exposed in [(0.0, 7.0, 4.0), (3.0, 7.0, 2.0), (6.0, 8.0, 0.0)]:
        events = timeline(
            phases, lambda op: seconds[op.name], LANES, NONE, issued_seconds=[0.0, issued]
        )
        assert events[-1].end_seconds == end
        assert sum(event.exposed_seconds for event in events) == exposed
        waits = [event.seconds for event in events if event.operation.name == "host"]
        assert waits == ([issued - 1.0] if issued > 1.0 else [])
        together = play(
            compile_program(phases, LANES),
            (1,),
            seconds_of,
            lambda index: seconds_of([index]),
            NONE,
            issued_seconds=[np.zeros(1), np.array([issued])],
        )
        assert (together.seconds, together.exposed_seconds) == (end, exposed)
