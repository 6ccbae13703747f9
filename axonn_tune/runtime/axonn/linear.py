"""The 4D linear layer (Singh et al., arXiv 2305.13525, algorithm 1), as one autograd function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.boxes import Layout
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.vector import Vector
from axonn_tune.runtime.axonn.weights import Matrix
from axonn_tune.runtime.ranks.collectives import wait

# How to form a layer's input again instead of keeping it: a function and what it is given.
Recipe = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


class Linear4D(nn.Module):
    """``output = input @ W + b`` on a grid.

    The input's last dimension is split over X and its tokens over Z and data; the output's
    last dimension is split over Y. A transposed layer exchanges X and Y, so that it takes
    what a layer before it left.

    Parameters
    ----------
    engine : Engine
    n_in, n_out : int
        Of the whole weight.
    name : str
        Prefix of its operations in the record.
    bias, transposed : bool
    n_out_parts : int
        The output consists of so many parts side by side, each split over the axis for
        itself (2 for a gated MLP).
    matrix : Matrix, optional
        A weight that another layer stores, as (n_out, n_in): a tied head.

    Raises
    ------
    InputError
        Sizes that do not divide over the grid.
    """

    def __init__(
        self,
        engine: Engine,
        n_in: int,
        n_out: int,
        name: str = "linear",
        *,
        bias: bool = True,
        transposed: bool = False,
        n_out_parts: int = 1,
        matrix: Matrix | None = None,
    ) -> None:
        super().__init__()
        self.engine, self.name = engine, name
        self.input_axis, self.output_axis = ("y", "x") if transposed else ("x", "y")
        self.is_tied = matrix is not None
        columns = (n_out_parts, n_out // n_out_parts)
        column_axes = (None, self.output_axis)
        self.matrix = matrix or self._matrix(n_in, n_out, columns, column_axes)
        self.bias = (
            Vector(engine.mesh, Layout(columns, column_axes), engine.dtype) if bias else None
        )

    def _matrix(
        self, n_in: int, n_out: int, columns: tuple[int, int], column_axes: tuple[None, str]
    ) -> Matrix:
        mesh = self.engine.mesh
        n_rows, n_columns, n_shards = (
            mesh.size(axis) for axis in (self.input_axis, self.output_axis, "z")
        )
        divides = n_in % n_rows == 0 and columns[1] % n_columns == 0
        if not divides or (n_in * n_out) % (n_rows * n_columns * n_shards):
            raise InputError(
                f"linear layer '{self.name}' of {n_in} x {n_out} does not divide over grid "
                f"{mesh.grid}; allowed: rows divisible by G_{self.input_axis}, columns by "
                f"G_{self.output_axis}, each block by G_z"
            )
        layout = Layout((n_in, *columns), (self.input_axis, *column_axes), over_z=True)
        block_shape = (n_in // n_rows, n_out // n_columns)
        return Matrix(mesh, layout, block_shape, self.engine.dtype)

    def forward(self, input: torch.Tensor, recipe: Recipe | None = None) -> torch.Tensor:
        """The layer's output; with a `recipe` the input is not kept but formed again."""
        function, sources = recipe or (None, ())
        bias = None if self.bias is None else self.bias.shard
        follows = torch.is_grad_enabled()
        output: torch.Tensor = _Linear.apply(
            input, self.matrix.shard, bias, self, follows, function, *sources
        )
        return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shard: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Linear4D,
        backward_follows: bool,
        recipe: Callable[..., torch.Tensor] | None,
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        engine, name = layer.engine, f"{layer.engine.chain}.{layer.name}"
        ctx.layer, ctx.recipe = layer, recipe
        ctx.save_for_backward(*(sources if recipe else (input,)))
        weight = engine.gathers.take(engine.chain, layer.name, layer.matrix, backward_follows)
        # One rank of those whose results are summed adds the bias.
        adds_bias = bias is not None and engine.mesh.coordinate(layer.input_axis) == 0
        output = engine.gemms(
            f"{name}.gemm",
            input.reshape(-1, input.shape[-1]),
            weight,
            "NT" if layer.is_tied else "NN",
            bias=bias if adds_bias else None,
        )
        engine.gathers.give_back(layer.name, layer.matrix, weight)
        wait(engine.collectives.all_reduce(f"{name}.all_reduce", output, layer.input_axis))
        return output.view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Linear4D = ctx.layer
        engine, name, matrix = layer.engine, f"backward.{layer.name}", layer.matrix
        saved = ctx.saved_tensors  # first, since with full recomputation this runs the block again
        (d_output,) = gradients
        d_output_mn = d_output.reshape(-1, d_output.shape[-1])
        d_input, reduced = None, None
        if ctx.needs_input_grad[0]:
            weight = engine.gathers.take("backward", layer.name, matrix)
            mode = "NN" if layer.is_tied else "NT"
            d_input = engine.gemms(f"{name}.gemm_input", d_output_mn, weight, mode)
            engine.gathers.give_back(layer.name, matrix, weight)
            reduced = engine.collectives.all_reduce(
                f"{name}.all_reduce", d_input, layer.output_axis
            )
            if not engine.overlap.oar:
                wait(reduced)
        input = ctx.recipe(*saved) if ctx.recipe else saved[0]
        input_mk = input.reshape(-1, input.shape[-1])
        a, b = (d_output_mn, input_mk) if layer.is_tied else (input_mk, d_output_mn)
        block = engine.scatters.buffer(matrix)
        engine.gemms(f"{name}.gemm_weight", a, b, "TN", out=block)
        d_bias = None
        if layer.bias is not None:
            with engine.recorder.memory_bound(f"{name}.bias", d_output_mn.nbytes):
                d_bias = d_output_mn.sum(0)
        engine.scatters.scatter(layer.name, matrix, block)
        if engine.overlap.oar:
            wait(reduced)
        if d_input is not None:
            d_input = d_input.view_as(input)
        return d_input, None, d_bias, *(None for _ in ctx.needs_input_grad[3:])
