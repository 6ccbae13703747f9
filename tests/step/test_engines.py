"""What the facts of an engine do to the operations of a plan, and to the time of a step."""

import math
from dataclasses import replace

import pytest
from build import number, operations, plan_of
from prices import attention_seconds
from worlds import llama, machine_of, quantity

from axonn_tune.errors import InputError
from axonn_tune.io.presets import list_engines, load_engine
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import IDEAL, Engine, KernelForm, MemoryForm
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, MemoryBound
from axonn_tune.spec.programs import AxonnProgram, MegatronProgram, ZeroProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import predict
from axonn_tune.step.timeline import step_timeline
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of
from axonn_tune.strategies.named import STRATEGIES, USUAL_ENGINES, Switches, strategy_named
from axonn_tune.strategies.zero.zero import zero3

MODEL = Model("m", n_layers=4, hidden_size=256, n_heads=8, vocab_size=512, seq_len=128)
JOB = Job(8, 16, 128)
EAGER = Engine(
    kernels={
        "every": KernelForm(traffic=quantity(2.0)),
        "layer_norm": KernelForm(traffic=quantity(3.0), launches=quantity(6.0)),
    },
    attention_rate=quantity(0.5),
)


def predicted(engine, machine=None):
    configuration = Configuration(Layout({"shard": 8}), micro_batch=2, recompute="none")
    scenario = Scenario(MODEL, JOB, machine or machine_of(), zero3(engine))
    return predict(scenario, configuration)


@pytest.mark.parametrize("tensor", [2, 8])
def test_the_device_waits_for_the_host_around_each_collective_that_is_awaited(tensor):
    """Each call that moves anything adds a gap where no message runs beside kernels."""
    gap = 1e-3
    program = MegatronProgram(
        sequence_parallel=False, overlap_grad_reduce=False, overlaps_gradient_sums=False
    )
    layout = Layout({"tensor": tensor, "context": 1, "data": 8 // tensor, "pipeline": 1})
    configuration = Configuration(layout, micro_batch=2, recompute="full")
    steps = [
        predict(Scenario(MODEL, JOB, machine_of(), megatron_of(engine, (1,))), configuration)
        for engine in (
            Engine(megatron=program),
            Engine(megatron=program, collective_gap_seconds=quantity(gap)),
        )
    ]
    operations_of_first = explain(steps[0], with_sensitivities=False).operations
    n_calls = sum(op.n_calls for op in operations_of_first if op.axis)
    assert n_calls > 6 * MODEL.n_layers
    added = steps[1].step_seconds - steps[0].step_seconds
    assert added == pytest.approx(n_calls * gap, rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [(zero3(), {"shard": 8}), (Megatron3D(), {"tensor": 2, "data": 2, "pipeline": 2})],
    ids=["zero3", "pipeline"],
)
def test_kernels_move_and_launch_what_the_engine_says_and_products_stay(strategy, sizes):
    plan = plan_of(strategy, MODEL, JOB, **sizes)
    seen = set()
    for ideal, real in zip(plan.operations, EAGER.as_run(plan).operations, strict=True):
        if not isinstance(ideal, Attention | MemoryBound):
            assert real is ideal
        elif isinstance(ideal, Attention):
            assert real.rate == 0.5 and ideal.rate == 1.0
        else:
            traffic, launches = (3.0, 6.0) if ideal.kernel == "layer_norm" else (2.0, 1.0)
            assert number(real.nbytes) == traffic * number(ideal.nbytes)
            assert real.n_launches == launches
            seen.add(ideal.kernel)
    assert {"layer_norm", "layer_norm_backward", "optimizer"} <= seen


def test_an_engine_without_facts_runs_the_plan_itself():
    plan = plan_of(zero3(), MODEL, JOB, shard=8)
    assert IDEAL.as_run(plan) is plan


def test_unfused_attention_has_its_own_price_whatever_the_engine():
    unfused = replace(JOB, attention="unfused")
    plan = EAGER.as_run(plan_of(zero3(), MODEL, unfused, shard=8))
    assert {op.rate for op in operations(plan.microstep) if isinstance(op, Attention)} == {1.0}


def test_attention_at_half_the_rate_takes_twice_as_long():
    operation = Attention("a", 2.0, 8.0, 4096, 128, backward=False, fused=True)
    slow = replace(operation, rate=0.5)
    machine = machine_of()
    assert attention_seconds(slow, machine, "bf16") == pytest.approx(
        2.0 * attention_seconds(operation, machine, "bf16")
    )


@pytest.mark.parametrize(("head_dim", "used"), [(64, 1.0), (96, 0.75), (128, 1.0), (160, 1.0)])
def test_a_head_takes_as_long_as_the_kernel_that_is_wide_enough_for_it(head_dim, used):
    """FlashAttention of January 2023 has kernels for 32, 64 and 128 features."""
    model = Model("m", n_layers=1, hidden_size=8 * head_dim, n_heads=8, vocab_size=512, seq_len=128)
    engine = load_engine("megatron-2023")
    plan = engine.as_run(plan_of(Megatron3D(engine=engine), model, JOB, data=8))
    rates = {op.rate for op in plan.operations if isinstance(op, Attention)}
    assert rates == {engine.attention_rate.value * used}


def test_each_launch_moves_its_share_and_pays_for_itself():
    machine = machine_of()
    machine = replace(machine, kernels=replace(machine.kernels, launch_seconds=quantity(1e-5)))
    norms = Engine(kernels={"every": KernelForm(launches=quantity(6.0))})
    slower, ideal = (predicted(engine, machine) for engine in (norms, IDEAL))
    ratio = {
        op.name: op.seconds_per_call / before.seconds_per_call
        for op, before in zip(explain(slower).operations, explain(ideal).operations, strict=True)
        if op.kind == "memory-bound"
    }
    assert min(ratio.values()) > 1.0 and max(ratio.values()) < 6.0


def test_a_step_gets_slower_and_the_timeline_says_the_same():
    slow, ideal = predicted(EAGER), predicted(IDEAL)
    assert slow.step_seconds > 1.1 * ideal.step_seconds
    assert step_timeline(slow).seconds == pytest.approx(slow.step_seconds, rel=1e-9)


def test_the_engines_host_replaces_that_of_the_machine():
    machine = machine_of()
    slow = replace(machine, kernels=replace(machine.kernels, issue_seconds=quantity(1.0)))
    engine = Engine(issue_seconds=quantity(0.5))
    of_engine, of_machine = predicted(engine, slow), predicted(IDEAL, slow)
    assert of_engine.step_seconds == pytest.approx(0.5 * of_machine.step_seconds, rel=1e-3)


def test_an_engines_options_hold_unless_a_user_says_otherwise():
    engine = load_engine("megatron-2021")
    usual = strategy_named("megatron", engine=engine)
    assert not (usual.sequence_parallel or usual.overlap_grad_reduce or usual.fp32_gradients)
    changed = strategy_named("megatron", Switches(sequence_parallel=True), engine)
    assert changed == replace(usual, sequence_parallel=True)
    assert strategy_named("megatron").sequence_parallel


@pytest.mark.parametrize("name", ["megatron-2021", "megatron-2021-09"])
@pytest.mark.parametrize(("dtype", "element_bytes"), [("fp16", 2.0), ("bf16", 4.0)])
def test_old_megatron_sums_gradients_of_bf16_in_fp32_and_those_of_fp16_not(
    name, dtype, element_bytes
):
    strategy = strategy_named("megatron", engine=load_engine(name))
    scenario = Scenario(MODEL, Job(2, 2, MODEL.seq_len, dtype=dtype), machine_of(), strategy)
    configuration = Configuration(Layout({"data": 2}), micro_batch=1, recompute="none")
    terms = predict(scenario, configuration).memory_terms_bytes
    assert terms["gradients"] == pytest.approx(terms["weights"] / 2.0 * element_bytes)


@pytest.mark.parametrize(("name", "is_hidden"), [("megatron-2021", False), ("megatron-2022", True)])
@pytest.mark.parametrize("oar", [True, False])
def test_sums_of_gradients_ran_beside_products_only_from_autumn_2021(name, is_hidden, oar):
    """ColumnParallelLinear at 78a69eaf sums them in autograd, once both products have run."""
    strategy = strategy_named("megatron", Switches(sequence_parallel=False), load_engine(name))
    job = Job(2, 4, 1024, overlap=Overlap(oar=oar))
    scenario = Scenario(replace(MODEL, seq_len=1024), job, machine_of(), strategy)
    configuration = Configuration(Layout({"tensor": 2}), micro_batch=2, recompute="none")
    by_name = {op.name: op for op in explain(predict(scenario, configuration)).operations}
    hidden = by_name["backward.up.all_reduce"].hidden_seconds
    assert (hidden > 0.0) == (is_hidden and oar)


def nanotron(global_batch, micro_batch, memory_gib=80.0, **sizes):
    """Return what nanotron is predicted to take for the Llama of 1B of its measured runs."""
    machine = machine_of()
    gpu = replace(machine.gpu, memory_bytes=quantity(memory_gib * 2**30))
    model = llama(
        n_layers=16,
        hidden_size=2048,
        n_heads=32,
        n_kv_heads=32,
        ffn_hidden_size=8192,
        vocab_size=131072,
        seq_len=4096,
        tied_embeddings=True,
    )
    strategy = megatron_of(load_engine("nanotron"), n_virtual=(1,), distributed_optimizer=False)
    job = Job(math.prod(sizes.values()), global_batch, 4096)
    scenario = Scenario(model, job, replace(machine, gpu=gpu), strategy)
    return predict(
        scenario, Configuration(Layout(sizes), micro_batch=micro_batch, recompute="none")
    )


def test_nanotron_holds_what_was_counted_in_its_code():
    """A GPU holds 20 bytes a parameter, 10 a logit, and 20 widths and 8 MLP widths a layer."""
    held = nanotron(16, 2, data=8)
    parameters = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    saved = 8192 * 16 * (20 * 2048 + 8 * 8192)
    counted = 20 * parameters + saved + 10 * 8192 * 131072
    assert held.allocated_bytes == pytest.approx(counted, rel=0.005)


@pytest.mark.parametrize(("n_stages", "n_layers"), [(2, 10), (4, 5), (8, 3)])
def test_a_stage_of_nanotron_takes_layers_until_it_has_its_share(n_stages, n_layers):
    """The head counts like four of the sixteen layers, which makes shares of 10, 5 and 2.5."""
    held = nanotron(64, 1, data=2, pipeline=n_stages)
    layer = 4 * 2048**2 + 3 * 2048 * 8192
    first_stage = 2 * (131072 * 2048 + n_layers * layer)
    assert held.memory_terms_bytes["weights"] == pytest.approx(first_stage, rel=1e-3)


@pytest.mark.parametrize(
    ("global_batch", "sizes", "n_tensors"),
    [
        (16, {"tensor": 8}, 53),  # a full queue holds fewer than the 992 of all 31 passes
        (1, {"tensor": 8}, 32),  # of the only forward pass, two in each of 16 layers
        (16, {"data": 8}, 0),
    ],
)
def test_the_allocator_holds_tensors_back_that_the_gpu_has_not_sent(global_batch, sizes, n_tensors):
    held = nanotron(global_batch, 1, **sizes)
    assert held.memory_terms_bytes["held_back"] == n_tensors * 4096 * 2048 * 2


def test_no_memory_is_held_back_where_a_stage_waits_for_its_host_or_no_engine_says_so():
    held = nanotron(16, 1, tensor=4, pipeline=2)
    assert held.memory_terms_bytes["held_back"] == 0.0 and not held.runs_ahead
    assert "held_back" not in predicted(EAGER).memory_terms_bytes


def test_memory_that_is_held_back_never_lacks_elsewhere():
    """53 tensors of 16 sequences take 13 GiB, for which a GPU of 40 GiB has no room."""
    roomy, tight = (nanotron(32, 16, memory_gib=size, tensor=8) for size in (80.0, 40.0))
    tensors = 53 * 16 * 4096 * 2048 * 2
    assert roomy.memory_terms_bytes["held_back"] == pytest.approx(tensors)
    assert tight.memory_terms_bytes["held_back"] == 0 and tight.fits
    assert tight.allocated_bytes == roomy.allocated_bytes
    assert not nanotron(32, 32, memory_gib=40.0, tensor=8).fits


@pytest.mark.parametrize("name", ["attention_factor", "mlp_factor", "logit_bytes"])
@pytest.mark.parametrize("strategy", [zero3, Axonn4D, Megatron3D], ids=lambda s: s.__name__)
def test_each_fact_of_memory_counts_in_every_strategy(strategy, name):
    axis = "shard" if strategy is zero3 else "data"
    configuration = Configuration(Layout({axis: 8}), micro_batch=2, recompute="none")
    usual, larger = (
        predict(Scenario(MODEL, JOB, machine_of(), strategy(engine=engine)), configuration)
        for engine in (
            Engine(memory=MemoryForm(**{name: quantity(value)})) for value in (1.0, 90.0)
        )
    )
    assert larger.memory_bytes > usual.memory_bytes


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"kernels": {"warp": KernelForm()}}, "kernel is 'warp'; allowed: every, copy"),
        ({"attention_rate": quantity(0.0)}, "attention_rate is 0.0; allowed: 0.01 to 10"),
        ({"issue_seconds": quantity(-1.0)}, "issue_seconds is -1.0; allowed: 0 to 3600"),
        ({"stage_wait_seconds": quantity(1e308)}, "stage_wait_seconds is 1e.308; allowed: 0 to"),
        ({"spanning_wait_seconds": quantity(-1.0)}, "spanning_wait_seconds is -1.0; allowed: 0 to"),
        (
            {"spanning_wait_seconds": quantity(1e-4)},
            "spanning_wait_seconds is given; allowed: only with stage_wait_seconds",
        ),
        ({"strategies": ()}, "strategies is empty; name at least one"),
        ({"title": "a\x07"}, "name is 'a.x07'; allowed: up to 200 characters"),
    ],
)
def test_facts_that_cannot_be_are_refused(facts, message):
    with pytest.raises(InputError, match=message):
        Engine(**{"name": "mine", "strategies": ("zero3",), **facts})


@pytest.mark.parametrize(
    ("program", "facts", "message"),
    [
        (MegatronProgram, {"bucket_elements": 0.0}, "bucket_elements is 0.0; allowed: 1 to"),
        (MegatronProgram, {"bucket_elements_per_replica": -1.0}, "allowed: 0 to"),
        (MegatronProgram, {"poll_seconds": quantity(-1.0)}, "poll_seconds is -1.0; allowed: 0 to"),
        (
            MegatronProgram,
            {"combined_issues": quantity(-1.0)},
            "combined_issues is -1.0; allowed: 0 to",
        ),
        (MegatronProgram, {"forward_messages": -1}, "forward_messages is -1; allowed: a whole"),
        (ZeroProgram, {"live_elements": float("nan")}, "live_elements is nan; allowed: 0 to"),
        (ZeroProgram, {"view_seconds": quantity(-1.0)}, "view_seconds is -1.0; allowed: 0 to 3600"),
        (AxonnProgram, {"gathered_element_bytes": 0.0}, "gathered_element_bytes is 0.0; allowed:"),
        (MemoryForm, {"logit_bytes": quantity(-1.0)}, "logit_bytes is -1.0; allowed: 0 to 1000"),
        (MemoryForm, {"mlp_factor": quantity(0.0)}, "mlp_factor is 0.0; allowed: 0.1 to 1000"),
        (AxonnProgram, {"reduction": "never"}, "reduction is 'never'; allowed: buckets, whole"),
    ],
)
def test_programs_that_cannot_be_are_refused(program, facts, message):
    with pytest.raises(InputError, match=message):
        program(**facts)


def test_a_form_moves_some_bytes_in_some_launches():
    with pytest.raises(InputError, match="launches is 0"):
        KernelForm(launches=quantity(0.5))
    with pytest.raises(InputError, match="traffic is 0"):
        KernelForm(traffic=quantity(0.0))


def test_every_shipped_engine_carries_out_strategies_that_exist():
    for name in list_engines():
        engine = load_engine(name)
        assert engine.name == name and engine.title
        assert engine.strategies and set(engine.strategies) <= set(STRATEGIES)


def test_every_strategy_has_a_usual_engine_that_carries_it_out():
    assert set(USUAL_ENGINES) == set(STRATEGIES)
    for name, engine in USUAL_ENGINES.items():
        assert strategy_named(name, engine=load_engine(engine)).name == name
