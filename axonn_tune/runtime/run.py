"""Run a request: build the model on the grid, train some steps, report what was measured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.optimizer import Optimizer
from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer
from axonn_tune.runtime.ranks.memory import MemoryWatch
from axonn_tune.runtime.ranks.place import Place
from axonn_tune.runtime.ranks.session import joined, pick_device
from axonn_tune.runtime.released.packages import trainer_of
from axonn_tune.runtime.request import RunRequest
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.measurement import Measurement, Operation, Step

PROGRESS_SECONDS = 0.5  # least time between two lines of progress
# What some versions of ROCm give as the name of a GPU.
_NAMELESS = ("", "AMD Radeon Graphics")


class StepTrainer(Protocol):
    """Trains a model step by step, and keeps the operations of the last step."""

    last_operations: list[Operation]
    recording: bool

    @property
    def gemm_modes(self) -> Mapping[str, str]:
        """The mode that kernel tuning chose for each product, by name."""

    def step(self, index: int) -> Step:
        """Train on batch `index`."""


TrainerFactory: TypeAlias = Callable[[RunRequest, torch.device], StepTrainer]


def build_trainer(request: RunRequest, device: torch.device) -> StepTrainer:
    """Build the model with the strategy of the request, and return what trains it."""
    if request.engine.package:
        return trainer_of(request.engine)(request, device)
    if request.strategy == "zero3":
        from axonn_tune.runtime.native.fsdp2 import sharded_trainer

        return sharded_trainer(request, device)
    if request.strategy == "megatron":
        from axonn_tune.runtime.native.tensor_parallel import tensor_parallel_trainer

        return tensor_parallel_trainer(request, device)
    return _axonn_trainer(request, device)


def _axonn_trainer(request: RunRequest, device: torch.device) -> Trainer:
    job = request.job
    configuration = request.configuration
    engine = Engine(
        Mesh(configuration.layout, configuration.order, device),
        job.dtype,
        job.overlap,
        job.keep_gathered_weights,
        job.kernel_tuning,
        record=True,
    )
    model = GPT(
        engine,
        request.model,
        attention=job.attention,
        recompute=configuration.recompute,
        seed=request.seed,
    )
    return Trainer(
        model,
        Optimizer(model, engine, one_microstep=_has_one_microstep(request)),
        RandomTokens(request.model.vocab_size, job.seq_len, request.seed),
        job.global_batch,
        configuration.micro_batch,
        request.goldfish,
    )


def _has_one_microstep(request: RunRequest) -> bool:
    table = CandidateTable.single(request.configuration)
    return bool(table.n_microsteps(request.job.global_batch)[0] == 1)


def execute(
    request: RunRequest, place: Place, factory: TrainerFactory = build_trainer
) -> Measurement | None:
    """Join the other ranks of the job and train; rank 0 returns what it measured.

    Raises
    ------
    AxonnTuneError
        The input is bad, or a rank failed.
    """
    device = pick_device(request.device, place)
    with joined(place, device, request.timeout_seconds) as alive:
        return train(request, place, device, factory, alive)


def train(
    request: RunRequest,
    place: Place,
    device: torch.device,
    factory: TrainerFactory = build_trainer,
    alive: Callable[[], None] = lambda: None,
) -> Measurement | None:
    """Train on ranks that have joined, and call `alive` after each step.

    Rank 0 returns what it measured.
    """
    memory = MemoryWatch(device)
    trainer = factory(request, device)
    # On a GPU recording takes two events for each operation, and so time of the host.
    trainer.recording = device.type != "cuda"
    printer = _StepPrinter(request.n_steps, silent=request.quiet or place.rank != 0)
    steps = []
    for index in range(request.n_steps):
        memory.before_step(index)
        steps.append(trainer.step(index))
        alive()
        printer.show(index + 1, steps[-1])
    peaks = memory.of_all_ranks()
    recorded_step = _recorded_step(trainer, request.n_steps)
    if place.rank != 0:
        return None
    versions = software(device)
    if request.engine.package:
        versions[request.engine.package] = version(request.engine.package)
    return Measurement(
        layout=request.configuration.layout,
        order=request.configuration.order,
        micro_batch=request.configuration.micro_batch,
        recompute=request.configuration.recompute,
        steps=tuple(steps),
        last_step=tuple(trainer.last_operations),
        peak_memory_bytes=peaks.steady_bytes,
        memory_is_of_process=device.type != "cuda",
        first_peak_memory_bytes=peaks.first_bytes,
        held_memory_bytes=peaks.held_bytes,
        recorded_step=recorded_step,
        gemm_modes=trainer.gemm_modes,
        device_name=device_name(device),
        backend=dist.get_backend(),
        software=versions,
    )


def _recorded_step(trainer: StepTrainer, index: int) -> Step | None:
    """Record one more step if those that were timed were not recorded."""
    if trainer.recording:
        return None
    trainer.recording = True
    return trainer.step(index)


class _StepPrinter:
    """Prints lines about the steps on stderr, but not more than a few each second."""

    def __init__(self, n_steps: int, silent: bool) -> None:
        self._n_steps = n_steps
        self._silent = silent
        self._last_time = 0.0

    def show(self, n_done: int, step: Step) -> None:
        now = time.monotonic()
        is_due = now - self._last_time > PROGRESS_SECONDS or n_done == self._n_steps
        if self._silent or not is_due:
            return
        self._last_time = now
        print(
            f"step {n_done} of {self._n_steps}: loss {step.loss:.4f}, {step.seconds:.4f} s",
            file=sys.stderr,
            flush=True,
        )


def device_name(device: torch.device) -> str:
    """Return the GPU's name as its vendor gives it, or the number of CPU cores.

    Some versions of ROCm give no name, or one that all GPUs share; it is then that of the chip.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device).strip()
        if name not in _NAMELESS:
            return name
        return f"AMD {torch.cuda.get_device_properties(device).gcnArchName.partition(':')[0]}"
    return f"CPU, {os.cpu_count()} cores"


def software(device: torch.device) -> dict[str, str]:
    """Return the versions and settings of the software on which a measurement depends."""
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda or torch.version.hip)
        versions["tf32"] = "on" if _uses_tf32() else "off"
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return versions


def _uses_tf32() -> bool:
    """Tell whether fp32 products are computed in TF32.

    Torch has two settings for this, and refuses to tell the old one after the new one was set.
    """
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if precision != "none":
        return bool(precision == "tf32")
    try:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    except RuntimeError:
        return False
