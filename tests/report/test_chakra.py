"""Execution traces: read back with protobuf, held against the plan, and played by all ranks."""

from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from execution_traces import play, read_trace

from axonn_tune.api.searching import build_search
from axonn_tune.io.presets import load_model
from axonn_tune.report.chakra import ExecutionTraces
from axonn_tune.report.wire import bytes_field, integer_field, integers_field, varint
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.plan import Attention, Collective, Gemm, HostWork, MemoryBound
from axonn_tune.step.rank_graphs import StepGraphs

# The sizes of the axes of each layout in rank order, the fastest varying first.
LAYOUTS = {
    "axonn": ("2x2x2x2", {"x": 2, "y": 2, "z": 2, "data": 2}),
    "axonn-pipeline": ("1x2x2x2x2", {"y": 2, "z": 2, "pipeline": 2, "data": 2}),
    "megatron": ("tensor=2,data=2,pipeline=4", {"tensor": 2, "data": 2, "pipeline": 4}),
    "zero3": ("shard=8,replica=2", {"shard": 8, "replica": 2}),
    "zero3 of DeepSpeed": ("shard=16", {"shard": 16, "replica": 1}),
    "zeropp": ("secondary=4,across=4", {"secondary": 4, "across": 4}),
}


@cache
def written_by(strategy):
    return Written(strategy)


class Written:
    """A prediction with its traces, read back."""

    def __init__(self, layout, **options):
        text, self.sizes = LAYOUTS[layout]
        strategy = layout.partition(" ")[0]
        common = {"global_batch": 32, "micro_batch": 1, "strategy": strategy}
        model = replace(load_model("5b"), n_layers=8)
        search = build_search(model, 16, **{**common, **options})
        self.prediction = best_of_layout(search, text)
        traces = ExecutionTraces(StepGraphs(self.prediction))
        self.groups = traces.group_document()
        read = {rank: read_trace(data) for rank, data in traces.files(range(16))}
        self.traces = {rank: nodes for rank, (_, nodes) in read.items()}
        assert {version for version, _ in read.values()} == {"1.0.0"}

    def plan(self):
        scenario = self.prediction.scenario
        axes = scenario.strategy.axes
        return scenario.plan(CandidateTable.single(self.prediction.configuration, axes))


@pytest.fixture(scope="module", params=LAYOUTS)
def written(request):
    return written_by(request.param)


def place(sizes, rank):
    """The place of a rank along each axis."""
    places = {}
    for axis, size in sizes.items():
        rank, places[axis] = divmod(rank, size)
    return places


def test_all_ranks_together_need_the_predicted_step(written):
    ends = play(written.traces, written.groups)
    last = max(end for of_rank in ends.values() for end in of_rank.values())
    assert last == pytest.approx(1e6 * written.prediction.step_seconds, abs=2)


def test_one_kernel_and_one_collective_of_a_group_run_at_a_time(written):
    ends = play(written.traces, written.groups)
    for rank, nodes in written.traces.items():
        streams = defaultdict(list)
        for node in nodes:
            if node.type == "COMP_NODE":
                streams["compute"].append(node)
            elif node.type == "COMM_COLL_NODE":
                streams[node.pg_name].append(node)
        for stream in streams.values():
            for before, after in pairwise(stream):
                assert ends[rank][after.id] - after.duration >= ends[rank][before.id]


def test_ranks_of_a_group_list_the_same_collectives_in_the_same_order(written):
    calls = defaultdict(lambda: defaultdict(list))
    for rank, nodes in written.traces.items():
        for node in nodes:
            if node.type == "COMM_COLL_NODE":
                call = (node.name, node.collective, node.comm_size)
                calls[node.pg_name][rank].append(call)
    assert calls
    for number, by_rank in calls.items():
        assert sorted(by_rank) == written.groups[number]
        assert len({tuple(made) for made in by_rank.values()}) == 1


def test_the_group_of_a_collective_differs_in_the_axis_of_the_plan(written):
    axis_of = defaultdict(set)
    for op in written.plan().operations:
        if isinstance(op, Collective):
            axis_of[op.name].add(op.axis)
    for rank, nodes in written.traces.items():
        own = place(written.sizes, rank)
        for node in nodes:
            if node.type != "COMM_COLL_NODE":
                continue
            places = [place(written.sizes, member) for member in written.groups[node.pg_name]]
            differing = {a for a in written.sizes if len({each[a] for each in places}) > 1}
            axes = [set(axis.split("*")) & set(written.sizes) for axis in axis_of[node.name]]
            assert differing in axes
            n_expected = 1
            for axis in differing:
                n_expected *= written.sizes[axis]
            assert len(places) == n_expected
            assert rank in written.groups[node.pg_name]
            assert all(each[a] == own[a] for each in places for a in set(own) - differing)


def number(size):
    """The only entry of a size of one candidate."""
    return float(np.ravel(size)[0])


def full_bytes(node, groups):
    """The bytes of a collective as the plan counts them."""
    parts = len(groups[node.pg_name]) if node.collective == "all_gather" else 1
    return node.comm_size * parts


@pytest.mark.parametrize("strategy", ["axonn", "zero3", "zeropp"])
def test_a_trace_holds_the_operations_of_the_plan_with_their_sizes(strategy):
    written = written_by(strategy)
    plan = written.plan()
    table = plan.candidates
    n_micro = written.prediction.n_microsteps
    n_sync = 0 if plan.sync_microstep is None else 1
    times = [(plan.microstep, n_micro - n_sync), (plan.step_end, 1)]
    if n_sync:
        times.append((plan.sync_microstep, 1))
    expected = Counter()
    sizes = {}
    for part, n_parts in times:
        for phase in part.phases:
            for op in phase.operations:
                if isinstance(op, Collective) and table.size(op.axis)[0] == 1:
                    continue
                if isinstance(op, MemoryBound) and not number(op.nbytes):
                    continue
                expected[op.name] += n_parts * phase.repeats
                n_members = table.size(op.axis)[0] if isinstance(op, Collective) else 0
                sizes[op.name, n_members] = op
    nodes = [node for node in written.traces[5] if node.name != "host"]
    assert Counter(node.name for node in nodes) == expected
    for node in nodes:
        is_collective = node.type == "COMM_COLL_NODE"
        op = sizes[node.name, len(written.groups[node.pg_name]) if is_collective else 0]
        if is_collective:
            assert node.collective == op.kind
            slack = len(written.groups[node.pg_name])
            assert full_bytes(node, written.groups) == pytest.approx(number(op.nbytes), abs=slack)
        else:
            assert node.type == "COMP_NODE"
            assert node.is_cpu_op == isinstance(op, HostWork)
        if isinstance(op, Gemm | Attention):
            assert node.num_ops == pytest.approx(number(op.flops), abs=1)
        if isinstance(op, Gemm):
            m, n, k = number(op.m), number(op.n), number(op.k)
            assert node.tensor_size == pytest.approx(2 * (m * k + k * n + m * n), abs=1)
        if isinstance(op, Attention):  # q, k, v and the output; backward also their gradients
            one = 2 * number(op.n_sequences) * number(op.n_heads) * op.seq_len * op.head_dim
            assert node.tensor_size == pytest.approx(one * (8 if op.backward else 4), abs=1)
        if isinstance(op, MemoryBound):
            assert (node.num_ops, node.tensor_size) == (1, round(number(op.nbytes)))


def test_a_kernel_follows_the_collective_whose_result_it_reads():
    nodes = written_by("axonn").traces[0]
    by_id = {node.id: node for node in nodes}
    products = [node for node in nodes if node.name == "forward.qkv.gemm"]
    assert products
    for node in products:
        assert "forward.qkv.all_gather" in {by_id[needed].name for needed in node.needs} or any(
            by_id[earlier].name == "forward.qkv.all_gather"
            for needed in node.needs
            for earlier in by_id[needed].needs
        )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("axonn-pipeline", {}), ("megatron", {}), ("megatron", {"virtual_stages": 2})],
)
def test_messages_go_to_the_same_place_of_the_neighbouring_stage(strategy, options):
    written = Written(strategy, **options)
    sent, received = {}, {}
    for rank, nodes in written.traces.items():
        for node in nodes:
            if node.type in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
                is_sent = node.type == "COMM_SEND_NODE"
                key = (node.comm_src, node.comm_dst, node.comm_tag)
                assert key[0 if is_sent else 1] == rank
                side = sent if is_sent else received
                assert key not in side
                side[key] = node.comm_size
    assert sent == received
    for source, target, _ in sent:
        here, there = place(written.sizes, source), place(written.sizes, target)
        n_stages = written.sizes["pipeline"]
        assert (here.pop("pipeline") - there.pop("pipeline")) % n_stages in (1, n_stages - 1)
        assert here == there


@pytest.mark.parametrize("machine", ["dgx2-1ib", "dgx-h100"])
@pytest.mark.parametrize("strategy", ["megatron", "zero3"])
def test_engines_and_machines_with_more_effects_replay_as_well(strategy, machine):
    """Slowdowns, the work of the host and the first stage's exposed collectives are in there."""
    engine, layout = {
        "megatron": ("nanotron", "megatron"),
        "zero3": ("deepspeed", "zero3 of DeepSpeed"),
    }[strategy]
    written = Written(layout, machine=machine, dtype="fp16", engine=engine)
    ends = play(written.traces, written.groups)
    last = max(end for of_rank in ends.values() for end in of_rank.values())
    assert last == pytest.approx(1e6 * written.prediction.step_seconds, abs=2)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_the_first_micro_batch_waits_for_new_weights_in_each_stage_that_it_reaches(virtual_stages):
    written = Written("megatron", machine="dgx-h100", virtual_stages=virtual_stages)
    ends = play(written.traces, written.groups)
    last = max(end for of_rank in ends.values() for end in of_rank.values())
    assert last == pytest.approx(1e6 * written.prediction.step_seconds, abs=2)


def test_some_ranks_have_the_same_files_as_among_all():
    prediction = best_of_layout(
        build_search("tiny", 8, strategy="megatron", global_batch=8), "tensor=2,data=2,pipeline=2"
    )
    traces = ExecutionTraces(StepGraphs(prediction))
    everything = dict(traces.files(range(8)))
    assert sorted(everything) == list(range(8))
    assert dict(traces.files([6, 1])) == {rank: everything[rank] for rank in (6, 1)}


@pytest.mark.parametrize(
    ("number", "encoded"), [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02")]
)
def test_integers_are_written_seven_bits_at_a_time(number, encoded):
    """150 and 300 are the examples of protobuf's documentation."""
    assert varint(number).hex() == encoded


def test_fields_are_those_of_the_documentation():
    assert integer_field(1, 150).hex() == "089601"
    assert bytes_field(2, b"testing").hex() == "120774657374696e67"
    assert integers_field(6, [3, 270, 86942]).hex() == "3206038e029ea705"
    assert integers_field(6, []) == b""
