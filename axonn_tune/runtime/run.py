"""One run: build the model on the grid, train some steps, report what was measured."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.engine import DTYPES, Engine
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.optimizer import Optimizer
from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer
from axonn_tune.runtime.ranks.session import DEVICES, Place, joined, peak_memory_bytes, pick_device
from axonn_tune.spec.checks import require_choice, require_count
from axonn_tune.spec.grid import AnyGrid, Grid
from axonn_tune.spec.job import Job
from axonn_tune.spec.measurement import Measurement, Operation, Step
from axonn_tune.spec.model import RECOMPUTES, Model

PROGRESS_SECONDS = 0.5  # between two lines of progress


@dataclass(frozen=True)
class Run:
    """What to run.

    timeout_seconds: how long a collective may take before the run counts as hung.
    """

    model: Model
    job: Job
    grid: AnyGrid
    order: str
    micro_batch: int
    recompute: str
    n_steps: int
    device: str = "auto"
    seed: int = 0
    goldfish: int | None = None
    timeout_seconds: float = 300.0
    quiet: bool = False
    strategy: str = "axonn"

    def __post_init__(self) -> None:
        owner, model, seq_len = "run", self.model, self.job.seq_len
        require_choice(owner, "dtype", self.job.dtype, DTYPES)
        require_choice(owner, "device", self.device, DEVICES)
        require_choice(owner, "recompute", self.recompute, RECOMPUTES)
        require_choice(owner, "strategy", self.strategy, RUNNABLE)
        if self.job.dropout:
            raise InputError("run: dropout is not executed; allowed: a job without it")
        if self.strategy != "axonn":
            self._check_torch()
        if self.goldfish is not None:
            require_count(owner, "goldfish", self.goldfish, least=2)
        if model.position == "learned" and seq_len > model.seq_len:
            raise InputError(
                f"{owner}: seq_len is {seq_len}; allowed: at most {model.seq_len}, the learned "
                f"positions of model '{model.name}'"
            )

    def _check_torch(self) -> None:
        """What torch's own parallelism does not do here."""
        if self.recompute == "selective":
            raise InputError(
                f"run: recompute is 'selective'; allowed with {self.strategy}: none, full"
            )
        if self.model.parallel_block:
            raise InputError(f"run: {self.strategy} does not run models with parallel blocks")
        if self.goldfish is not None:
            raise InputError(f"run: goldfish is of axonn; {self.strategy} does not have it")


# Strategies that the bundled runtime executes: its own, and two of torch's.
RUNNABLE = ("axonn", "zero3", "megatron")


def execute(run: Run, place: Place) -> Measurement | None:
    """Run on this rank, together with all others; rank 0 returns what it measured.

    Raises
    ------
    AxonnTuneError
        Bad input, or a failure of any rank.
    """
    device = pick_device(run.device, place)
    with joined(place, device, run.timeout_seconds):
        return train(run, place, device)


def train(run: Run, place: Place, device: torch.device) -> Measurement | None:
    """As `execute`, for ranks that have joined."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trainer, modes = _trainer(run, device)
    progress = _Progress(run.n_steps, silent=run.quiet or place.rank != 0)
    steps = []
    for index in range(run.n_steps):
        steps.append(trainer.step(index))
        progress.show(index + 1, steps[-1])
    peak = torch.tensor(peak_memory_bytes(device), dtype=torch.float64, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if place.rank != 0:
        return None
    return Measurement(
        grid=run.grid,
        order=run.order,
        micro_batch=run.micro_batch,
        recompute=run.recompute,
        steps=tuple(steps),
        last_step=tuple(trainer.last_operations),
        peak_memory_bytes=peak.item(),
        memory_is_of_process=device.type != "cuda",
        gemm_modes=modes,
        device_name=device_name(device),
        backend=dist.get_backend(),
        software=software(device),
    )


class _Steps(Protocol):
    """Trains step by step."""

    last_operations: list[Operation]

    def step(self, index: int) -> Step: ...


def _trainer(run: Run, device: torch.device) -> tuple[_Steps, dict[str, str]]:
    """What trains the model with the run's strategy, and the modes that products will have."""
    if run.strategy != "axonn":
        from axonn_tune.runtime.native.fsdp2 import sharded_trainer
        from axonn_tune.runtime.native.tensor_parallel import tensor_parallel_trainer

        make = sharded_trainer if run.strategy == "zero3" else tensor_parallel_trainer
        arguments = (run.model, run.job, run.grid, run.micro_batch, run.recompute, device, run.seed)
        return make(*arguments), {}
    assert isinstance(run.grid, Grid)
    job, mesh = run.job, Mesh(run.grid, run.order, device)
    engine = Engine(
        mesh, job.dtype, job.overlap, job.keep_gathered_weights, job.kernel_tuning, record=True
    )
    model = GPT(engine, run.model, attention=job.attention, recompute=run.recompute, seed=run.seed)
    batches = RandomTokens(run.model.vocab_size, job.seq_len, run.seed)
    optimizer = Optimizer(model, engine)
    trainer = Trainer(model, optimizer, batches, job.global_batch, run.micro_batch, run.goldfish)
    return trainer, engine.gemms.modes


class _Progress:
    """Lines on stderr, not more than a few each second."""

    def __init__(self, n_steps: int, silent: bool) -> None:
        self._n_steps, self._silent, self._last = n_steps, silent, 0.0

    def show(self, done: int, step: Step) -> None:
        now = time.monotonic()
        is_due = now - self._last > PROGRESS_SECONDS or done == self._n_steps
        if self._silent or not is_due:
            return
        self._last = now
        print(
            f"step {done} of {self._n_steps}: loss {step.loss:.4f}, {step.seconds:.4f} s",
            file=sys.stderr,
            flush=True,
        )


def device_name(device: torch.device) -> str:
    """The GPU's name as its vendor gives it, or the number of CPU cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores"


def software(device: torch.device) -> dict[str, str]:
    """Versions of what a measurement depends on."""
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda or torch.version.hip)
        versions["tf32"] = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return versions
