"""Train a model that torch has made parallel, and measure the steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from axonn_tune.runtime.axonn.gemm import synchronize
from axonn_tune.runtime.axonn.optimizer import BETAS, CLIP_NORM, LR, WEIGHT_DECAY
from axonn_tune.runtime.axonn.trainer import RandomTokens, seconds_by_name
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.runtime.request import RunRequest
from axonn_tune.spec.measurement import Operation, Step, exposed_seconds


@dataclass(frozen=True)
class ParallelModel:
    """A model that torch has made parallel, and what its training must do around each pass.

    Attributes
    ----------
    model
        Maps tokens, shape (b, s), to logits, shape (b, s, v).
    recorder
        Records the model's collectives.
    n_shares, share
        The number of shares of the global batch, and the one on which this rank works.
    before_microstep
        Called before each micro-step, with whether it is the last one of the step.
    after_microsteps
        Called with the gradients of the step before they are clipped.
    loss_context
        Makes the context for the loss and its backward pass.
    backward_ends_with_wait
        Whether the end of a backward pass lets computation wait for reductions on other streams.
    """

    model: nn.Module
    recorder: WaitRecorder
    n_shares: int
    share: int
    before_microstep: Callable[[bool], None] = lambda is_last: None
    after_microsteps: Callable[[list[torch.Tensor]], None] = lambda gradients: None
    loss_context: Callable[[], AbstractContextManager[None]] = nullcontext
    backward_ends_with_wait: bool = False


class RecordedTrainer(ABC):
    """Trains in step with all other ranks, and measures the steps.

    Attributes
    ----------
    last_operations : list of Operation
        The collectives and the computation of the last step.
    gemm_modes : dict
        Empty, since torch chooses how it multiplies.

    Parameters
    ----------
    n_shares, share : int
        The number of shares of the global batch, and the one on which this rank works.
    """

    def __init__(
        self,
        recorder: WaitRecorder,
        request: RunRequest,
        device: torch.device,
        n_shares: int,
        share: int,
    ) -> None:
        job = request.job
        micro_batch = request.configuration.micro_batch
        self._recorder = recorder
        self._device = device
        self._n_shares = n_shares
        self._share = share
        self._batches = RandomTokens(request.model.vocab_size, job.seq_len, request.seed)
        self._micro_batch = micro_batch
        self._n_microsteps = job.global_batch // (n_shares * micro_batch)
        self.last_operations: list[Operation] = []
        self.gemm_modes: dict[str, str] = {}

    @property
    def recording(self) -> bool:
        """Whether steps are recorded, which takes time itself."""
        return self._recorder.active

    @recording.setter
    def recording(self, wanted: bool) -> None:
        self._recorder.active = wanted

    @abstractmethod
    def train(self, texts: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Train on the micro-steps of this rank's share of a batch, each of shape (b, s + 1).

        Returns
        -------
        tuple of Tensor and float
            The mean of the losses, and the norm of all gradients.
        """

    def step(self, index: int) -> Step:
        """Train on batch `index`; the loss that is returned is the mean over all ranks."""
        recorder = self._recorder
        texts = [self._text(index, i) for i in range(self._n_microsteps)]
        synchronize(self._device)
        recorder.start_step()
        start = time.perf_counter()
        loss, norm = self.train(texts)
        synchronize(self._device)
        seconds = time.perf_counter() - start
        self.last_operations = recorder.take_step(seconds)
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        return Step(
            seconds,
            loss.item(),
            norm,
            seconds_by_name(self.last_operations),
            exposed_seconds(self.last_operations, seconds),
        )

    def _text(self, step: int, microstep: int) -> torch.Tensor:
        """Return the sequences of one micro-step on this rank, shape (b, s + 1)."""
        n_before = microstep * self._n_shares + self._share
        first = n_before * self._micro_batch
        return self._batches.sequences(step, first, self._micro_batch, self._device)


class TorchTrainer(RecordedTrainer):
    """Trains a model that torch has made parallel."""

    def __init__(self, parallel: ParallelModel, request: RunRequest, device: torch.device) -> None:
        super().__init__(parallel.recorder, request, device, parallel.n_shares, parallel.share)
        self._parallel = parallel
        self._masters = MasterWeights(parallel.model)
        self._groups = _grouped(self._masters.weights)
        self._adamw = adamw(self._groups)

    def train(self, texts: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Train on the micro-steps of this rank's share; return their mean loss and the norm."""
        parallel = self._parallel
        total = torch.zeros((), device=self._device)
        for number, text in enumerate(texts, 1):
            parallel.before_microstep(number == len(texts))
            with parallel.loss_context():
                loss = self._loss(text, len(texts))
                self._backward(loss)
            self._masters.take_gradients()
            total += _whole(loss.detach())
        parallel.after_microsteps(self._masters.gradients())
        norm = self._clip()
        self._adamw.step()
        self._adamw.zero_grad()
        self._masters.give_back()
        return total, norm.item()

    def _backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients; where they are reduced at the end, computation waits there."""
        if not (self._parallel.backward_ends_with_wait and self._recorder.active):
            loss.backward()
            return
        self._recorder.wait_ends_backward(loss)
        loss.backward()
        self._recorder.end_wait()

    def _loss(self, text: torch.Tensor, n_microsteps: int) -> torch.Tensor:
        """Return a micro-step's share of the loss; the logits are not held any longer."""
        logits = self._parallel.model(text[:, :-1])
        return mean_loss(logits, text) / n_microsteps

    def _clip(self) -> torch.Tensor:
        """Clip the whole gradient, and return its norm before that."""
        norms = [
            _whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
            for group in self._groups
        ]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for group in self._groups:
            nn.utils.clip_grads_with_norm_(group, CLIP_NORM, norm)
        return norm


class MasterWeights:
    """The weights of a model in fp32, which the optimizer updates.

    Weights that are in fp32 already are their own. The others have a copy, to whose gradient those
    of the micro-steps are added in fp32.

    Attributes
    ----------
    weights : list of Parameter
        The fp32 weights, in the order of the model's parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self.weights = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        pairs = zip(self._parameters, self.weights, strict=True)
        self._copies = [(p, master) for p, master in pairs if p is not master]

    def take_gradients(self) -> None:
        """Add the gradients of a micro-step to those of the step."""
        for parameter, master in self._copies:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the step."""
        return [weight.grad for weight in self.weights if weight.grad is not None]

    @torch.no_grad()
    def give_back(self) -> None:
        """Round the updated weights to those with which the model computes."""
        for parameter, master in self._copies:
            parameter.copy_(master)


def adamw(groups: Iterable[Sequence[nn.Parameter]]) -> torch.optim.AdamW:
    """Return AdamW of groups of parameters; matrices decay, and vectors do not."""
    decayed = [
        {"params": group, "weight_decay": WEIGHT_DECAY if group[0].dim() > 1 else 0.0}
        for group in groups
    ]
    return torch.optim.AdamW(decayed, lr=LR, betas=BETAS, fused=True)


def mean_loss(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits (b, s, v) at the tokens of a text (b, s + 1)."""
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def _grouped(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters so that torch's kernels can work on each group at once.

    Matrices are kept apart from vectors, and tensors that are spread over ranks from others.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.dim() > 1, isinstance(parameter, DTensor))
        groups.setdefault(key, []).append(parameter)
    return list(groups.values())


def _whole(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor that may be spread over ranks as a whole one."""
    return value.full_tensor() if isinstance(value, DTensor) else value
