"""A decoder-only transformer written for one device; FSDP2 or DeepSpeed shards it."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from layers import EPS, INITIAL_STD, Block, run_blocks
from torch import nn


class Linear(nn.Linear):
    """A linear layer with small initial weights."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=INITIAL_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with small initial weights."""

    def reset_parameters(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=INITIAL_STD)


class GPT(nn.Module):
    """A model with the sizes of the settings.

    `reentrant` is the kind of checkpoint with which blocks are recomputed.
    """

    def __init__(self, settings: SimpleNamespace, reentrant: bool = False) -> None:
        super().__init__()
        model = settings.model
        self._settings = settings
        self.embedding = Embedding(model.padded_vocab_size, model.hidden_size)
        self.position = None
        if model.position == "learned":
            self.position = Embedding(settings.n_positions, model.hidden_size)
        self.blocks = nn.ModuleList(
            Block(settings, self._norm, _linear, reentrant) for _ in range(model.n_layers)
        )
        self.norm = self._norm()
        self.head = Linear(model.hidden_size, model.padded_vocab_size, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight

    def _norm(self) -> nn.Module:
        model = self._settings.model
        make = nn.RMSNorm if model.norm == "rms" else nn.LayerNorm
        return make(model.hidden_size, eps=EPS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (b, s) to logits (b, s, v)."""
        stream = self.embedding(tokens)
        if self.position is not None:
            stream = stream + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        stream = run_blocks(self._settings, self.blocks, stream)
        return self.head(self.norm(stream))


def _linear(n_in: int, n_out: int, bias: bool, transpose: bool) -> Linear:
    return Linear(n_in, n_out, bias=bias)
