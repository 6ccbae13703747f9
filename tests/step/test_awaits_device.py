"""A host that waits for the device before each micro-step issues nothing of it ahead."""

import pytest
from worlds import llama, machine_of, quantity

from axonn_tune.cost.prices import host_seconds
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.player import Player
from axonn_tune.step.predict import predict
from axonn_tune.step.rank_graphs import StepGraphs
from axonn_tune.step.timeline import step_timeline
from axonn_tune.strategies.megatron.megatron3d import megatron_of
from axonn_tune.strategies.zero.zero import zero3

MODEL = llama(
    n_layers=6, hidden_size=2048, ffn_hidden_size=8192, n_heads=16, vocab_size=1024, seq_len=1024
)
N_MICRO = 4


def predicted(awaits_device, issue_seconds, strategy=megatron_of, **sizes):
    """A step of `N_MICRO` micro-batches for each replica; unnamed axes have one rank."""
    engine = Engine(issue_seconds=quantity(issue_seconds), awaits_device=awaits_device)
    chosen = strategy(engine)
    layout = Layout({axis: sizes.get(axis, 1) for axis in chosen.axes.names})
    n_gpus = layout.n_ranks
    n_replicas = n_gpus // (sizes.get("tensor", 1) * sizes.get("pipeline", 1))
    job = Job(n_gpus, N_MICRO * n_replicas, MODEL.seq_len)
    scenario = Scenario(MODEL, job, machine_of(slowdown=0.2), chosen)
    return predict(scenario, Configuration(layout, micro_batch=1))


def forward_and_backward():
    """The operations and the device's seconds of both passes of a micro-step."""
    player = Player(predicted(False, 0.0))
    part = player.plan.microstep
    n_phases = [phase.name for phase in part.phases].index("backward")
    n_issued, n_more = (
        float(host_seconds(phases, player.table, 1.0)[0])
        for phases in (part.phases[:n_phases], part.phases[n_phases:])
    )
    events = player.play(part, 1).events
    start = next(event.start_seconds for event in events if event.phase == "backward")
    return (n_issued, start), (n_more, events[-1].end_seconds - start)


def test_passes_that_the_host_and_the_device_bound_add_up():
    (n_forward, forward), (n_backward, backward) = forward_and_backward()
    issue_seconds = 1.1 * forward / n_forward
    of_host = n_forward * issue_seconds - forward
    assert 0.0 < of_host < backward - n_backward * issue_seconds
    ahead, awaiting = (predicted(awaits, issue_seconds) for awaits in (False, True))
    assert ahead.step_seconds == pytest.approx(predicted(False, 0.0).step_seconds)
    expected = ahead.step_seconds + N_MICRO * of_host
    assert awaiting.step_seconds == pytest.approx(expected, rel=1e-9)
    assert explain(awaiting).host_seconds == pytest.approx(N_MICRO * of_host)


def test_a_host_that_is_never_behind_is_not_seen():
    """Only the first kernel of a micro-step waits until it has been issued."""
    (n_forward, forward), _ = forward_and_backward()
    issue_seconds = 0.3 * forward / n_forward
    ahead, awaiting = (predicted(awaits, issue_seconds) for awaits in (False, True))
    more = awaiting.step_seconds - ahead.step_seconds
    assert 0.0 <= more <= N_MICRO * issue_seconds


def test_a_host_that_bounds_both_passes_bounds_them_as_one_that_is_ahead():
    (n_forward, _), (n_backward, backward) = forward_and_backward()
    issue_seconds = 2.0 * backward / n_backward
    ahead, awaiting = (predicted(awaits, issue_seconds) for awaits in (False, True))
    assert ahead.step_seconds > N_MICRO * (n_forward + n_backward) * issue_seconds
    assert awaiting.step_seconds == pytest.approx(ahead.step_seconds, rel=1e-9)


@pytest.mark.parametrize("share", [1.1, 1.3, 5.0])
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (megatron_of, {"tensor": 2, "data": 4}),
        (megatron_of, {"tensor": 2, "data": 2, "pipeline": 2}),
        (zero3, {"shard": 8}),
    ],
)
def test_timeline_graph_and_explanation_agree_with_the_player(strategy, sizes, share):
    (n_forward, forward), _ = forward_and_backward()
    issue_seconds = share * forward / n_forward / sizes.get("tensor", 1)
    prediction = predicted(True, issue_seconds, strategy, **sizes)
    assert (
        prediction.step_seconds >= predicted(False, issue_seconds, strategy, **sizes).step_seconds
    )
    graphs = StepGraphs(prediction)
    ends = [max(node.end_seconds for node in graphs.of_stage(s)) for s in range(graphs.n_stages)]
    assert max(ends) == pytest.approx(prediction.step_seconds, rel=1e-9)
    explained = explain(prediction, with_sensitivities=False)
    assert "host" not in {op.name for op in explained.operations}
    if "pipeline" not in sizes:
        busy = sum(op.total_seconds for op in explained.operations if not op.axis)
        exposed = sum(op.exposed_seconds for op in explained.operations)
        whole = busy + exposed + explained.host_seconds
        assert whole == pytest.approx(prediction.step_seconds, rel=1e-9)
    drawn = step_timeline(prediction).operations
    waits = [op.end_seconds - op.start_seconds for op in drawn if op.kind == "host"]
    assert len(waits) >= N_MICRO and min(waits) > 0.0
