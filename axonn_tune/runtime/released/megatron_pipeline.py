"""One stage of a pipeline, trained in the order of Megatron-Core's own schedule (1F1B)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# The loss of each token, or what a stage before the last one hands on.
Forward = Callable[[torch.Tensor], torch.Tensor]


class OnDevice(TorchFunctionMode):
    """Makes the tensors on a device that Megatron-Core's pipelines make on CUDA, or move there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with another device."""
        if function is torch.Tensor.cuda:
            return args[0].to(self._device)
        named = dict(kwargs or {})
        if named.get("device") == "cuda":
            named["device"] = self._device
        return function(*args, **named)


def train_stage(
    model: Any, forward: Forward, texts: list[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Run forward and backward passes of all micro-batches; return the mean loss of the last stage.

    The loss of other stages is 0. The first sequence tells the shape of what stages hand on.
    """
    schedule = import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
    n_sequences, n_tokens = texts[0].shape

    def step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        return forward(next(batches)), lambda losses: (losses.mean(), {"loss": losses.mean()})

    with OnDevice(device):
        reports = schedule(
            forward_step_func=step,
            data_iterator=iter(texts),
            model=[model],
            num_microbatches=len(texts),
            seq_length=n_tokens - 1,
            micro_batch_size=n_sequences,
            forward_only=False,
        )
    losses = [report["loss"].detach() for report in reports]
    return torch.stack(losses).mean() if losses else torch.zeros((), device=device)
