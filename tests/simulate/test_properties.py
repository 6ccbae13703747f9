"""The vectorised player against its plain twin, on real plans and on random programs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import worlds

from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import CollectivePrices, KernelPrices, lanes
from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.lanes import shared_lanes
from axonn_tune.simulate.player import play
from axonn_tune.simulate.program import Kernels, compile_program
from axonn_tune.simulate.timeline import summed, timeline
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, grid_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import COMPUTE, Collective, MemoryBound, Phase
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator, interference
from axonn_tune.strategies.axonn.axonn4d import AXONN

NONE, SOME, MUCH = Interference(), Interference(0.2), Interference(1.0)
BACK, BOTH = Interference(0.0, 0.5), Interference(0.3, 0.5)


def plain_twin(model, job, machine, recompute, table, row):
    """Step and exposed seconds of one candidate, every repeat played."""
    single = table.take(slice(row, row + 1))
    plan = AXONN.plan(model, job, single.executed(recompute, 1))
    links = placement_links(machine, table.placements)
    collective = CollectivePrices(links, single)
    kernels = KernelPrices(machine, job)
    at = int(single.placement[0])
    axis_lanes = {axis: int(lanes(links)[i, at]) for i, axis in enumerate(AXES)}

    def seconds_of(op):
        prices = collective if isinstance(op, Collective) else kernels
        return float(np.ravel(prices.seconds(op))[0])

    step = exposed = 0.0
    for part, times in ((plan.microstep, plan.n_microsteps[0]), (plan.step_end, 1.0)):
        least = float(collective.least_seconds(part.phases)[0])
        events = timeline(part.phases, seconds_of, axis_lanes, interference(machine), least)
        step += times * max(event.end_seconds for event in events)
        exposed += times * sum(event.exposed_seconds for event in events)
    return step, exposed


@pytest.mark.slow
@given(worlds())
def test_whole_steps_equal_the_plain_twin(world):
    model, job, machine, recompute, table = world
    fast = Evaluator.of(
        Scenario(model, job, machine, AXONN), table.executed(recompute, 1)
    ).evaluate()
    for row in range(len(table)):
        step, exposed = plain_twin(*world, row)
        assert fast.step_seconds[row] == pytest.approx(step, rel=1e-12)
        assert fast.exposed_communication_seconds[row] == pytest.approx(
            exposed, rel=1e-9, abs=1e-11 * step
        )


# Random programs: any host program, not only AxoNN's ------------------------------------------

AXIS_LANES = {"x": 1, "y": 2, "z": 2, "data": 0}
# Round ones meet at the same instant; odd ones, and near ones, settle slowly or never.
DURATIONS = st.one_of(
    st.sampled_from([0.0, 0.25, 1.0, 1.0, 3.0, 7.0, 20.0]),
    st.sampled_from([0.25 + 1e-6, 1.0 - 1e-3, 3.0 + 1e-9, 7.1]),
    st.floats(0.001, 20.0),
)


@st.composite
def programs(draw):
    """One to three phases, each a few operations that repeat up to 100 times."""
    phases, names, messages = [], [], []
    for p in range(draw(st.integers(1, 3))):
        operations = []
        for i in range(draw(st.integers(1, 7))):
            is_message = draw(st.booleans())
            # Anything may be awaited: issued before, or by the repeat before, or never.
            candidates = [*names, *(f"{p}.{j}" for j in range(7))]
            waits = tuple(draw(st.lists(st.sampled_from(candidates), max_size=2, unique=True)))
            if is_message:
                # A new collective, or one that an earlier phase has issued too.
                kinds = ("all_gather", "send_recv")
                new = [(f"{p}.{i}", axis, kind) for axis in AXES for kind in kinds]
                name, axis, kind = draw(st.sampled_from([*new, *messages]))
                operations.append(Collective(name, kind, 0.0, axis, waits_for=(COMPUTE, *waits)))
            else:
                operations.append(MemoryBound(f"{p}.{i}", 0.0, waits_for=waits))
        names += [op.name for op in operations]
        messages += [(op.name, op.axis, op.kind) for op in operations if isinstance(op, Collective)]
        phases.append(Phase(str(p), tuple(operations), draw(st.sampled_from([1, 2, 5, 100]))))
    rows = draw(st.integers(1, 4))
    durations = {
        op.name: np.array([draw(DURATIONS) for _ in range(rows)])
        for phase in phases
        for op in phase.operations
    }
    return phases, durations, rows


def play_program(phases, durations, lanes_of_rows, interference):
    def of(index):
        return durations[phases[index[0]].operations[index[1]].name]

    operations = [op for phase in phases for op in phase.operations]
    axes = sorted({op.axis for op in operations if isinstance(op, Collective)})
    lanes_of_axes = np.array([[lanes[axis] for lanes in lanes_of_rows] for axis in axes])
    axis_lanes, sharing = shared_lanes(axes, lanes_of_axes)
    program = compile_program(phases, axis_lanes)
    shape = (len(lanes_of_rows),)
    return play(
        program, shape, lambda many: sum(of(i) for i in many), of, interference, sharing=sharing
    )


def slow_drift():
    """A lane that gains on computation so slowly that it blocks only after many blocks."""
    gather = Collective("0.0", "all_gather", 0.0, "y", waits_for=(COMPUTE,))
    kernel = MemoryBound("0.1", 0.0)
    reduce = Collective("0.2", "all_reduce", 0.0, "x", waits_for=(COMPUTE, "0.0"))
    last = MemoryBound("0.3", 0.0, waits_for=("0.2",))
    durations = {"0.0": [7.0], "0.1": [1.0], "0.2": [0.25], "0.3": [3.0]}
    phases = [Phase("0", (gather, kernel, reduce, last), 100)]
    return phases, {name: np.array(value) for name, value in durations.items()}, 1


def slow_fill(gain):
    """A lane that falls behind by `gain` per repeat, awaited only once it is 10 s behind."""
    awaited = Collective("0.0", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    beside = Collective("0.1", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    kernels = MemoryBound("0.2", 0.0), MemoryBound("0.3", 0.0, waits_for=("0.0",))
    phase = Phase("0", (awaited, beside, *kernels), 100)
    after = Phase("1", (MemoryBound("1.0", 0.0),))  # longer than the lane is behind
    durations = {"0.0": [0.5], "0.1": [10.5 + gain], "0.2": [10.0], "0.3": [1.0], "1.0": [99.0]}
    return [phase, after], {name: np.array(value) for name, value in durations.items()}, 1


def slow_drain():
    """A lane with work left over that it catches up with by 0.0001 per repeat."""
    phases = [
        Phase(
            str(p),
            (
                MemoryBound(f"{p}.0", 0.0),
                Collective(f"{p}.1", "all_gather", 0.0, "x", waits_for=(COMPUTE,)),
            ),
            repeats,
        )
        for p, repeats in ((0, 1), (1, 100))
    ]
    durations = {"0.0": [1.0], "0.1": [1.005], "1.0": [1.0], "1.1": [0.9999]}
    return phases, {name: np.array(value) for name, value in durations.items()}, 1


def catching_up():
    """A lane that no kernel of the phase waits for, a collective of which a later phase awaits.

    In the first repeat collective 0.0 starts at once, from the second on it queues behind
    0.2 of the repeat before: its end moves by 0.5 once and by 0.25 ever after.
    """
    first = Collective("0.0", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    second = Collective("0.2", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    phases = [
        Phase("0", (first, MemoryBound("0.1", 0.0), second), 5),
        Phase("1", (MemoryBound("1.0", 0.0, waits_for=("0.0",)),)),
    ]
    durations = {"0.0": [0.0], "0.1": [0.25], "0.2": [0.25], "1.0": [0.0]}
    return phases, {name: np.array(value) for name, value in durations.items()}, 1


def test_a_lane_that_catches_up_equals_the_plain_twin():
    phases, durations, _ = catching_up()
    events = timeline(phases, lambda op: durations[op.name][0], AXIS_LANES, NONE)
    end = max(event.end_seconds for event in events)
    assert end == 1.5
    assert play_program(phases, durations, [AXIS_LANES], NONE).seconds[0] == pytest.approx(
        end, rel=1e-12
    )


def late_blocking():
    """A backlog grows by 0.1 s a block; after about 30 blocks it holds computation up."""
    operations = (
        Collective("0.0", "all_gather", 0.0, "y", waits_for=(COMPUTE,)),
        Collective("0.1", "reduce_scatter", 0.0, "z", waits_for=(COMPUTE,)),
        MemoryBound("0.2", 0.0),
        MemoryBound("0.3", 0.0, waits_for=("0.0",)),
    )
    durations = {"0.0": 0.5, "0.1": 3.0, "0.2": 3.4, "0.3": 0.0, "1.0": 20.0}
    phases = [Phase("0", operations, 100), Phase("1", (MemoryBound("1.0", 0.0),))]
    return phases, {name: np.array([value]) for name, value in durations.items()}, 1


def early_collective():
    """The only collective is issued before repeats of a kernel, and its links need longer."""
    gather = Phase("0", (Collective("0.0", "all_gather", 0.0, "x", waits_for=(COMPUTE,)),))
    phases = [gather, Phase("1", (MemoryBound("1.0", 0.0),), 5)]
    return phases, {"0.0": np.array([0.5]), "1.0": np.array([0.25])}, 1


def repeated_collective():
    """The last of five collectives, which take no time, is the one that a floor holds open."""
    gather = Collective("0.0", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    phases = [Phase("0", (gather, MemoryBound("0.1", 0.0)), 5)]
    return phases, {"0.0": np.array([0.0]), "0.1": np.array([0.25])}, 1


def late_settling():
    """A kernel waits for a collective whose ends grow evenly only after three repeats."""
    first, second = (
        Collective(name, "all_gather", 0.0, "x", waits_for=(COMPUTE,)) for name in ("0.0", "0.1")
    )
    phases = [
        Phase("0", (first, second, MemoryBound("0.2", 0.0)), 100),
        Phase("1", (MemoryBound("1.0", 0.0, waits_for=("0.0",)),)),
    ]
    seconds = {"0.0": 0.0, "0.1": 1.0, "0.2": 1.0, "1.0": 0.0}
    return phases, {name: np.array([each]) for name, each in seconds.items()}, 1


def compiled_waits(*phases):
    """What each instruction of the last phase waits for."""
    program = compile_program(phases, AXIS_LANES)
    return [set(i.waits_for) for i in program.phases[-1].instructions if isinstance(i, Kernels)]


def test_a_wait_for_what_a_later_collective_of_the_lane_has_shown_to_be_over_is_dropped():
    """Lanes are in order; in a phase that repeats it must be so in the first repeat too."""
    a, b = (Collective(n, "all_gather", 0.0, "z", waits_for=(COMPUTE,)) for n in "ab")
    for_a, for_b = (MemoryBound(f"for {n}", 0.0, waits_for=(n,)) for n in "ab")
    assert compiled_waits(Phase("0", (a, b, for_b, for_a))) == [{"b"}]
    assert compiled_waits(Phase("0", (a, b, for_a, for_b))) == [{"a"}, {"b"}]
    in_block = Phase("1", (for_b, for_a, a, b), 5)
    assert compiled_waits(Phase("0", (a, b)), in_block) == [{"b"}]
    assert compiled_waits(Phase("0", (b, a)), in_block) == [{"b"}, {"a"}]
    other_lane = Collective("a", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    assert compiled_waits(Phase("0", (other_lane, b, for_b, for_a))) == [{"b"}, {"a"}]


def test_a_wait_stays_where_some_candidates_have_not_issued_what_shows_that_it_is_over():
    a, b = (Collective(n, "all_gather", 0.0, "z", waits_for=(COMPUTE,)) for n in "ab")
    for_a, for_b = (MemoryBound(f"for {n}", 0.0, waits_for=(n,)) for n in "ab")
    before, after = Phase("0", (a, b)), Phase("2", (for_a, for_b))
    assert compiled_waits(before, Phase("1", (a,)), after) == [{"a"}]
    phases = before, Phase("1", (a,), np.array([1, 0])), after
    assert compiled_waits(*phases) == [{"a"}, {"b"}]
    durations = {"a": 1.0, "b": 5.0, "for a": 1.0, "for b": 1.0}
    durations = {name: np.full(2, seconds) for name, seconds in durations.items()}
    check_against_twin(phases, durations, [AXIS_LANES] * 2, NONE)


@given(programs(), st.sampled_from([NONE, SOME, MUCH, BACK, BOTH]))
@example(late_blocking(), NONE)
@example(late_blocking(), SOME)
@example(slow_drift(), NONE)
@example(slow_drift(), SOME)
@example(slow_fill(0.5), NONE)
@example(slow_fill(0.5), SOME)
@example(slow_fill(0.12), NONE)
@example(slow_drain(), NONE)
@example(slow_drain(), SOME)
@example(late_settling(), BACK)
def test_random_programs_equal_the_plain_twin(program, interference):
    phases, durations, rows = program
    check_against_twin(phases, durations, [AXIS_LANES] * rows, interference)


LANES = st.fixed_dictionaries({axis: st.integers(0, 3) for axis in AXES})


@given(
    programs(), st.lists(LANES, min_size=4, max_size=4), st.sampled_from([NONE, SOME, BACK, BOTH])
)
def test_candidates_on_different_lanes_are_played_together_as_each_alone(program, lanes, slowdowns):
    phases, durations, rows = program
    check_against_twin(phases, durations, lanes[:rows], slowdowns)


REPEATS = st.sampled_from([0, 0, 1, 2, 3, 5, 8, 100])


@settings(max_examples=100)
@given(programs(), st.data(), st.sampled_from([NONE, SOME, BACK, BOTH]))
def test_candidates_with_repeats_of_their_own_are_played_together(program, data, slowdowns):
    """A candidate whose phase has no repeat leaves it out."""
    phases, durations, rows = program
    lanes = data.draw(st.lists(LANES, min_size=rows, max_size=rows))
    of_phases = st.lists(REPEATS, min_size=rows, max_size=rows).map(np.array)
    phases = [replace(phase, repeats=data.draw(of_phases)) for phase in phases]
    phases = [phase for phase in phases if phase.repeats.any()]
    check_against_twin(phases, durations, lanes, slowdowns)


def test_a_message_on_a_lane_that_only_some_candidates_share_changes_no_period():
    """It follows a gather, which slows kernels, on its lane; another candidate has two lanes."""
    a, b = (
        Collective(*each, waits_for=(COMPUTE,))
        for each in (("a", "all_gather", 0.0, "z"), ("b", "send_recv", 0.0, "y"))
    )
    phases = [Phase("0", (MemoryBound("kernel", 0.0), a, b), 5)]
    seconds = {"kernel": 7.0, "a": 0.0, "b": 7.1}
    lanes = [{**AXIS_LANES, "y": 1, "z": 1}, {**AXIS_LANES, "y": 0, "z": 1}]
    durations = {name: np.full(2, each) for name, each in seconds.items()}
    check_against_twin(phases, durations, lanes, SOME)


def test_a_drifting_gather_that_slows_kernels_settles_only_once_it_ends_after_them():
    """A message follows it on its lane, and a later phase waits for it."""
    gather, message = (
        Collective(*each, waits_for=(COMPUTE,))
        for each in (("gather", "all_gather", 0.0, "x"), ("message", "send_recv", 0.0, "x"))
    )
    phases = [
        Phase("0", (gather, message, MemoryBound("kernel", 0.0)), 20),
        Phase("1", (MemoryBound("after", 0.0, waits_for=("gather",)),)),
    ]
    seconds = {"gather": 0.0, "message": 5.0, "kernel": 6.0, "after": 0.0}
    durations = {name: np.full(1, each) for name, each in seconds.items()}
    check_against_twin(phases, durations, [{**AXIS_LANES, "x": 1}], BACK)


def phases_of(phases, row):
    """The phases of one candidate."""
    repeats = [np.atleast_1d(phase.repeats) for phase in phases]
    own = [int(each[row % each.size]) for each in repeats]
    return [replace(phase, repeats=n) for phase, n in zip(phases, own, strict=True) if n]


def check_against_twin(phases, durations, lanes_of_rows, interference):
    fast = play_program(phases, durations, lanes_of_rows, interference)
    for row, axis_lanes in enumerate(lanes_of_rows):
        events = timeline(
            phases_of(phases, row),
            lambda op, row=row: durations[op.name][row],
            axis_lanes,
            interference,
        )
        end = max((event.end_seconds for event in events), default=0.0)
        exposed = sum(event.exposed_seconds for event in events)
        assert fast.seconds[row] == pytest.approx(end, rel=1e-12, abs=1e-12)
        assert fast.exposed_seconds[row] == pytest.approx(
            exposed, rel=1e-9, abs=1e-9 * max(end, 1.0)
        )


@settings(max_examples=25)
@given(programs(), st.sampled_from([NONE, SOME, BOTH]), st.floats(0.0, 500.0))
@example(late_blocking(), NONE, 0.0)
@example(slow_drift(), SOME, 0.0)
@example(slow_fill(0.5), SOME, 0.0)
@example(slow_drain(), NONE, 0.0)
@example(early_collective(), NONE, 2.0)
@example(repeated_collective(), NONE, 2.0)
def test_sums_are_those_of_all_events(program, interference, least):
    phases, durations, _ = program
    given = (lambda op: durations[op.name][0], AXIS_LANES, interference, least)
    events = timeline(phases, *given)
    sums, end = summed(phases, *given)
    assert end == pytest.approx(max((e.end_seconds for e in events), default=0.0), rel=1e-9)
    assert set(sums) == {event.operation.name for event in events}
    for name, total in sums.items():
        of_name = [event for event in events if event.operation.name == name]
        assert total.count == len(of_name)
        seconds = sum(event.seconds for event in of_name)
        assert total.seconds == pytest.approx(seconds, rel=1e-9, abs=1e-9)
    exposed = sum(event.exposed_seconds for event in events)
    assert sum(total.exposed_seconds for total in sums.values()) == pytest.approx(
        exposed, rel=1e-9, abs=1e-9 * max(end, 1.0)
    )


@given(programs(), st.sampled_from([0.0, 0.2]))
def test_the_timeline_keeps_its_own_rules(program, slowdown):
    phases, durations, _ = program
    events = timeline(
        phases, lambda op: durations[op.name][0], AXIS_LANES, Interference(slowdown, 0.0)
    )
    assert [event.operation.name for event in events] == [
        op.name
        for phase in phases
        for _ in range(phase.repeats)
        for op in phase.operations
        if not isinstance(op, Collective) or AXIS_LANES[op.axis]
    ]
    free, latest = {}, {}
    beside = 0.0
    for event in events:
        # As early as its stream, and what it awaits, allow; no sooner, no later. A collective
        # follows all computation issued before it.
        reasons = [free.get(event.lane, 0.0), free.get(0, 0.0)]
        reasons += [latest[name] for name in event.operation.waits_for if name in latest]
        assert event.start_seconds == max(reasons)
        free[event.lane] = event.end_seconds
        if event.lane:
            if event.operation.kind != "send_recv":
                beside = max(beside, event.end_seconds)
            latest[event.operation.name] = event.end_seconds
            assert event.seconds == pytest.approx(durations[event.operation.name][0])
            assert event.exposed_seconds >= -1e-9
        else:
            # Work done is what was to do: slower beside collectives of more than two ranks, at full
            # speed after.
            slow = min(max(beside - event.start_seconds, 0.0), event.seconds)
            done = slow / (1 + slowdown) + (event.seconds - slow)
            assert done == pytest.approx(durations[event.operation.name][0], rel=1e-9, abs=1e-9)
    busy = sum(event.seconds for event in events if event.lane == 0)
    end = max((event.end_seconds for event in events), default=0.0)
    exposed = sum(event.exposed_seconds for event in events)
    assert busy + exposed == pytest.approx(end, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [2, 7, 100])
@pytest.mark.parametrize("overlap", [Overlap(), Overlap(False, False, False)])
def test_a_deep_model_on_a_real_machine_equals_the_plain_twin(perlmutter, n_layers, overlap):
    """Many layers, grids inside and across nodes, one order in which the lanes change roles."""
    model = Model("deep", n_layers, 2048, 16, 32000, 1024)
    job = Job(64, 64, 1024, overlap=overlap)
    grids = [
        grid_layout(2, 2, 4, 4),
        grid_layout(4, 2, 8, 1),
        grid_layout(1, 4, 16, 1),
        grid_layout(1, 1, 8, 8),
    ]
    placements = Placements.of(grids, ("xyzd", "zxyd"))
    rows = np.arange(len(placements))
    table = CandidateTable(placements, rows, np.ones(rows.shape, np.int64))
    for recompute in ("none", "full"):
        fast = Evaluator.of(
            Scenario(model, job, perlmutter, AXONN), table.executed(recompute, 1)
        ).evaluate()
        for row in rows:
            step, exposed = plain_twin(model, job, perlmutter, recompute, table, int(row))
            assert fast.step_seconds[row] == pytest.approx(step, rel=1e-12)
            assert fast.exposed_communication_seconds[row] == pytest.approx(
                exposed, rel=1e-9, abs=1e-11 * step
            )


@pytest.mark.parametrize(
    ("work", "beside", "expected"),
    [
        (10.0, -5.0, 10.0),
        (10.0, 0.0, 10.0),
        (10.0, 6.0, 11.0),
        (10.0, 12.0, 12.0),
        (10.0, 99.0, 12.0),
    ],
)
def test_a_kernel_beside_a_collective(work, beside, expected):
    """At 20 % slowdown, 6 s beside a collective do 5 s of work."""
    got = SOME.kernel_seconds(np.array([work]), np.array([beside]))
    assert got == pytest.approx([expected])


def test_a_message_between_two_ranks_slows_no_kernel():
    """Behind a gather of 4 s on the same lane it runs on, while the kernel is as fast as alone."""
    gather = Collective("g", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    sent = Collective("s", "send_recv", 0.0, "x", waits_for=(COMPUTE,))
    phases = [Phase("0", (gather, sent, MemoryBound("k", 0.0)))]
    durations = {"g": 4.0, "s": 20.0, "k": 10.0}
    events = timeline(phases, lambda op: durations[op.name], AXIS_LANES, MUCH)
    assert [event.end_seconds for event in events] == pytest.approx([4.0, 24.0, 12.0])
    rows = {name: np.array([seconds]) for name, seconds in durations.items()}
    check_against_twin(phases, rows, [AXIS_LANES], MUCH)


@pytest.mark.parametrize(
    ("duration", "remaining", "expected"),
    [
        (10.0, -5.0, 0.0),  # over before
        (10.0, 4.0, 2.0),  # ends beside the kernel, after 6 s
        (9.0, 20.0, 3.0),  # does 6 s of work beside it, and the rest alone
    ],
)
def test_a_collective_beside_a_kernel(duration, remaining, expected):
    got = BACK.delay_seconds(np.array([duration]), np.array([remaining]))
    assert got == pytest.approx([expected])


def test_both_slow_each_other_until_one_ends():
    """A kernel of 10 s and a collective of 4 s: that ends at 6 s, with 5 s of the kernel done."""
    gather = Collective("g", "all_gather", 0.0, "x", waits_for=(COMPUTE,))
    phases = [Phase("0", (gather, MemoryBound("k", 0.0)))]
    both = Interference(0.2, 0.5)
    events = timeline(phases, lambda op: {"g": 4.0, "k": 10.0}[op.name], AXIS_LANES, both)
    assert [event.end_seconds for event in events] == pytest.approx([6.0, 11.0])
