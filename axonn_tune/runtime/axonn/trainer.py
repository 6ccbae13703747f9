"""The training loop: micro-steps and the optimizer's step, timed operation by operation."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
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
        """Return sequences `first` to `first + count` of a step's batch.

        Returns
        -------
        int64, shape (count, s + 1)
            Each token but the first is the target of the one before it.
        """


class RandomTokens:
    """Made-up text, in which a sequence depends on its place and the seed but not on the grid."""

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._seq_len = seq_len
        self._seed = seed

    def sequences(self, step: int, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Return sequences of a step's batch, int64, shape (count, s + 1); see `Batches`."""
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
        Number of sequences in one optimizer step, over all ranks.
    micro_batch : int
        Number of sequences that one rank works on at once.
    goldfish : int, optional
        k for a loss that drops one in k tokens; see `goldfish_targets`.

    Attributes
    ----------
    last_operations : list of Operation
        The operations of the last step in the order of issue.

    Raises
    ------
    InputError
        The micro-batches of all ranks do not make up the global batch, or the optimizer does not
        add gradients of several micro-steps.
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
        self._engine = model.engine
        self._mesh = model.engine.mesh
        at_once = self._mesh.size("z") * self._mesh.size("data") * micro_batch
        if global_batch % at_once:
            raise InputError(
                f"global batch is {global_batch} sequences; allowed: a multiple of {at_once}, "
                "G_z * G_data * micro-batch"
            )
        if global_batch > at_once and not optimizer.sums.adds:
            raise InputError(
                f"a step has {global_batch // at_once} micro-steps; allowed with an optimizer that "
                "was made with one_microstep: 1"
            )
        self._model = model
        self._optimizer = optimizer
        self._batches = batches
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        self._n_microsteps = global_batch // at_once
        self._goldfish = goldfish
        self.last_operations: list[Operation] = []

    @property
    def recording(self) -> bool:
        """Whether steps are recorded operation by operation, which takes time itself."""
        return self._engine.recorder.active

    @recording.setter
    def recording(self, wanted: bool) -> None:
        self._engine.recorder.active = wanted

    @property
    def gemm_modes(self) -> Mapping[str, str]:
        """The mode of each product (NN, NT or TN), by name."""
        return self._engine.gemms.modes

    def step(self, index: int) -> Step:
        """Train on batch `index`; the loss that is returned is the mean over all ranks."""
        device = self._mesh.device
        recorder = self._engine.recorder
        batches = [self._micro_batch_of(index, i) for i in range(self._n_microsteps)]
        synchronize(device)
        start = time.perf_counter()
        recorder.start_step()
        total = torch.zeros((), device=device)
        for number, (tokens, targets) in enumerate(batches, start=1):
            if number == len(batches) and self._engine.overlap.grad_reduce:
                self._optimizer.sums.reduce_in_backward()
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

    def _micro_batch_of(self, step: int, microstep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets of one micro-step on this rank, shape (b, s) each."""
        n_at_once = self._mesh.size("z") * self._mesh.size("data")
        first = (microstep * n_at_once + self._mesh.batch_index) * self._micro_batch
        text = self._batches.sequences(step, first, self._micro_batch, self._mesh.device)
        tokens, targets = text[:, :-1], text[:, 1:]
        if self._goldfish is not None:
            targets = goldfish_targets(tokens, targets, self._goldfish)
        return tokens, targets

    def _counted_scale(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the number of all tokens over that of the tokens that count, on all ranks."""
        n_all = torch.tensor(float(sum(t.numel() for _, t in batches)), device=self._mesh.device)
        n_counted = sum(((t != IGNORED).sum() for _, t in batches), torch.zeros_like(n_all))
        counts = torch.stack((n_all, n_counted))
        for axis in ("z", "data"):
            dist.all_reduce(counts, group=self._mesh.group(axis))
        return counts[0] / counts[1].clamp(min=1.0)


def seconds_by_name(operations: list[Operation]) -> dict[str, float]:
    """Return the sum of the seconds of the operations of each name."""
    seconds: dict[str, float] = defaultdict(float)
    for operation in operations:
        seconds[operation.name] += operation.seconds
    return dict(seconds)
