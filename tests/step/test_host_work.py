"""Work of the host for which the device stands still; DeepSpeed has much of it."""

from dataclasses import replace

import pytest
from build import number, operations, plan_of
from worlds import machine_of

from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, HostWork
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import predict
from axonn_tune.step.timeline import step_timeline
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3

MODEL = Model("m", n_layers=6, hidden_size=256, n_heads=8, vocab_size=512, seq_len=128)
SERIAL = Job(16, 32, 128, overlap=Overlap(False, False, False))
SECONDS = 30e-6
# A block has four matrices, each gathered for the forward pass, and once for what follows later.
N_GATHERS = 2 * 4 * MODEL.n_layers


def strategy(seconds=SECONDS):
    view_seconds = Quantity(seconds, "assumed", "a test")
    return zero3(Engine(zero=ZeroProgram(gathers_blocks=False, view_seconds=view_seconds)))


def predicted(seconds, n_ranks=16, machine=None):
    layout = Layout({"shard": n_ranks, "replica": 16 // n_ranks})
    configuration = Configuration(layout, micro_batch=2, recompute="full")
    machine = machine or machine_of()
    return predict(Scenario(MODEL, SERIAL, machine, strategy(seconds)), configuration)


@pytest.mark.parametrize("shard", [1, 2, 16])
def test_the_host_makes_a_view_for_each_rank_of_each_gather(shard):
    sizes = {"shard": shard, "replica": 16 // shard}
    microstep = plan_of(strategy(), MODEL, SERIAL, 2, "full", **sizes).microstep
    host_seconds = sum(
        phase.repeats * number(op.seconds)
        for phase in microstep.phases
        for op in phase.operations
        if isinstance(op, HostWork)
    )
    n_calls = sum(
        phase.repeats * number(op.n_calls)
        for phase in microstep.phases
        for op in phase.operations
        if isinstance(op, Collective) and op.kind == "all_gather"
    )
    n_views = n_calls * shard if shard > 1 else 0
    assert host_seconds == pytest.approx(SECONDS * n_views)


@pytest.mark.parametrize("shard", [1, 2, 16])
def test_the_host_cuts_every_gradient_for_each_rank(shard):
    per_slice = Quantity(SECONDS, "assumed", "a test")
    cutting = zero3(Engine(zero=ZeroProgram(slice_seconds=per_slice)))
    sizes = {"shard": shard, "replica": 16 // shard}
    microstep = plan_of(cutting, MODEL, SERIAL, 2, "full", **sizes).microstep
    (cut,) = [op for op in operations(microstep) if isinstance(op, HostWork)]
    # A block has four matrices with biases and two norms of two vectors; besides there are the
    # final norm, the positions, and an embedding that the head shares.
    n_tensors = MODEL.n_layers * (4 * 2 + 2 * 2) + 2 + 1 + 1
    n_slices = n_tensors * shard if shard > 1 else 0
    assert number(cut.seconds) == pytest.approx(SECONDS * n_slices)


def test_a_strategy_without_such_work_has_none():
    microstep = plan_of(zero3(), MODEL, SERIAL, 2, "full", shard=16).microstep
    assert not [op for op in operations(microstep) if isinstance(op, HostWork)]


def test_a_step_takes_longer_by_what_the_host_needs_whatever_the_gpu():
    without, half, whole = (predicted(seconds).step_seconds for seconds in (0.0, 15e-6, 30e-6))
    assert whole - without == pytest.approx(2.0 * (half - without), rel=1e-9)
    assert whole - without > SECONDS * 16 * N_GATHERS


def test_the_host_is_on_the_timeline_and_in_the_explanation():
    prediction = predicted(SECONDS)
    timeline = step_timeline(prediction)
    assert timeline.seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    spans = [op for op in timeline.operations if op.kind == "host"]
    assert spans and all(op.flops == op.nbytes == 0.0 for op in spans)
    by_name = {cost.name: cost for cost in explain(prediction).operations}
    views = by_name["forward.block.views"]
    assert (views.kind, views.bound_by) == ("host", "host")
    assert views.seconds_per_call == pytest.approx(4 * 16 * SECONDS)


def test_such_work_takes_longer_on_a_slower_host():
    machine = machine_of()
    factor = Quantity(1.5, "assumed", "a test")
    slower = replace(machine, kernels=replace(machine.kernels, issue_factor=factor))
    without, as_stated = (predicted(seconds).step_seconds for seconds in (0.0, SECONDS))
    with_slower = predicted(SECONDS, machine=slower).step_seconds
    assert with_slower - without == pytest.approx(1.5 * (as_stated - without), rel=1e-9)


@pytest.mark.parametrize(("seconds", "bound_by"), [(1e-3, "host"), (1e-12, "compute")])
def test_products_of_experts_are_bound_by_the_host_where_it_is_the_slower_one(seconds, bound_by):
    """Only forward products wait for it; whoever reads `compute` would blame the GPU."""
    model = replace(MODEL, experts=Experts(8, 2, 512))
    engine = Engine(expert_issue_seconds=Quantity(seconds, "assumed", "a test"))
    megatron = Megatron3D(has_experts=True, engine=engine)
    layout = Layout({"tensor": 1, "context": 1, "data": 16, "pipeline": 1, "expert": 2})
    scenario = Scenario(model, SERIAL, machine_of(), megatron)
    explained = explain(predict(scenario, Configuration(layout, micro_batch=1, recompute="none")))
    bounds = {cost.name: cost.bound_by for cost in explained.operations if "gemm" in cost.name}
    of_experts = {name for name in bounds if name.startswith("forward.experts_")}
    assert of_experts == {"forward.experts_up.gemm", "forward.experts_down.gemm"}
    assert {bounds[name] for name in of_experts} == {bound_by}
    assert {bounds[name] for name in bounds.keys() - of_experts} == {"compute"}
