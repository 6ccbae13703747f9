"""The training loop: micro-steps, the optimizer's step, their time and their operations."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Protocol

import torch
import torch.distributed as dist

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.gemm import synchronize
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.hashing import mix
from axonn_tune.runtime.axonn.loss import IGNORED, goldfish_targets
from axonn_tune.runtime.axonn.optimizer import Optimizer
from axonn_tune.spec.measurement import Operation, Step, exposed_seconds


class Batches(Protocol):
    """A source of text."""

    def sequences(self, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Sequences `first` to `first + count` of a step's batch.

        Returns
        -------
        int64, shape (count, seq_len + 1)
            Each token but the first is the target of the one before it.
        """


class RandomTokens:
    """Made-up text; a sequence depends on its place and the seed only, not on the grid."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0) -> None:
        self._vocab_size, self._seq_len, self._seed = vocab_size, seq_len, seed

    def sequences(self, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
        """As `Batches.sequences`."""
        rows = torch.arange(first, first + count, device=device).unsqueeze(1)
        columns = torch.arange(self._seq_len + 1, device=device)
        place = mix(mix(rows + (step << 32)) + columns)
        return mix(place + self._seed).remainder(self._vocab_size)


class Trainer:
    """Trains a model on one rank, in step with all others.

    Parameters
    ----------
    model : GPT
    optimizer : Optimizer
    batches : Batches
    global_batch : int
        Sequences of one optimizer step, over all ranks.
    micro_batch : int
        Sequences that one rank works on at once.
    goldfish : int, optional
        Drop one in so many tokens from the loss; see `goldfish_targets`.

    Raises
    ------
    InputError
        Micro-batches that do not make the global batch.
    """

    def __init__(
        self,
        model: GPT,
        optimizer: Optimizer,
        batches: Batches,
        global_batch: int,
        micro_batch: int = 1,
        goldfish: int | None = None,
    ) -> None:
        self._engine, self._mesh = model.engine, model.engine.mesh
        at_once = self._mesh.size("z") * self._mesh.size("data") * micro_batch
        if global_batch % at_once:
            raise InputError(
                f"global batch is {global_batch} sequences; allowed: a multiple of {at_once}, "
                "G_z * G_data * micro-batch"
            )
        self._model, self._optimizer, self._batches = model, optimizer, batches
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._n_microsteps, self._goldfish = global_batch // at_once, goldfish
        self.last_operations: list[Operation] = []

    def step(self, index: int) -> Step:
        """Train on batch `index`; the losses of all ranks make the one that is returned."""
        device, recorder = self._mesh.device, self._engine.recorder
        batches = [self._micro_batches(index, i) for i in range(self._n_microsteps)]
        synchronize(device)
        start = time.perf_counter()
        recorder.start_step()
        total = torch.zeros((), device=device)
        for tokens, targets in batches:
            n_counted = float(self._global_batch * tokens.shape[1])
            loss = self._model.loss(tokens, targets, n_counted)
            loss.backward()
            total += loss.detach()
        scale = None if self._goldfish is None else self._counted_scale(batches)
        norm = self._optimizer.step(scale)
        synchronize(device)
        seconds = time.perf_counter() - start
        self.last_operations = recorder.take_step()
        if scale is not None:
            total *= scale
        # Along X and Y all ranks have the same loss.
        dist.all_reduce(total)
        total /= self._mesh.size("x") * self._mesh.size("y")
        return Step(
            seconds,
            total.item(),
            norm.item(),
            seconds_by_name(self.last_operations),
            exposed_seconds(self.last_operations, seconds),
        )

    def _micro_batches(self, step: int, microstep: int) -> tuple[torch.Tensor, torch.Tensor]:
        n_at_once = self._mesh.size("z") * self._mesh.size("data")
        first = (microstep * n_at_once + self._mesh.batch_index) * self._micro_batch
        text = self._batches.sequences(step, first, self._micro_batch, self._mesh.device)
        tokens, targets = text[:, :-1], text[:, 1:]
        if self._goldfish is not None:
            targets = goldfish_targets(tokens, targets, self._goldfish)
        return tokens, targets

    def _counted_scale(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """All tokens over those that count, on all ranks."""
        n_all = torch.tensor(float(sum(t.numel() for _, t in batches)), device=self._mesh.device)
        n_counted = sum(((t != IGNORED).sum() for _, t in batches), torch.zeros_like(n_all))
        counts = torch.stack((n_all, n_counted))
        for axis in ("z", "data"):
            dist.all_reduce(counts, group=self._mesh.group(axis))
        return counts[0] / counts[1].clamp(min=1.0)


def seconds_by_name(operations: list[Operation]) -> dict[str, float]:
    """Sum of the operations of each name."""
    seconds: dict[str, float] = defaultdict(float)
    for operation in operations:
        seconds[operation.name] += operation.seconds
    return dict(seconds)
