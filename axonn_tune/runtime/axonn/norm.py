"""Layer norm and RMS norm over a hidden dimension that X splits.

Where X splits it, the sums that a norm needs are all-reduced over X in fp32, in both passes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from axonn_tune.runtime.axonn.boxes import BlockLayout
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.layer import Layer
from axonn_tune.runtime.axonn.linear import Recipe
from axonn_tune.runtime.axonn.spans import Amount, recorded
from axonn_tune.runtime.axonn.weights import Vector
from axonn_tune.runtime.ranks.collectives import wait
from axonn_tune.spec import names


class Norm(Layer):
    """A layer norm, which has a gain and a shift, or an RMS norm, which has a gain.

    Parameters
    ----------
    engine : Engine
    hidden_size : int
        Size d of the whole hidden dimension.
    kind : str
        ``"layer"`` or ``"rms"``.
    name : str
        Name of the norm in the record.
    eps : float
        Added to the variance, so that no division by zero happens.
    """

    def __init__(
        self, engine: Engine, hidden_size: int, kind: str, name: str, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.engine = engine
        self.hidden_size = hidden_size
        self.kind = kind
        self.name = name
        self.eps = eps
        layout = BlockLayout((hidden_size,), ("x",))
        self.gain = Vector(engine.mesh, layout, engine.dtype)
        self.shift = Vector(engine.mesh, layout, engine.dtype) if kind == "layer" else None

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, Recipe]:
        """Return the norm of the input, and the recipe to form it again.

        Parameters
        ----------
        input : shape (t, d / G_x)

        Returns
        -------
        shape (t, d / G_x), and the recipe
        """
        gain, shift = self.gain.shard, None if self.shift is None else self.shift.shard
        if self.engine.mesh.size("x") == 1:
            amount = Amount(2.0 * input.nbytes, 3.0 * input.nbytes)
            parameters = (gain,) if shift is None else (gain, shift)
            output = recorded(self.engine, self.name, amount, self._whole, input, *parameters)
            return output, (self._whole_again, (input,))
        output, mean, rstd = _SplitNorm.apply(input, gain, shift, self)
        return output, (self._split_again, (input, mean, rstd))

    def _whole(
        self, input: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.kind == "layer":
            return F.layer_norm(input, gain.shape, gain, shift, self.eps)
        return F.rms_norm(input, gain.shape, gain, self.eps)

    def _whole_again(self, input: torch.Tensor) -> torch.Tensor:
        shift = None if self.shift is None else self.shift.shard
        name = names.of_layer(names.RECOMPUTE, self.name)
        with self.engine.recorder.memory_bound(name, 2.0 * input.nbytes):
            return self._whole(input, self.gain.shard, shift)

    def _split_again(
        self, input: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
    ) -> torch.Tensor:
        name = names.of_layer(names.RECOMPUTE, self.name)
        with self.engine.recorder.memory_bound(name, 2.0 * input.nbytes):
            return self.scaled(normalised(input, mean, rstd), input.dtype)

    def scaled(self, x_hat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Apply gain and shift to a normalised input, shape (t, d / G_x)."""
        scaled = x_hat * self.gain.shard
        if self.shift is not None:
            scaled += self.shift.shard
        return scaled.to(dtype)


def normalised(input: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Return ``(input - mean) * rstd`` in fp32; mean and rstd have the shape (t,)."""
    return (input.float() - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


class _SplitNorm(torch.autograd.Function):
    """The norm where X splits the hidden dimension; it also returns mean and rstd, shape (t,)."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        gain: torch.Tensor,
        shift: torch.Tensor | None,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        engine = norm.engine
        name = names.of_layer(engine.chain, norm.name)
        with engine.recorder.memory_bound(names.sums(name), input.nbytes):
            x = input.float()
            squares = x.square().sum(-1)
            sums = squares[None] if norm.kind == "rms" else torch.stack((squares, x.sum(-1)))
        wait(engine.collectives.all_reduce(names.all_reduce(name), sums, "x"))
        with engine.recorder.memory_bound(name, 2.0 * input.nbytes):
            means = sums / norm.hidden_size
            mean = torch.zeros_like(means[0]) if norm.kind == "rms" else means[1]
            rstd = torch.rsqrt(means[0] - mean.square() + norm.eps)
            output = norm.scaled(normalised(x, mean, rstd), input.dtype)
        ctx.norm = norm
        ctx.save_for_backward(input, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        return output, mean, rstd

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        norm: Norm = ctx.norm
        engine = norm.engine
        name = names.of_layer(names.BACKWARD, norm.name)
        input, mean, rstd = ctx.saved_tensors
        d_output = gradients[0]
        with engine.recorder.memory_bound(names.sums(name), 2.0 * input.nbytes):
            x_hat = normalised(input, mean, rstd)
            dy = d_output.float()
            d_gain = (dy * x_hat).sum(0).to(input.dtype)
            d_shift = dy.sum(0).to(input.dtype) if norm.shift is not None else None
            d_x_hat = dy * norm.gain.shard
            products = (d_x_hat * x_hat).sum(-1)
            sums = products[None]
            if norm.kind == "layer":
                sums = torch.stack((products, d_x_hat.sum(-1)))
        wait(engine.collectives.all_reduce(names.all_reduce(name), sums, "x"))
        with engine.recorder.memory_bound(name, 3.0 * input.nbytes):
            means = sums / norm.hidden_size
            d_input = d_x_hat - x_hat * means[0].unsqueeze(-1)
            if norm.kind == "layer":
                d_input -= means[1].unsqueeze(-1)
            d_input = (d_input * rstd.unsqueeze(-1)).to(input.dtype)
        return d_input, d_gain, d_shift, None
