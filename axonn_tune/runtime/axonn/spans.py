"""Record ordinary torch code together with its backward pass, which autograd derives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.spec import names


class Amount(NamedTuple):
    """How much an operation does in each pass.

    It counts the FLOPs of attention, or the bytes that a memory-bound kernel reads and writes.
    """

    forward: float
    backward: float
    kind: str = "memory_bound"


def recorded(
    engine: Engine,
    name: str,
    amount: Amount,
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """Return ``function(*inputs)``; its forward and its backward pass are recorded as `name`."""
    if not engine.recorder.active:
        return function(*inputs)
    with_gradient = torch.is_grad_enabled() and any(i.requires_grad for i in inputs)
    if with_gradient:
        backward = _BackwardSpan(engine, name, amount)
        inputs = _End.apply(backward, *inputs)
    with _kernel(engine, engine.chain, name, amount.kind, amount.forward):
        output = function(*inputs)
    return _Begin.apply(backward, output) if with_gradient else output


def _kernel(
    engine: Engine, chain: str, name: str, kind: str, count: float
) -> AbstractContextManager[None]:
    unit = "flops" if kind == "attention" else "nbytes"
    return engine.recorder.kernel(names.of_layer(chain, name), kind, **{unit: count})


class _BackwardSpan:
    """The part of the backward pass between the gradient of the output and those of the inputs."""

    def __init__(self, engine: Engine, name: str, amount: Amount) -> None:
        self._engine = engine
        self._name = name
        self._amount = amount
        self._span: Any = None

    def begin(self) -> None:
        amount = self._amount
        self._span = _kernel(self._engine, names.BACKWARD, self._name, amount.kind, amount.backward)
        self._span.__enter__()

    def end(self) -> None:
        self._span.__exit__()


class _Begin(torch.autograd.Function):
    """Stands behind the operation, so that its backward pass begins here."""

    @staticmethod
    def forward(ctx: Any, span: _BackwardSpan, output: torch.Tensor) -> torch.Tensor:
        ctx.span = span
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.span.begin()
        return None, *gradients


class _End(torch.autograd.Function):
    """Stands before the operation, so that its backward pass has ended here."""

    @staticmethod
    def forward(ctx: Any, span: _BackwardSpan, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.span = span
        return tuple(i.view_as(i) for i in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.span.end()
        return None, *gradients
