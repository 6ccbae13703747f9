"""Streams, waits and times on a real GPU: nothing blocks the host, and a record sums up."""

import time

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from gpu.training import MODELS, WIDE, Training  # noqa: E402

from axonn_tune.runtime.ranks.collectives import _OnDevice  # noqa: E402
from axonn_tune.runtime.ranks.recorder import Recorder  # noqa: E402
from axonn_tune.runtime.request import RunRequest  # noqa: E402
from axonn_tune.runtime.run import build_trainer  # noqa: E402
from axonn_tune.spec.configuration import Configuration  # noqa: E402
from axonn_tune.spec.job import Job  # noqa: E402
from axonn_tune.spec.layout import Layout  # noqa: E402
from axonn_tune.spec.measurement import COMPUTATION  # noqa: E402


@pytest.mark.gpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_collectives_of_one_rank_copy(alone, dtype):
    recorder = Recorder(alone)
    recorder.start_step()
    issuer = _OnDevice(dist.group.WORLD)
    x = torch.randn(1 << 20, device=alone).to(dtype)
    gathered, shard = torch.empty_like(x), torch.empty_like(x)
    for kind, arguments in (
        ("all_reduce", (x, dist.ReduceOp.SUM)),
        ("all_gather", (gathered, x)),
        ("reduce_scatter", (shard, x)),
    ):
        start = getattr(issuer, kind)
        recorder.collective(kind, kind, x.nbytes, "x", lambda s=start, a=arguments: s(*a)).wait()
    torch.cuda.synchronize()
    assert torch.equal(x, gathered) and torch.equal(x, shard)
    assert all(op.seconds >= 0 for op in recorder.take_step())


@pytest.mark.gpu_only
def test_a_wait_does_not_block_the_host(alone, note):
    issuer = _OnDevice(dist.group.WORLD)
    x = torch.randn(1 << 20, device=alone)
    y = torch.empty_like(x)
    issuer.all_gather(y, x).wait()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(200_000_000)
    issuer.all_gather(y, x).wait()
    on_host = time.perf_counter() - begin
    torch.cuda.synchronize()
    on_device = time.perf_counter() - begin
    note(host_ms=1e3 * on_host, device_ms=1e3 * on_device)
    assert on_host < 1e-2 < on_device


@pytest.mark.parametrize("batch", [1, 4])
def test_operations_and_standstills_sum_up_to_the_step(alone, batch, note):
    spec, seq_len = (WIDE, 2048) if alone.type == "cuda" else (MODELS["gpt"], 64)
    training = Training(spec, alone, "bf16", batch, seq_len)
    for index in range(3):
        step = training.trainer.step(index)
    operations = training.trainer.last_operations
    computed = sum(op.seconds for op in operations)
    exposed = sum(step.exposed_seconds.values())
    note(
        batch=batch,
        step_ms=1e3 * step.seconds,
        operations_ms=1e3 * computed,
        standstills_ms=1e3 * exposed,
        n_operations=len(operations),
    )
    assert all(op.seconds >= 0 for op in operations)
    assert computed + exposed == pytest.approx(step.seconds, rel=0.05, abs=1e-4)


@pytest.mark.gpu_only
def test_recorded_kernels_take_as_long_as_the_profiler_says(alone, note):
    from torch.profiler import ProfilerActivity, profile

    training = Training(WIDE, alone, "bf16", 4, 2048)
    for index in range(3):
        training.trainer.step(index)
    recorded = sum(op.seconds for op in training.trainer.last_operations)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        training.trainer.step(3)
    kernels = sum(event.device_time for event in profiled.events()) * 1e-6
    note(recorded_ms=1e3 * recorded, profiler_ms=1e3 * kernels)
    assert recorded == pytest.approx(kernels, rel=0.15)


@pytest.mark.parametrize("strategy", ["zero3", "megatron"])
def test_torchs_own_parallelism_trains_and_computes_most_of_the_time(alone, strategy, note):
    names = {"zero3": ("shard", "replica"), "megatron": ("tensor", "data")}[strategy]
    spec, seq_len = (WIDE, 2048) if alone.type == "cuda" else (MODELS["gpt"], 64)
    request = RunRequest(
        model=spec,
        job=Job(1, 2, seq_len, dtype="bf16"),
        configuration=Configuration(Layout(dict.fromkeys(names, 1))),
        n_steps=3,
        strategy=strategy,
    )
    trainer = build_trainer(request, alone)
    losses = [trainer.step(0) for _ in range(3)]
    computed = sum(op.seconds for op in trainer.last_operations if op.name == COMPUTATION)
    note(strategy=strategy, step_ms=1e3 * losses[-1].seconds, computation_ms=1e3 * computed)
    assert losses[-1].loss < losses[0].loss
    assert computed == pytest.approx(losses[-1].seconds, rel=0.1)
