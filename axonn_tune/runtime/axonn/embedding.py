"""Token and position embeddings: Y splits the vocabulary, X the hidden dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axonn_tune.runtime.axonn.boxes import Layout
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.vector import Vector
from axonn_tune.runtime.axonn.weights import Matrix
from axonn_tune.runtime.ranks.collectives import wait
from axonn_tune.runtime.ranks.spans import Amount, recorded


class Embedding(nn.Module):
    """Rows of a vocabulary for tokens, plus a learned position if asked for.

    Parameters
    ----------
    engine : Engine
    vocab_size, hidden_size : int
        Of the whole; divisible by G_y and G_x.
    n_positions : int
        0 for none.
    """

    def __init__(
        self, engine: Engine, vocab_size: int, hidden_size: int, n_positions: int = 0
    ) -> None:
        super().__init__()
        self.engine, mesh = engine, engine.mesh
        layout = Layout((vocab_size, hidden_size), ("y", "x"), over_z=True)
        block_shape = (vocab_size // mesh.size("y"), hidden_size // mesh.size("x"))
        self.matrix = Matrix(mesh, layout, block_shape, engine.dtype)
        self.position = None
        if n_positions:
            layout = Layout((n_positions, hidden_size), (None, "x"))
            self.position = Vector(mesh, layout, engine.dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens (b, s); the result, (b, s, hidden / G_x), is replicated over Y."""
        follows = torch.is_grad_enabled()
        rows: torch.Tensor = _Lookup.apply(tokens, self.matrix.shard, self, follows)
        if self.position is None:
            return rows
        positions = self.position.shard.view(-1, rows.shape[-1])[: tokens.shape[1]]
        amount = Amount(2.0 * rows.nbytes, rows.nbytes)
        return recorded(self.engine, "embedding.position", amount, torch.add, rows, positions)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        shard: torch.Tensor,
        embedding: Embedding,
        backward_follows: bool,
    ) -> torch.Tensor:
        engine, matrix = embedding.engine, embedding.matrix
        weight = engine.gathers.take("forward", "embedding", matrix, backward_follows)
        n_rows, width = matrix.block_shape
        name = "forward.embedding"
        nbytes = 2.0 * tokens.numel() * width * shard.element_size()
        with engine.recorder.memory_bound(f"{name}.lookup", nbytes):
            local = tokens.reshape(-1) - engine.mesh.coordinate("y") * n_rows
            elsewhere = (local < 0) | (local >= n_rows)
            local = local.masked_fill_(elsewhere, 0)
            rows = weight.index_select(0, local).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        engine.gathers.give_back("embedding", matrix, weight)
        wait(engine.collectives.all_reduce(f"{name}.all_reduce", rows, "y"))
        ctx.embedding = embedding
        ctx.save_for_backward(local, elsewhere)
        return rows.view(*tokens.shape, width)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        embedding: Embedding = ctx.embedding
        engine, matrix = embedding.engine, embedding.matrix
        local, elsewhere = ctx.saved_tensors
        d_rows = gradients[0].reshape(len(local), -1)
        formed = engine.scatters.formed(matrix)
        block = engine.scatters.buffer(matrix) if formed is None else formed
        nbytes = 3.0 * d_rows.nbytes + (block.nbytes if formed is None else 0.0)
        with engine.recorder.memory_bound("backward.embedding.scatter_add", nbytes):
            if formed is None:
                block.zero_()
            block.index_add_(0, local, d_rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))
        engine.scatters.scatter("embedding", matrix, block)
        return None, None, None, None
