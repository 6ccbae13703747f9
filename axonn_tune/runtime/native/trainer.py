"""Trains a plain model with torch's own parallelism, and measures its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from axonn_tune.runtime.axonn.gemm import synchronize
from axonn_tune.runtime.axonn.trainer import RandomTokens, seconds_by_name
from axonn_tune.runtime.ranks.recorder import Recorder, Work
from axonn_tune.spec.measurement import COMPUTATION, Operation, Step, exposed_seconds
from axonn_tune.spec.plan import COMPUTE

LR, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0


class Standstills:
    """When the host waited for a collective, which on a CPU is when nothing was computed."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def wait(self, work: Work) -> None:
        """Wait, and note how long."""
        start = time.perf_counter()
        work.wait()
        self.spans.append((start, time.perf_counter()))


@dataclass(frozen=True)
class Share:
    """Of the global batch: how many ranks share it, and which part this rank works on."""

    n_shares: int
    index: int


class TorchTrainer:
    """Trains a model that torch has made parallel.

    Parameters
    ----------
    model : Module
        Tokens to logits.
    recorder, standstills
        Of the model's collectives, as far as they are recorded.
    before_microstep : callable
        Told whether the micro-step is the last one.
    after_microsteps : callable
        Does what is left before the gradients are clipped.
    loss_context : callable
        Makes a context for the loss and its backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: RandomTokens,
        recorder: Recorder,
        standstills: Standstills,
        share: Share,
        device: torch.device,
        global_batch: int,
        micro_batch: int,
        before_microstep: Callable[[bool], None] = lambda is_last: None,
        after_microsteps: Callable[[], None] = lambda: None,
        loss_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model, self._batches, self._recorder = model, batches, recorder
        self._standstills = standstills
        self._share, self._device, self._micro_batch = share, device, micro_batch
        self._n_microsteps = global_batch // (share.n_shares * micro_batch)
        self._before_microstep, self._after = before_microstep, after_microsteps
        self._loss_context = loss_context
        self._groups = _grouped(model)
        decays = [WEIGHT_DECAY if group[0].dim() > 1 else 0.0 for group in self._groups]
        groups = [
            {"params": group, "weight_decay": decay}
            for group, decay in zip(self._groups, decays, strict=True)
        ]
        self._adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        self.last_operations: list[Operation] = []

    def step(self, index: int) -> Step:
        """Train on batch `index`; the mean loss of all ranks is returned."""
        texts = [self._text(index, i) for i in range(self._n_microsteps)]
        synchronize(self._device)
        start = time.perf_counter()
        self._recorder.start_step()
        self._standstills.spans.clear()
        total = torch.zeros((), device=self._device)
        for number, text in enumerate(texts, 1):
            self._before_microstep(number == self._n_microsteps)
            logits = self._model(text[:, :-1])
            with self._loss_context():
                loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
                loss = loss / self._n_microsteps
                loss.backward()
            total += whole(loss.detach())
        self._after()
        norm = self._clip()
        self._adamw.step()
        self._adamw.zero_grad()
        synchronize(self._device)
        seconds = time.perf_counter() - start
        waits = [(a - start, b - start) for a, b in self._standstills.spans]
        computation = _between(waits, seconds)
        operations = [*self._recorder.take_step(), *computation]
        self.last_operations = sorted(operations, key=lambda op: op.start_seconds)
        dist.all_reduce(total)
        total /= dist.get_world_size()
        return Step(
            seconds,
            total.item(),
            norm.item(),
            seconds_by_name(self.last_operations),
            exposed_seconds(self.last_operations, seconds),
        )

    def _clip(self) -> torch.Tensor:
        """Clip the whole gradient; its norm."""
        norms = [
            whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
            for group in self._groups
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for group in self._groups:
            nn.utils.clip_grads_with_norm_(group, CLIP_NORM, norm)
        return norm

    def _text(self, step: int, microstep: int) -> torch.Tensor:
        first = (microstep * self._share.n_shares + self._share.index) * self._micro_batch
        return self._batches.sequences(step, first, self._micro_batch, self._device)


def _grouped(model: nn.Module) -> list[list[nn.Parameter]]:
    """Matrices and vectors, each spread over ranks or not: of one kind, as torch's kernels want."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = (parameter.dim() > 1, isinstance(parameter, DTensor))
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def whole(value: torch.Tensor) -> torch.Tensor:
    """A number that may be spread over ranks."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _between(waits: list[tuple[float, float]], seconds: float) -> list[Operation]:
    """Computation: all the time of a step but those spans."""
    computation, free_from = [], 0.0
    for start, end in [*sorted(waits), (seconds, seconds)]:
        if start > free_from:
            computation.append(
                Operation(COMPUTATION, COMPUTE, COMPUTATION, 0.0, 0.0, free_from, start)
            )
        free_from = max(free_from, end)
    return computation
