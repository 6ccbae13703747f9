"""Training through released engines: the losses of torch's own, and the plan's collectives."""

from collections import Counter
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from math import prod

import pytest

torch = pytest.importorskip("torch")

from build import number, operations, plan_of  # noqa: E402
from engines.counted_products import Products  # noqa: E402
from runtime.ranks import on_ranks  # noqa: E402

from axonn_tune.errors import InputError  # noqa: E402
from axonn_tune.io.presets import load_engine  # noqa: E402
from axonn_tune.runtime.released import packages  # noqa: E402
from axonn_tune.runtime.request import RunRequest  # noqa: E402
from axonn_tune.runtime.run import build_trainer  # noqa: E402
from axonn_tune.spec import names  # noqa: E402
from axonn_tune.spec.configuration import Configuration  # noqa: E402
from axonn_tune.spec.engine import IDEAL  # noqa: E402
from axonn_tune.spec.job import Job, Overlap  # noqa: E402
from axonn_tune.spec.layout import Layout, grid_layout  # noqa: E402
from axonn_tune.spec.model import Model  # noqa: E402
from axonn_tune.spec.plan import COMPUTE, Collective, Gemm  # noqa: E402
from axonn_tune.strategies.axonn.axonn4d import Axonn4D  # noqa: E402
from axonn_tune.strategies.zero.zero import zero3  # noqa: E402
from axonn_tune.validation.runnable import runnable  # noqa: E402

GPT = Model("gpt", 2, 32, 4, 256, 16)
SHARDED = Layout({"shard": 2, "replica": 1})
N_STEPS = 3
NORM_BYTES = 4
NORM = names.over_axis("all_reduce", "shard")


def zero3_request(engine=IDEAL, recompute="none"):
    return RunRequest(
        model=GPT,
        job=Job(2, 4, 16, dtype="fp32", overlap=Overlap(oar=True, ors=False, oag=True)),
        configuration=Configuration(SHARDED, recompute=recompute),
        n_steps=N_STEPS,
        strategy="zero3",
        engine=engine,
    )


def trained(request):
    """The losses and norms of all steps, and the operations of the last one."""
    trainer = build_trainer(request, torch.device("cpu"))
    steps = [trainer.step(index) for index in range(request.n_steps)]
    return [[s.loss, s.gradient_norm] for s in steps], trainer.last_operations


def sent_bytes(recorded):
    """The bytes of all recorded collectives by their names."""
    sent = Counter()
    for op in recorded:
        if op.stream != COMPUTE:
            sent[op.name] += op.nbytes
    return sent


def planned_step(strategy, request):
    """All operations of the plan in a step."""
    configuration = request.configuration
    plan = plan_of(
        strategy,
        request.model,
        request.job,
        configuration.micro_batch,
        configuration.recompute,
        **configuration.layout.sizes,
    )
    step = [*operations(plan.microstep)] * int(number(plan.n_microsteps))
    return [*step, *operations(plan.step_end)]


def planned_bytes(strategy, request):
    """The bytes of all collectives of the plan in a step, by the name of their kind and axis."""
    layout = request.configuration.layout
    planned = Counter()
    for op in planned_step(strategy, request):
        if isinstance(op, Collective) and prod(map(layout.size, op.axis.split("*"))) > 1:
            planned[names.over_axis(op.kind, op.axis)] += number(op.nbytes)
    return planned


def check_deepspeed(rank):
    engine = load_engine("deepspeed")
    n_products = {}
    for recompute in ("none", "full"):
        expected, _ = trained(zero3_request(recompute=recompute))
        request = zero3_request(engine, recompute)
        with Products() as counted:
            curve, recorded = trained(request)
        n_products[recompute] = counted.columns.total()
        torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected))
        sent, planned = sent_bytes(recorded), planned_bytes(zero3(engine), request)
        # The plan sums one norm of 4 bytes, DeepSpeed one of 8 for matrices and one for vectors.
        assert (sent.pop(NORM), planned.pop(NORM)) == (16, NORM_BYTES)
        assert sent == planned
    plan = planned_step(zero3(engine), request)
    again = sum(isinstance(op, Gemm) and op.name.startswith(names.RECOMPUTE) for op in plan)
    assert n_products["full"] - n_products["none"] == N_STEPS * again == N_STEPS * 2 * 8


def axonn_request(grid, recompute, tied_embeddings):
    return RunRequest(
        model=replace(GPT, tied_embeddings=tied_embeddings),
        job=Job(4, 8, 16, dtype="fp32"),
        configuration=Configuration(grid, recompute=recompute),
        n_steps=N_STEPS,
        engine=load_engine("axonn"),
    )


AXONN_CASES = [
    (grid_layout(1, 1, 1, 4), "none"),
    (grid_layout(2, 1, 2, 1), "none"),
    (grid_layout(2, 1, 2, 1), "full"),
    (grid_layout(1, 2, 1, 2), "full"),
    (grid_layout(2, 2, 1, 1), "none"),
]


def check_axonn(rank):
    for tied_embeddings in (True, False):
        expected = None
        for grid, recompute in AXONN_CASES:
            request = axonn_request(grid, recompute, tied_embeddings)
            curve, recorded = trained(request)
            expected = expected or curve
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), **close)
            check_axonn_bytes(request, recorded)


def check_axonn_bytes(request, recorded):
    """Hold what AxoNN and the runtime around it send against the plan, but for the norm."""
    planned = planned_bytes(Axonn4D(engine=request.engine), request)
    sent = Counter()
    for op in recorded:
        if op.stream != COMPUTE:
            sent[names.over_axis(op.kind, op.stream)] += op.nbytes
    sent.pop("all_reduce over 4 ranks", None)  # the norm of matrices that X and Y or Z split
    assert sent.keys() == planned.keys()
    for name, nbytes in planned.items():
        assert abs(sent[name] - nbytes) <= NORM_BYTES * (name.startswith("all_reduce")), name


@pytest.mark.slow
def test_axonn_learns_the_same_on_every_grid_and_sends_what_the_plan_says():
    pytest.importorskip("axonn")
    on_ranks(4, check_axonn)


def megatron_request(sizes, tied_embeddings=True):
    return RunRequest(
        model=replace(GPT, tied_embeddings=tied_embeddings),
        job=Job(4, 8, 16, dtype="fp32", attention="unfused"),
        configuration=Configuration(Layout({"context": 1, "pipeline": 1, **sizes})),
        n_steps=N_STEPS,
        strategy="megatron",
        engine=load_engine("megatron-core"),
    )


def check_megatron_core(rank):
    for tied_embeddings in (True, False):
        expected = None
        for tensor in (1, 2, 4):
            request = megatron_request({"tensor": tensor, "data": 4 // tensor}, tied_embeddings)
            curve, recorded = trained(request)
            expected = expected or curve
            close = {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), **close)
            strategy = runnable("megatron", request.engine).strategy
            sent, planned = sent_bytes(recorded), planned_bytes(strategy, request)
            assert sent == planned, f"{tensor}, {sent}, {planned}"


@pytest.mark.slow
def test_megatron_core_learns_the_same_on_every_layout_and_sends_what_the_plan_says():
    pytest.importorskip("megatron.core")
    on_ranks(4, check_megatron_core)


@pytest.mark.slow
def test_deepspeed_learns_as_fsdp2_does_and_sends_what_the_plan_says():
    pytest.importorskip("deepspeed")
    on_ranks(2, check_deepspeed)


def not_found(name):
    raise PackageNotFoundError(name)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(packages, "version", not_found)
    with pytest.raises(InputError, match=r"pip install 'axonn-tune\[engines\]'"):
        zero3_request(load_engine("deepspeed"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"configuration": Configuration(SHARDED, recompute="selective")}, "none, full"),
        ({"model": replace(GPT, parallel_block=True)}, "parallel blocks"),
        ({"goldfish": 4}, "goldfish"),
        ({"job": Job(2, 4, 16, dtype="bf16"), "engine": load_engine("axonn")}, "allowed: fp32"),
        ({"configuration": Configuration(SHARDED, "zyxd")}, "allowed: xyzd"),
    ],
)
def test_what_an_engine_is_not_given_here_is_one_line(changed, said):
    pytest.importorskip("deepspeed")
    with pytest.raises(InputError, match=f"engine (deepspeed|axonn).*{said}|{said}.*engine deep"):
        replace(zero3_request(load_engine("deepspeed")), **changed)
