"""A step as a graph: it lasts as long as predicted, and has the operations of the plan."""

from collections import Counter

import pytest
from build import LAYOUTS_OF_64

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.plan import Collective
from axonn_tune.step.rank_graphs import StepGraphs
from axonn_tune.step.timeline import step_timeline


def predicted(strategy, **options):
    common = {"global_batch": 128, "strategy": strategy}
    return best_of_layout(build_search("5b", 64, **{**common, **options}), LAYOUTS_OF_64[strategy])


def ends(graph):
    return max(node.end_seconds for node in graph)


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("machine", ["perlmutter", "dgx2-1ib"])
@pytest.mark.parametrize("strategy", LAYOUTS_OF_64)
def test_the_longest_graph_lasts_as_long_as_the_predicted_step(strategy, machine, virtual_stages):
    """The end of a pipeline's first stage ends the step; collectives of others are hidden."""
    options = {"virtual_stages": virtual_stages} if strategy == "megatron" else {}
    prediction = predicted(strategy, machine=machine, dtype="fp16", **options)
    graphs = StepGraphs(prediction)
    seconds = [ends(graphs.of_stage(stage)) for stage in range(graphs.n_stages)]
    assert max(seconds) == seconds[0] == pytest.approx(prediction.step_seconds, rel=1e-9)
    assert min(seconds) > 0.8 * max(seconds)


@pytest.mark.parametrize("strategy", ["axonn", "zero3", "zeropp", "zero-topo"])
def test_a_graph_has_the_operations_of_the_timeline(strategy):
    prediction = predicted(strategy, micro_batch=1)
    assert prediction.n_microsteps > 1
    graph = StepGraphs(prediction).of_stage(0)
    drawn = step_timeline(prediction).operations
    assert [node.operation.name for node in graph] == [op.name for op in drawn]
    for node, op in zip(graph, drawn, strict=True):
        assert node.start_seconds == pytest.approx(op.start_seconds, rel=1e-9)


def test_kernels_run_one_after_another_and_so_do_the_collectives_of_a_group():
    prediction = predicted("megatron", virtual_stages=2)
    for stage in (0, 1, 3):
        graph = StepGraphs(prediction, most_microsteps=4).of_stage(stage)
        previous = {}
        followed = [set() for _ in graph]
        for place, node in enumerate(graph):
            assert all(needed < place for needed in node.follows)
            followed[place].update(node.follows, *(followed[needed] for needed in node.follows))
            stream = "compute"
            if isinstance(node.operation, Collective):
                stream = (node.operation.axis, node.message and node.message.is_sent)
            assert stream not in previous or previous[stream] in followed[place]
            previous[stream] = place


def test_messages_between_stages_meet():
    graphs = StepGraphs(predicted("megatron", virtual_stages=2), most_microsteps=8)
    sent, received = Counter(), Counter()
    for stage in range(graphs.n_stages):
        for node in graphs.of_stage(stage):
            message = node.message
            if message is not None and message.is_sent:
                sent[stage, message.stage, message.tag] += 1
            elif message is not None:
                received[message.stage, stage, message.tag] += 1
    assert sent == received and set(sent.values()) == {1}
    n_boundaries = 4 * 2 - 1
    assert len(sent) == 2 * 8 * n_boundaries + 2  # the tied embedding is exchanged once


@pytest.mark.parametrize("machine", ["dgx-b200", "perlmutter"])
def test_every_block_of_every_stage_is_gathered_and_reduced_once(machine):
    """It happens after the last pass where kernels wait in one queue, as on Perlmutter."""
    prediction = predicted("megatron", machine=machine, virtual_stages=2)
    graphs = StepGraphs(prediction)
    names = Counter(node.operation.name for stage in range(4) for node in graphs.of_stage(stage))
    n_beside = prediction.scenario.model.n_layers if machine == "dgx-b200" else 0
    assert names["gradient.block.reduce"] == n_beside
    assert names["weights.block.all_gather"] == n_beside
    for name in ("gradient.reduce", "weights.all_gather"):
        assert names[name] == 4


def test_a_smaller_graph_is_of_fewer_layers_and_micro_steps():
    prediction = predicted("axonn", micro_batch=1)
    whole = StepGraphs(prediction).of_stage(0)
    small = StepGraphs(prediction, most_layers=2, most_microsteps=1)
    assert small.n_microsteps == 1
    graph = small.of_stage(0)
    assert len(graph) < len(whole) / 10
    assert {node.operation.name for node in graph} == {node.operation.name for node in whole}


def test_graphs_of_stages_that_sleep_together_are_refused():
    """No operation of one rank stands for what holds up two; without stages nothing sleeps."""
    options = {"engine": "nanotron-2024-12", "machine": "aws-p5-2024"}
    with pytest.raises(InputError, match="'nanotron-2024-12', whose stages sleep over their"):
        StepGraphs(predicted("megatron", **options)).of_stage(0)
    alone = best_of_layout(
        build_search("5b", 64, global_batch=128, strategy="megatron", **options), "tensor=8,data=8"
    )
    assert ends(StepGraphs(alone).of_stage(0)) == pytest.approx(alone.step_seconds, rel=1e-9)
