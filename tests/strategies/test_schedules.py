"""Schedules of a pipeline: what a stage computes, holds and refuses with each of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from build import collectives, memory_terms, number, operations, plan_of, table_of

import axonn_tune
from axonn_tune.api.answers import predict
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.simulate.orders import FORWARD, rank_order
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, Gemm, GroupedGemm, HostWork
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.quantity import Quantity
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.pipeline import memory_of_stages

DENSE = Model("dense", n_layers=8, hidden_size=256, n_heads=8, vocab_size=512, seq_len=128)
MIXTURE = replace(DENSE, experts=Experts(4, 2, 512))
JOB = Job(8, 32, 128)
KINDS = ("reduce_scatter", "all_gather")
MEGATRON = {"strategy": "megatron", "machine": "dgx-h100", "recompute": "none", "micro_batch": 1}


def plan(schedule, model=DENSE, **sizes):
    strategy = Megatron3D(has_experts=not model.is_dense, schedule=schedule)
    return plan_of(strategy, model, JOB, 1, **(sizes or {"data": 2, "pipeline": 4}))


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("sizes", [{"data": 2, "pipeline": 4}, {"tensor": 2, "pipeline": 4}])
def test_the_two_parts_of_the_backward_pass_are_the_whole(model, sizes):
    for stage in (plan("zb-h1", model, **sizes).pipeline.first, plan("zb-h1", model).pipeline.last):
        whole = sorted(op.name for op in operations(stage.backward))
        inputs, weights = map(operations, stage.split_backward)
        assert sorted(op.name for op in inputs + weights) == whole
        assert not any(isinstance(op, Collective) for op in weights)
        products = [op for op in weights if isinstance(op, Gemm | GroupedGemm)]
        assert products and all(op.mode == "TN" for op in products)
        assert not any(op.mode == "TN" for op in inputs if isinstance(op, Gemm | GroupedGemm))


@pytest.mark.parametrize(
    ("n_virtual", "aligns_gathers", "n_waits"),
    [(1, True, 4), (1, False, 4), (2, True, 1), (2, False, 8)],
)
def test_the_first_micro_batch_waits_for_weights_in_each_stage(n_virtual, aligns_gathers, n_waits):
    """Only ranks with several stages can start all gathers when the step begins."""
    strategy = Megatron3D(engine=Engine(megatron=MegatronProgram(aligns_gathers=aligns_gathers)))
    sizes = {"data": 2, "pipeline": 4}
    plan = plan_of(strategy, DENSE, JOB, n_virtual=n_virtual, **sizes)
    counts = plan.pipeline.n_synchronised(plan.candidates)
    assert tuple(map(number, counts)) == (n_waits, 1)


@pytest.mark.parametrize(
    ("n_virtual", "one_queue", "options", "sizes", "is_beside"),
    [
        pytest.param(2, False, {}, {"tensor": 2}, True, id="several queues"),
        pytest.param(2, True, {}, {"tensor": 2}, False, id="one queue"),
        pytest.param(2, True, {}, {"context": 2}, False, id="one queue, split sequences"),
        pytest.param(2, True, {}, {"data": 2}, True, id="nothing is split"),
        pytest.param(2, True, {"overlaps_experts": True}, {"tensor": 2}, True, id="experts"),
        pytest.param(1, False, {}, {"data": 2}, False, id="one stage"),
    ],
)
def test_results_travel_beside_the_passes(n_virtual, one_queue, options, sizes, is_beside):
    job = replace(JOB, one_queue=one_queue)
    for overlaps in (True, False):
        engine = Engine(megatron=MegatronProgram(overlaps_transfers=overlaps))
        strategy = Megatron3D(engine=engine, **options)
        plan = plan_of(strategy, DENSE, job, n_virtual=n_virtual, pipeline=4, **sizes)
        assert number(plan.pipeline.sends_beside) == (is_beside and overlaps)


def steps_of_70b(fact, layout):
    """Steps of Llama 3 70B on Hopper and Blackwell, with a fact of the program and without it."""
    steps = {}
    for machine in ("dgx-h100", "dgx-b200"):
        options = {**MEGATRON, "machine": machine, "global_batch": 64, "virtual_stages": 4}
        search = build_search("llama3-70b", 64, **options)
        for holds in (True, False):
            program = replace(search.scenario.strategy.engine.megatron, **{fact: holds})
            engine = replace(search.scenario.strategy.engine, megatron=program)
            strategy = replace(search.scenario.strategy, engine=engine)
            of_engine = replace(search, scenario=replace(search.scenario, strategy=strategy))
            steps[machine, holds] = best_of_layout(of_engine, layout).step_seconds
    return steps


def test_transfers_are_hidden_on_blackwell_and_not_on_hopper():
    """Megatron-LM demands one queue of Hopper where tensors are split."""
    steps = steps_of_70b("overlaps_transfers", "tensor=8,data=2,pipeline=4")
    assert steps["dgx-h100", True] == steps["dgx-h100", False]
    assert 0.9 < steps["dgx-b200", True] / steps["dgx-b200", False] < 0.999


@pytest.mark.parametrize(
    ("n_virtual", "one_queue", "sizes", "is_at_end"),
    [
        pytest.param(2, True, {"tensor": 2, "data": 2}, True, id="one queue"),
        pytest.param(2, False, {"tensor": 2, "data": 2}, False, id="several queues"),
        pytest.param(1, True, {"tensor": 2, "data": 2}, False, id="one stage on each rank"),
        pytest.param(2, True, {"data": 4}, False, id="nothing is split"),
    ],
)
def test_all_buckets_of_a_virtual_stage_hold_up_one_queue(n_virtual, one_queue, sizes, is_at_end):
    """The same bytes are then reduced and gathered after the last pass, in as many calls."""
    job = replace(JOB, one_queue=one_queue)
    program = MegatronProgram(bucket_elements=1000.0, bucket_elements_per_replica=0.0)
    strategy = Megatron3D(engine=Engine(megatron=program))
    plan = plan_of(strategy, DENSE, job, n_virtual=n_virtual, pipeline=2, **sizes)
    assert number(plan.pipeline.syncs_at_end) == is_at_end
    n_syncs = sum(map(number, plan.pipeline.n_synchronised(plan.candidates)))
    assert (n_syncs == 0) == is_at_end

    def at_end(name):
        (found,) = (op for op in operations(plan.step_end) if op.name == name)
        return found

    unsynchronised = plan_of(
        Megatron3D(overlap_grad_reduce=False), DENSE, job, n_virtual=n_virtual, pipeline=2, **sizes
    )
    ends = {op.name: op for op in operations(unsynchronised.step_end)}
    for name in ("gradient.reduce", "weights.all_gather"):
        assert (number(at_end(name).nbytes) == number(ends[name].nbytes)) == is_at_end


@pytest.mark.parametrize(("n_stages", "n_virtual"), [(2, 2), (2, 4), (4, 2)])
def test_one_launch_of_all_buckets_runs_beside_the_passes(n_stages, n_virtual):
    """What is exchanged at the end and beside the passes is what is exchanged without overlap."""
    program = MegatronProgram(coalesces_buckets=True, bucket_elements=1e9)
    strategy = Megatron3D(engine=Engine(megatron=program))
    job = Job(16, 32, 128, one_queue=True)
    sizes = {"n_virtual": n_virtual, "pipeline": n_stages, "tensor": 2, "data": 8 // n_stages}

    def exchanged(parts):
        nbytes, n_calls = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
        for op in operations(*parts):
            is_bucket = isinstance(op, Collective) and op.kind in KINDS
            if is_bucket and op.axis == strategy.replicas:
                nbytes[op.kind] += number(op.nbytes)
                n_calls[op.kind] += number(op.n_calls)
        return np.array([*nbytes.values(), *n_calls.values()])

    overlapping = plan_of(strategy, DENSE, job, **sizes)
    pipeline = overlapping.pipeline
    n_beside = number(pipeline.n_beside)
    assert n_beside == (n_virtual - 1) * n_stages
    at_end = exchanged([overlapping.step_end])
    beside = exchanged(pipeline.beside.passes)
    without = plan_of(replace(strategy, overlap_grad_reduce=False), DENSE, job, **sizes)
    nbytes, n_calls = np.split(at_end + n_beside * beside, 2)
    assert nbytes == pytest.approx(exchanged([without.step_end])[:2])
    assert n_calls == pytest.approx([n_virtual, n_virtual])


def test_coalesced_buckets_shorten_steps_only_in_one_queue():
    """An exchange beside the passes takes less of the step than one at its end, but something."""
    steps = steps_of_70b("coalesces_buckets", "tensor=4,data=4,pipeline=4")
    assert steps["dgx-b200", True] == steps["dgx-b200", False]
    assert 0.8 < steps["dgx-h100", True] / steps["dgx-h100", False] < 0.999


@pytest.mark.parametrize("n_virtual", [2, 4])
def test_each_virtual_stage_but_the_first_has_one_bucket(n_virtual):
    """A first stage has several of so few elements (Megatron-Core, disable_bucketing)."""
    per_bucket = 1000.0
    program = MegatronProgram(bucket_elements=per_bucket, bucket_elements_per_replica=0.0)
    strategy = Megatron3D(engine=Engine(megatron=program))
    job = replace(JOB, one_queue=True)
    plan = plan_of(strategy, DENSE, job, n_virtual=n_virtual, pipeline=2, tensor=2, data=2)
    ends = {op.name: op for op in operations(plan.step_end)}
    reduced = ends["gradient.reduce"]
    n_elements = number(reduced.nbytes) / strategy.gradient_bytes(job)
    of_first = math.ceil(n_elements / n_virtual / per_bucket)
    assert of_first > 1
    assert number(reduced.n_calls) == n_virtual - 1 + of_first


@pytest.mark.parametrize("precision", ["bf16", "fp8-current"])
@pytest.mark.parametrize(("n_elements", "is_at_end"), [(1e12, True), (1e3, False)])
def test_a_bucket_of_all_gradients_has_nothing_beside_it(n_elements, is_at_end, precision):
    """It is complete with the last gradient, and the first product waits for its weights."""
    program = MegatronProgram(bucket_elements=n_elements, bucket_elements_per_replica=0.0)
    engine = Engine(precisions=(precision,), megatron=program)
    job = replace(JOB, precision=precision)
    strategy = Megatron3D(engine=engine, low_weights=True)
    alone = replace(strategy, overlap_grad_reduce=False)
    beside, after = (plan_of(each, DENSE, job, data=4) for each in (strategy, alone))
    early = {op.name: op for op in operations(beside.sync_microstep)}
    ends, all_of = ({op.name: op for op in operations(p.step_end)} for p in (beside, after))
    for name in ("gradient.block.reduce", "weights.block.all_gather"):
        assert (number(early[name].nbytes) == 0.0) == is_at_end
    for name in ("gradient.reduce", "weights.all_gather"):
        assert (number(ends[name].nbytes) == number(all_of[name].nbytes)) == is_at_end


@pytest.mark.parametrize("is_low", [False, True])
def test_a_bucket_that_is_not_full_waits_for_the_first_block(is_low):
    """Weights fill buckets from the last one on; those in 8 bits have buckets of their own."""
    model, tensor = replace(DENSE, tied_embeddings=False), 2
    block = [linear.parameters / tensor for linear in model.block_linears]
    least = 2.9 * sum(block)
    pending = 0.0 if is_low else model.head.parameters / tensor
    waiting = 0.0
    for n_elements in [*reversed(block)] * (model.n_layers - 1):
        pending, waiting = pending + n_elements, waiting + n_elements
        if pending >= least:
            pending = waiting = 0.0
    assert waiting > 0.0
    program = MegatronProgram(bucket_elements=least, bucket_elements_per_replica=0.0)
    precision = "fp8-current" if is_low else "bf16"
    engine = Engine(precisions=(precision,), megatron=program)
    strategy = Megatron3D(engine=engine, low_weights=is_low)
    job = replace(JOB, precision=precision)
    plan = plan_of(strategy, model, job, tensor=tensor, data=4)
    ops = operations(plan.sync_microstep)
    names = [op.name for op in ops]
    nbytes = {op.name: number(op.nbytes) for op in ops if isinstance(op, Collective)}
    element = strategy.gradient_bytes(job)
    assert nbytes["gradient.pending.reduce"] == pytest.approx(waiting * element)
    assert nbytes["weights.pending.all_gather"] == pytest.approx(
        waiting * strategy.gathered_bytes(job)
    )
    last_block = len(names) - 1 - names[::-1].index("gradient.block.reduce")
    assert last_block < names.index("gradient.pending.reduce")
    assert names.index("weights.pending.all_gather") < names.index("forward.qkv.gemm")
    awaits = [i for i, op in enumerate(ops) if "weights.pending.all_gather" in op.waits_for]
    assert names.index("forward.proj.gemm") < awaits[0] <= names.index("forward.up.gemm")
    # Nothing is reduced twice, or left out.
    without = replace(strategy, overlap_grad_reduce=False)
    alone = plan_of(without, model, job, tensor=tensor, data=4)

    def reduced(*parts):
        found = [op for op in operations(*parts) if op.name.startswith("gradient.")]
        return sum(number(op.nbytes) for op in found if getattr(op, "kind", "") == "reduce_scatter")

    assert reduced(plan.sync_microstep, plan.step_end) == pytest.approx(reduced(alone.step_end))


def test_the_host_waits_for_the_norm_of_each_bucket():
    """It then issues a check, the reduction and the next kernel, while the device stands still."""
    issue = Quantity(1e-4, "assumed", "a test")
    program = MegatronProgram(
        bucket_elements=1.0,
        bucket_elements_per_replica=0.0,
        fills_buckets=True,
        checks_gradients=True,
    )
    of_engine = Engine(issue_seconds=issue, megatron=program)
    job = replace(JOB, precision="bf16")
    for engine, is_awaited in ((of_engine, True), (replace(of_engine, issue_seconds=None), False)):
        plan = plan_of(Megatron3D(engine=engine), DENSE, job, data=4)
        waits = [op for op in operations(plan.sync_microstep) if isinstance(op, HostWork)]
        assert bool(waits) == is_awaited
        for op in waits:
            n_buckets = number(op.seconds) / (3 * issue.value)
            # Gains and biases count as a bucket more.
            assert n_buckets == pytest.approx(len(DENSE.block_linears) + 1)


def test_gathers_in_each_stage_take_longer_than_those_that_start_at_once():
    options = {**MEGATRON, "machine": "dgx-b200", "global_batch": 64, "virtual_stages": 4}
    search = build_search("llama3-70b", 256, **options)
    strategy = search.scenario.strategy
    in_turn = replace(
        strategy.engine, megatron=replace(strategy.engine.megatron, aligns_gathers=False)
    )

    def seconds(each):
        of_engine = replace(search, scenario=replace(search.scenario, strategy=each))
        return best_of_layout(of_engine, "tensor=4,context=1,data=16,pipeline=4").step_seconds

    assert seconds(replace(strategy, engine=in_turn)) > seconds(strategy)


def test_gradients_of_weights_are_half_of_the_backward_products():
    stage = plan("zb-h1").pipeline.middle
    flops = [
        sum(number(op.m) * number(op.n) * number(op.k) for op in ops if isinstance(op, Gemm))
        for ops in map(operations, stage.split_backward)
    ]
    assert flops[0] == pytest.approx(flops[1])


def predicted(schedule, gpus=64, layout="tensor=8,pipeline=8", **options):
    given = {**MEGATRON, "global_batch": 32, "virtual_stages": 1, **options}
    return predict("gpt3-175b", gpus, layout, schedule=schedule, **given)


def test_bubbles_shrink_and_work_does_not():
    one, zero, dual = map(predicted, ("1f1b", "zb-h1", "dualpipe"))
    assert one.bubble_seconds > zero.bubble_seconds > dual.bubble_seconds > 0.0
    assert one.step_seconds > zero.step_seconds > dual.step_seconds
    assert one.mfu * one.step_seconds == pytest.approx(dual.mfu * dual.step_seconds)


def test_zb_h1_holds_no_more_than_1f1b_on_the_first_rank():
    one, zero = predicted("1f1b"), predicted("zb-h1")
    assert zero.memory_terms_bytes["activations"] == one.memory_terms_bytes["activations"]


def test_dualpipe_holds_two_stages_and_p_plus_1_micro_batches():
    model = replace(DENSE, position="rotary", tied_embeddings=False)
    of = {
        schedule: memory_terms(
            Megatron3D(schedule=schedule), model, replace(JOB, global_batch=64), 1, data=2,
            pipeline=4,
        )
        for schedule in ("1f1b", "dualpipe")
    }  # fmt: skip
    one, dual = of["1f1b"], of["dualpipe"]
    assert dual["activations"] == pytest.approx(one["activations"] * 5 / 4)
    # Half of the whole model, with embedding and head; of 1F1B a quarter, with one of these.
    matrices = 12 * 256 * 256 + 13 * 256
    vocabulary = DENSE.head.parameters
    assert dual["weights"] / one["weights"] == pytest.approx(
        (4 * matrices + 2 * vocabulary) / (2 * matrices + vocabulary), rel=0.02
    )
    assert dual["gradients"] == pytest.approx(2 * dual["weights"])
    # Twice as many ranks share the states of twice as many parameters.
    assert dual["optimizer_states"] / dual["weights"] == pytest.approx(
        one["optimizer_states"] / one["weights"] / 2
    )


def test_without_stages_schedules_are_one():
    layouts = {"layout": "tensor=8,data=8"}
    one, zero = (predicted(schedule, **layouts) for schedule in ("1f1b", "dualpipe"))
    assert one.step_seconds == zero.step_seconds
    assert one.memory_terms_bytes == zero.memory_terms_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "gpipe"}, "schedule is 'gpipe'; allowed: 1f1b, zb-h1, dualpipe"),
        ({"schedule": "zb-h1", "virtual_stages": 2}, "virtual_stages is 2; allowed"),
        ({"schedule": "zb-h1", "strategy": "zero3"}, "strategy zero3 does not have"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        build_search("gpt3-175b", 64, **{**MEGATRON, **options})


def test_dualpipe_needs_micro_batches_from_both_ends():
    with pytest.raises(InputError, match="schedule needs more micro-batches"):
        predicted("dualpipe", global_batch=8)
    with pytest.raises(InputError, match="need --overlap-grad-reduce"):
        predicted("dualpipe", overlap_grad_reduce=False)
    with pytest.raises(InputError, match="even number of stages"):
        predicted("dualpipe", gpus=24, layout="tensor=8,pipeline=3")


def test_megatron_core_is_not_told_what_it_does_not_have():
    with pytest.raises(InputError, match="schedule is 'dualpipe'; allowed for Megatron-Core: 1f1b"):
        axonn_tune.launch(
            "gpt3-175b", 64, grid="tensor=8,pipeline=8", schedule="dualpipe", global_batch=32,
            virtual_stages=1, **MEGATRON,
        )  # fmt: skip


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_an_engine_has_its_kernels_in_both_parts_of_the_backward_pass(schedule):
    engine = load_engine("nanotron")
    strategy = Megatron3D(schedule=schedule, engine=engine)
    stage = engine.as_run(
        plan_of(strategy, DENSE, JOB, 1, data=2, pipeline=4)
    ).pipeline.middle  # fmt: skip
    whole = sum(number(op.nbytes) for op in operations(stage.backward) if hasattr(op, "kernel"))
    parts = [op for part in stage.split_backward for op in operations(part)]
    assert sum(number(op.nbytes) for op in parts if hasattr(op, "kernel")) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("n_stages", "n_virtual"), [(2, 1), (4, 1), (2, 2), (4, 2), (2, 8), (8, 3)]
)
def test_ranks_hold_the_activations_that_their_order_leaves(n_stages, n_virtual):
    """The first and the last rank, in micro-batches: counted along Megatron's order of passes."""
    n_micro = 4 * n_stages
    model = Model("m", 2 * n_stages * n_virtual, 256, n_heads=8, vocab_size=1024, seq_len=128)
    job = Job(n_stages, n_micro, 128)
    table = table_of(Megatron3D(False, False, False, True), 1, "none", n_virtual, pipeline=n_stages)
    held = []
    shapes = Megatron3D(False, False, False, True).shapes(model, job, table)

    def terms(layers, is_first, is_last, n_held):
        held.append(number(n_held) / len(layers))
        return {}

    list(memory_of_stages(shapes, terms))
    for rank, n_held in zip((0, n_stages - 1), held, strict=False):
        steps = rank_order(rank, n_stages, n_virtual, n_micro)[:, 0]
        counted = np.cumsum(np.where(steps == FORWARD, 1, -1)).max() / n_virtual
        assert n_held == pytest.approx(counted)


@pytest.mark.parametrize("scatters", [True, False])
def test_a_whole_stream_is_sent_in_parts_and_gathered_or_sent_whole(scatters):
    engine = Engine(megatron=MegatronProgram(scatters_transfers=scatters))
    strategy = Megatron3D(sequence_parallel=False, engine=engine)
    plan = plan_of(strategy, DENSE, JOB, tensor=2, pipeline=4)
    stream = JOB.seq_len * DENSE.hidden_size * 2.0
    assert number(plan.pipeline.transfer.nbytes) == stream / (2.0 if scatters else 1.0)
    received = {op.name for op in collectives(plan, plan.pipeline.last.forward)}
    assert ("forward.pipeline.all_gather" in received) == scatters
