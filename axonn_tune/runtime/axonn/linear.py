"""The 4D linear layer (Singh et al., arXiv 2305.13525, algorithm 1), as one autograd function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.boxes import BlockLayout
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.layer import Layer
from axonn_tune.runtime.axonn.weights import Matrix, Vector
from axonn_tune.runtime.ranks.collectives import wait
from axonn_tune.spec import names

# How to form a layer's input again instead of keeping it: a function and its arguments.
Recipe = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]


class Linear4D(Layer):
    """A layer that computes ``output = input @ W + b`` on a grid.

    The input's last dimension is split over X, and its tokens over Z and data; the output's last
    dimension is split over Y. A transposed layer exchanges X and Y, so that its input lies on the
    ranks as the output of the layer before it does.

    Parameters
    ----------
    engine : Engine
    n_in, n_out : int
        Sizes k and n of the whole weight.
    name : str
        Name of the layer in the record.
    bias, transposed : bool
    n_out_parts : int
        Number of parts that lie side by side in the output, each of which is split over the
        output's axis (2 for a gated MLP).
    matrix : Matrix, optional
        A weight that another layer stores, with shape (n_out, n_in): a tied head.
    ends_block : bool
        Whether the output only joins the residual stream, so that a block that is formed again
        stops before this layer's product.

    Raises
    ------
    InputError
        The sizes do not divide over the grid.
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
        ends_block: bool = False,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.name = name
        self.input_axis, self.output_axis = ("y", "x") if transposed else ("x", "y")
        self.is_tied = matrix is not None
        self.ends_block = ends_block
        columns = (n_out_parts, n_out // n_out_parts)
        column_axes = (None, self.output_axis)
        self.matrix = matrix or self._matrix(n_in, n_out, columns, column_axes)
        self.bias = None
        if bias:
            self.bias = Vector(engine.mesh, BlockLayout(columns, column_axes), engine.dtype)

    def _matrix(
        self, n_in: int, n_out: int, columns: tuple[int, int], column_axes: tuple[None, str]
    ) -> Matrix:
        mesh = self.engine.mesh
        n_row_parts = mesh.size(self.input_axis)
        n_column_parts = mesh.size(self.output_axis)
        divides = n_in % n_row_parts == 0 and columns[1] % n_column_parts == 0
        if not divides or (n_in * n_out) % (n_row_parts * n_column_parts * mesh.size("z")):
            raise InputError(
                f"linear layer '{self.name}' of {n_in} x {n_out} does not divide over grid "
                f"{mesh.grid}; allowed: rows divisible by G_{self.input_axis}, columns by "
                f"G_{self.output_axis}, each block by G_z"
            )
        layout = BlockLayout((n_in, *columns), (self.input_axis, *column_axes), over_z=True)
        block_shape = (n_in // n_row_parts, n_out // n_column_parts)
        return Matrix(mesh, layout, block_shape, self.engine.dtype)

    def forward(self, input: torch.Tensor, recipe: Recipe | None = None) -> torch.Tensor:
        """Apply the layer.

        Parameters
        ----------
        input : shape (m, k / G_x), or (m, k / G_y) if the layer is transposed
        recipe : Recipe, optional
            How to form the input again in the backward pass, so that it need not be kept.

        Returns
        -------
        shape (m, n / G_y), or (m, n / G_x) if the layer is transposed
        """
        bias = None if self.bias is None else self.bias.shard
        backward_follows = torch.is_grad_enabled()
        return _Linear.apply(input, self.matrix.shard, bias, self, backward_follows, recipe)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        shard: torch.Tensor,
        bias: torch.Tensor | None,
        layer: Linear4D,
        backward_follows: bool,
        recipe: Recipe | None,
    ) -> torch.Tensor:
        engine, matrix = layer.engine, layer.matrix
        name = names.of_layer(engine.chain, layer.name)
        form_input, sources = recipe or (None, (input,))
        ctx.layer, ctx.form_input = layer, form_input
        ctx.save_for_backward(*sources)
        if layer.ends_block and engine.chain == names.RECOMPUTE:
            return input.new_empty(0)  # torch's checkpoint has the block's last input, and stops
        weight = engine.gathers.take(engine.chain, layer.name, matrix, backward_follows)
        # One rank of those whose results are summed adds the bias.
        adds_bias = bias is not None and engine.mesh.coordinate(layer.input_axis) == 0
        output = engine.gemms(
            names.gemm(name),
            input,
            weight,
            "NT" if layer.is_tied else "NN",
            bias=bias if adds_bias else None,
        )
        engine.gathers.give_back(layer.name, matrix, weight)
        wait(engine.collectives.all_reduce(names.all_reduce(name), output, layer.input_axis))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Linear4D = ctx.layer
        engine = layer.engine
        matrix = layer.matrix
        name = names.of_layer(names.BACKWARD, layer.name)
        # This comes first, since with full recomputation it runs the block's forward pass again.
        saved = ctx.saved_tensors
        (d_output,) = gradients
        d_input = None
        all_reduce = None
        if ctx.needs_input_grad[0]:
            weight = engine.gathers.take(names.BACKWARD, layer.name, matrix)
            mode = "NN" if layer.is_tied else "NT"
            d_input = engine.gemms(names.gemm_input(name), d_output, weight, mode)
            engine.gathers.give_back(layer.name, matrix, weight)
            all_reduce = engine.collectives.all_reduce(
                names.all_reduce(name), d_input, layer.output_axis
            )
            if not engine.overlap.oar:
                wait(all_reduce)
        input = ctx.form_input(*saved) if ctx.form_input else saved[0]
        a, b = (d_output, input) if layer.is_tied else (input, d_output)
        block = engine.scatters.buffer(matrix)
        engine.gemms(names.gemm_weight(name), a, b, "TN", out=block)
        d_bias = None
        if layer.bias is not None:
            with engine.recorder.memory_bound(names.bias(name), d_output.nbytes):
                d_bias = d_output.sum(0)
        engine.scatters.scatter(layer.name, matrix, block)
        if engine.overlap.oar:
            wait(all_reduce)
        return d_input, None, d_bias, None, None, None
