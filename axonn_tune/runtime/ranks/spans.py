"""Records ordinary torch code and its backward pass, which autograd derives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from axonn_tune.runtime.axonn.engine import Engine


@dataclass(frozen=True)
class Amount:
    """What an operation does: FLOPs of attention, or bytes of a memory-bound kernel."""

    forward: float
    backward: float
    kind: str = "memory_bound"

    def as_counts(self, amount: float) -> dict[str, float]:
        """Arguments for `Recorder.kernel`."""
        return {"flops" if self.kind == "attention" else "nbytes": amount}


def recorded(
    engine: Engine,
    name: str,
    amount: Amount,
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """``function(*inputs)``; its forward and its backward pass are recorded under `name`."""
    with_gradient = torch.is_grad_enabled() and any(i.requires_grad for i in inputs)
    if with_gradient:
        backward = _BackwardSpan(engine, name, amount)
        inputs = _End.apply(backward, *inputs)
    counts = amount.as_counts(amount.forward)
    with engine.recorder.kernel(f"{engine.chain}.{name}", amount.kind, **counts):
        output = function(*inputs)
    return _Begin.apply(backward, output) if with_gradient else output


class _BackwardSpan:
    """The part of the backward pass between the two marks."""

    def __init__(self, engine: Engine, name: str, amount: Amount) -> None:
        self._engine, self._name, self._amount = engine, name, amount
        self._span: Any = None

    def begin(self) -> None:
        amount = self._amount
        counts = amount.as_counts(amount.backward)
        name = f"backward.{self._name}"
        self._span = self._engine.recorder.kernel(name, amount.kind, **counts)
        self._span.__enter__()

    def end(self) -> None:
        self._span.__exit__()


class _Begin(torch.autograd.Function):
    """Behind the operation: its backward pass starts here."""

    @staticmethod
    def forward(ctx: Any, span: _BackwardSpan, output: torch.Tensor) -> torch.Tensor:
        ctx.span = span
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.span.begin()
        return None, *gradients


class _End(torch.autograd.Function):
    """Before the operation: its backward pass has ended once all gradients are here."""

    @staticmethod
    def forward(ctx: Any, span: _BackwardSpan, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.span = span
        return tuple(i.view_as(i) for i in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.span.end()
        return None, *gradients
