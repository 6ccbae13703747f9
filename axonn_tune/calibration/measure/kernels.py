"""Time all kernels but products while the runtime trains a small model.

So each operation has the bytes, the FLOPs and the code of a real step, and it finds in the cache
what it finds there in a real step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TypeAlias

import torch

from axonn_tune.calibration.measure.timing import Sampling, Timing, time_work
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.mesh import Alone
from axonn_tune.runtime.axonn.optimizer import Optimizer
from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.measurement import HOST
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, MemoryBound, number
from axonn_tune.spec.points import AttentionPoint, MemoryPoint
from axonn_tune.strategies.axonn.axonn4d import AXONN

WARM_UP_STEPS = 2
# Within this time a host has issued a whole step of a model with one block.
LEAD_SECONDS = 20e-3

KernelPoint: TypeAlias = MemoryPoint | AttentionPoint


@dataclass(frozen=True)
class Workload:
    """A small model and the sequences on which one step trains it."""

    model: Model
    seq_len: int
    n_sequences: int
    dtype: str
    attention: str = "flash"

    def __str__(self) -> str:
        return (
            f"{self.model.name} on {self.n_sequences} x {self.seq_len} tokens, {self.dtype}, "
            f"{self.attention}"
        )


@dataclass(frozen=True)
class TimedStep:
    """Holds the times of each kernel and size, and the time of the host between two kernels."""

    points: Sequence[KernelPoint]
    gap_seconds: float


def time_step(
    workload: Workload, device: torch.device, n_steps: int, share_cores: bool
) -> TimedStep:
    """Train some steps on each rank alone; all ranks call it together.

    Parameters
    ----------
    n_steps : int
        Number of steps that are recorded, after the warm-up.
    share_cores : bool
        Whether several ranks compute on one core.
    """
    model = workload.model
    engine = Engine(Alone(device), workload.dtype, kernel_tuning=False, record=True)
    gpt = GPT(engine, model, attention=workload.attention)
    tokens = RandomTokens(model.vocab_size, workload.seq_len)
    batch = workload.n_sequences
    trainer = Trainer(gpt, Optimizer(gpt, engine), tokens, batch, batch)
    samples: dict[KernelPoint, list[float]] = defaultdict(list)
    points = points_by_name(workload)
    gaps: list[float] = []
    for index in range(WARM_UP_STEPS + n_steps):
        step = trainer.step(index)
        if index < WARM_UP_STEPS:
            continue
        gaps.append(step.exposed_seconds.get(HOST, 0.0) / len(trainer.last_operations))
        if device.type == "cuda":
            _step_behind_host(trainer, engine.recorder, index)
        for operation in trainer.last_operations:
            if operation.name in points:
                samples[points[operation.name]].append(operation.seconds)
    dilation = _dilation(samples.values()) if share_cores else 1.0
    timed = [_timed(point, seconds, dilation) for point, seconds in samples.items()]
    return TimedStep(timed, fmean(gaps))


def _step_behind_host(trainer: Trainer, recorder: Recorder, index: int) -> None:
    """Train one more step, in which no kernel waits for its launch."""
    recorder.lead_seconds = LEAD_SECONDS
    trainer.step(index)
    recorder.lead_seconds = 0.0


def _dilation(samples: Collection[Sequence[float]]) -> float:
    """Return the elapsed time over that of undisturbed kernels.

    A core that ranks share is taken away for several milliseconds now and then; that makes few
    kernels much longer, by chance, and is spread over all of them alike.
    """
    undisturbed = sum(median(seconds) * len(seconds) for seconds in samples)
    return sum(map(sum, samples)) / undisturbed


def _timed(point: KernelPoint, samples: Sequence[float], dilation: float) -> KernelPoint:
    timing = Timing.from_samples(samples)
    return replace(point, seconds=timing.seconds * dilation, spread_fraction=timing.spread_fraction)


def time_copy(nbytes: int, device: torch.device, sampling: Sampling) -> Timing:
    """Time a plain copy that reads and writes `nbytes` in all."""
    source = torch.randn(nbytes // 8, device=device)
    target = torch.randn(nbytes // 8, device=device)
    return time_work(lambda: target.copy_(source), device, sampling)


def time_strided(nbytes: int, device: torch.device, sampling: Sampling) -> Timing:
    """Time a product of rows in bf16 with one row, which reads and writes `nbytes` in all."""
    n_columns = 4096
    rows = torch.randn(nbytes // (4 * n_columns), n_columns, dtype=torch.bfloat16, device=device)
    one_row = torch.randn(n_columns, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(rows)
    return time_work(lambda: torch.mul(rows, one_row, out=target), device, sampling)


def _job(workload: Workload) -> Job:
    return Job(
        n_gpus=1,
        global_batch=workload.n_sequences,
        seq_len=workload.seq_len,
        dtype=workload.dtype,
        attention=workload.attention,
    )


def points_by_name(workload: Workload) -> dict[str, KernelPoint]:
    """Return a point for each operation of the step, by name; its time is still a placeholder."""
    alone = Configuration(grid_layout(1, 1, 1, 1), micro_batch=workload.n_sequences)
    plan = AXONN.plan(workload.model, _job(workload), CandidateTable.single(alone))
    points: dict[str, KernelPoint] = {}
    for phase in plan.phases:
        for op in phase.operations:
            if isinstance(op, MemoryBound) and (nbytes := number(op.nbytes)) > 0:
                points[op.name] = MemoryPoint(op.kernel, workload.dtype, int(nbytes), 1.0)
            elif isinstance(op, Attention):
                points[op.name] = AttentionPoint(
                    n_sequences=int(number(op.n_sequences)),
                    n_heads=int(number(op.n_heads)),
                    seq_len=int(number(op.seq_len)),
                    head_dim=op.head_dim,
                    backward=op.backward,
                    fused=op.fused,
                    dtype=workload.dtype,
                    seconds=1.0,
                )
    return points
