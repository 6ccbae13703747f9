"""The MLP's activation: GELU, or SwiGLU of a gate and its values side by side."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.linear import Recipe
from axonn_tune.runtime.axonn.spans import Amount, recorded
from axonn_tune.spec import names

_NAME = "activation"


def activation(engine: Engine, input: torch.Tensor, gated: bool) -> tuple[torch.Tensor, Recipe]:
    """Return the activation of the first MLP layer's output, and the recipe to form it again.

    Parameters
    ----------
    input : shape (t, f / G_y), or with a gate (t, 2 f / G_y)

    Returns
    -------
    shape (t, f / G_y), and the recipe
    """
    function = _SwiGLU.apply if gated else _gelu
    output_bytes = input.nbytes / (2 if gated else 1)
    nbytes = input.nbytes + output_bytes
    amount = Amount(nbytes, 2.0 * input.nbytes + output_bytes)

    def again(input: torch.Tensor) -> torch.Tensor:
        with engine.recorder.memory_bound(names.of_layer(names.RECOMPUTE, _NAME), nbytes):
            return function(input)

    return recorded(engine, _NAME, amount, function, input), (again, (input,))


def _gelu(input: torch.Tensor) -> torch.Tensor:
    return F.gelu(input, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    """Forms ``silu(gate) * value`` (Shazeer, arXiv 2002.05202), and keeps nothing but its input."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        gate, value = input.chunk(2, dim=-1)
        return F.silu(gate).mul_(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (input,) = ctx.saved_tensors
        gate, value = input.chunk(2, dim=-1)
        d_input = torch.empty_like(input)
        d_gate, d_value = d_input.chunk(2, dim=-1)
        torch.mul(gradients[0], F.silu(gate), out=d_value)
        torch.ops.aten.silu_backward.grad_input(gradients[0] * value, gate, grad_input=d_gate)
        return d_input
