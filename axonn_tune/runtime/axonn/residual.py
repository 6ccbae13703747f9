"""The residual stream: where a branch leaves it, and where it comes back."""

from __future__ import annotations

from typing import Any

import torch

from axonn_tune.runtime.axonn.engine import Engine


def fork(engine: Engine, stream: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream, for itself and for a branch; in the backward pass their gradients add."""
    forked: tuple[torch.Tensor, torch.Tensor] = _Fork.apply(stream, engine, name)
    return forked


def join(engine: Engine, stream: torch.Tensor, branch: torch.Tensor, name: str) -> torch.Tensor:
    """The sum of the stream and a branch."""
    with engine.recorder.memory_bound(f"{engine.chain}.{name}", 3.0 * stream.nbytes):
        return stream + branch


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stream: torch.Tensor, engine: Engine, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.engine, ctx.name = engine, name
        return stream.view_as(stream), stream.view_as(stream)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_stream, d_branch = gradients
        with ctx.engine.recorder.memory_bound(f"backward.{ctx.name}", 3.0 * d_stream.nbytes):
            return d_stream + d_branch, None, None
