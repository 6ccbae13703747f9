"""A decoder-only transformer, or one stage of it, of AxoNN's linear layers.

A rank has the columns of the residual stream that belong to its place along X, AxoNN's column
group, and the heads, inner features and vocabulary of its place along Y, the row group. Z, the
depth group, splits every weight further, and with the data group it splits the batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from axonn import axonn as ax
from axonn.intra_layer import Linear
from axonn.intra_layer.communication import (
    Drop,
    ForwardAllReduce,
    ForwardGather_BackwardReduceScatter,
)
from layers import EPS, INITIAL_STD, Block, run_blocks
from torch import nn


def x_group() -> dist.ProcessGroup:
    """Return the ranks along X, which split the residual stream."""
    return ax.comm_handle.inner_intra_layer_parallel_group


def y_group() -> dist.ProcessGroup:
    """Return the ranks along Y, which split heads, inner features and vocabulary."""
    return ax.comm_handle.outer_intra_layer_parallel_group


def z_group() -> dist.ProcessGroup:
    """Return the ranks along Z, which split weights and batch."""
    return ax.comm_handle.depth_intra_layer_parallel_group


def spread(parameter: nn.Parameter, group: dist.ProcessGroup, summed_over_z: bool) -> nn.Parameter:
    """Tell AxoNN which ranks hold parts of a parameter, and whether Z must sum its gradient."""
    parameter.is_tensor_parallel = True
    parameter.process_group_for_norm_reduction = group
    parameter.needs_gradient_sync = summed_over_z
    return parameter


def linear(n_in: int, n_out: int, bias: bool, transpose: bool) -> Linear:
    """Return a linear layer; a transposed one exchanges X and Y."""
    layer = Linear(
        n_in,
        n_out,
        bias=bias,
        transpose=transpose,
        expert_mode=True,
        init_method=lambda weight: nn.init.normal_(weight, std=INITIAL_STD),
    )
    if layer.bias is not None:
        # AxoNN 0.2.0 does not ask for this sum itself (intra_layer/fully_connected.py).
        layer.bias.needs_gradient_sync = True
    return layer


class SumOverX(torch.autograd.Function):
    """The sum of parts that lie along X; every rank reads it, so that gradients are summed, too."""

    @staticmethod
    def forward(ctx, part: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        total = part.clone()
        dist.all_reduce(total, group=x_group())
        return total

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the gradients of all readers."""
        return SumOverX.forward(ctx, gradient)


class Norm(nn.Module):
    """Layer norm or RMS norm over a hidden dimension that X splits."""

    def __init__(self, settings: SimpleNamespace) -> None:
        super().__init__()
        self.size = settings.model.hidden_size
        width = self.size // dist.get_world_size(x_group())
        self.is_rms = settings.model.norm == "rms"
        self.gain = spread(nn.Parameter(torch.ones(width)), x_group(), True)
        if not self.is_rms:
            self.shift = spread(nn.Parameter(torch.zeros(width)), x_group(), True)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the norm of a part of the stream, shape (b, s, d / G_x)."""
        values = stream.float()
        if not self.is_rms:
            values = values - SumOverX.apply(values.sum(-1, keepdim=True)) / self.size
        square = SumOverX.apply(values.square().sum(-1, keepdim=True)) / self.size
        normed = values * torch.rsqrt(square + EPS) * self.gain
        return (normed if self.is_rms else normed + self.shift).to(stream.dtype)


class Embedding(nn.Module):
    """The rows of tokens; Y splits the vocabulary, X the columns, and Z the rest.

    The matrix is laid out as the weight of the head, so that both can share it.
    """

    def __init__(self, settings: SimpleNamespace, weight: nn.Parameter | None) -> None:
        super().__init__()
        model = settings.model
        self.n_rows = model.padded_vocab_size // dist.get_world_size(y_group())
        self.first_row = self.n_rows * dist.get_rank(y_group())
        self.weight = weight
        if weight is None:
            self.weight = linear(model.hidden_size, model.padded_vocab_size, False, False).weight
        self.position = None
        if model.position == "learned":
            torch.manual_seed(model.n_layers + 2)
            full = INITIAL_STD * torch.randn(settings.n_positions, model.hidden_size)
            part = Drop.apply(full, x_group()).contiguous()
            self.position = spread(nn.Parameter(part), x_group(), True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (b, s) to their rows, shape (b, s, d / G_x)."""
        matrix = ForwardGather_BackwardReduceScatter.apply(self.weight, z_group())
        matrix = matrix.view(self.n_rows, -1)
        local = tokens - self.first_row
        elsewhere = (local < 0) | (local >= self.n_rows)
        rows = F.embedding(local.masked_fill(elsewhere, 0), matrix)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        rows = ForwardAllReduce.apply(rows, y_group())
        return rows if self.position is None else rows + self.position[: tokens.shape[1]]


class Stage(nn.Module):
    """The blocks of one stage of a pipeline, with what the first and the last stage add.

    Each part draws its weights after a seed of its own, so that they do not depend on the layout.
    """

    def __init__(
        self, settings: SimpleNamespace, blocks: range, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        model = settings.model
        self._settings = settings
        self.is_first, self.is_last = is_first, is_last
        self.blocks = nn.ModuleList()
        for number in blocks:
            torch.manual_seed(number)
            self.blocks.append(Block(settings, lambda: Norm(settings), linear, reentrant=True))
        self.norm = self.head = self.embedding = None
        if self.is_last:
            self.norm = Norm(settings)
            torch.manual_seed(model.n_layers)
            self.head = linear(model.hidden_size, model.padded_vocab_size, False, False)
        if self.is_first:
            torch.manual_seed(model.n_layers + (0 if model.tied_embeddings else 1))
            is_shared_here = model.tied_embeddings and self.is_last
            self.embedding = Embedding(settings, self.head.weight if is_shared_here else None)
        # The ends of a pipeline may share a matrix, whose gradient is the sum over both of them.
        self.shared_by_ends = None
        if model.tied_embeddings and self.is_first != self.is_last:
            self.shared_by_ends = (self.head or self.embedding).weight

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Map tokens, or the stream of the stage before, to the stream or to logits."""
        stream = self.embedding(given) if self.is_first else given
        stream = run_blocks(self._settings, self.blocks, stream)
        return self.head(self.norm(stream)) if self.is_last else stream


def mean_loss_over_y(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits whose vocabulary Y splits, shape (b, s, v / G_y)."""
    group = y_group()
    values = logits.float()
    largest = values.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    sums = ForwardAllReduce.apply((values - largest.unsqueeze(-1)).exp().sum(-1), group)
    n_columns = values.shape[-1]
    local = targets - n_columns * dist.get_rank(group)
    elsewhere = (local < 0) | (local >= n_columns)
    here = values.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    of_targets = ForwardAllReduce.apply(here.masked_fill(elsewhere, 0.0), group)
    return (sums.log() + largest - of_targets).mean()
