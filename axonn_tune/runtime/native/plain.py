"""A decoder-only transformer written for one device, which torch's own parallelism splits.

Shapes use the letters of `axonn_tune.runtime.axonn`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from axonn_tune.runtime.axonn.attention import ROTARY_BASE
from axonn_tune.runtime.axonn.boxes import CHUNK, normal_deviates
from axonn_tune.runtime.axonn.gpt import INITIAL_STD
from axonn_tune.spec.model import Model


class PlainBlock(nn.Module):
    """Attention and MLP, each a branch of the residual stream that begins with a norm.

    The columns of `qkv` lie head by head, so that a tensor-parallel rank has whole heads.
    """

    def __init__(self, spec: Model, fused_attention: bool) -> None:
        super().__init__()
        self._spec = spec
        self._fused = fused_attention
        qkv, proj, up, down = spec.block_linears
        self.norm1 = _norm(spec)
        self.norm2 = _norm(spec)
        self.qkv = nn.Linear(qkv.n_in, qkv.n_out, bias=qkv.bias)
        self.proj = nn.Linear(proj.n_in, proj.n_out, bias=proj.bias)
        self.up = nn.Linear(up.n_in, up.n_out, bias=up.bias)
        self.down = nn.Linear(down.n_in, down.n_out, bias=down.bias)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Map the residual stream, shape (b, s, d), to the stream behind the block."""
        stream = stream + self.proj(self._attend(self.qkv(self.norm1(stream))))
        return stream + self.down(self._activate(self.up(self.norm2(stream))))

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        """Map queries, keys and values, shape (b, s, g * (q + 2) * e), to (b, s, h * e)."""
        spec = self._spec
        b, s, _ = qkv.shape
        n_queries = spec.n_heads // spec.n_kv_heads
        groups = qkv.view(b, s, -1, n_queries + 2, spec.head_dim)
        queries = groups[..., :n_queries, :].flatten(2, 3).transpose(1, 2)
        keys = groups[..., n_queries, :].transpose(1, 2)
        values = groups[..., n_queries + 1, :].transpose(1, 2)
        if spec.position == "rotary":
            queries, keys = _rotated(queries), _rotated(keys)
        allowed = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(allowed if self._fused else [SDPBackend.MATH]):
            heads = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=n_queries > 1
            )
        return heads.transpose(1, 2).flatten(2)

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._spec.gated_mlp:
            gate, value = hidden.unflatten(-1, (-1, 2)).unbind(-1)
            return F.silu(gate) * value
        return F.gelu(hidden, approximate="tanh")


def _norm(spec: Model) -> nn.Module:
    make = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
    return make(spec.hidden_size, eps=1e-5)


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + e/2) of each head by position * base^(-2i/e), shape (b, h, s, e)."""
    s, e = heads.shape[-2:]
    position = torch.arange(s, device=heads.device, dtype=torch.float32)
    pair = torch.arange(0, e, 2, device=heads.device, dtype=torch.float32)
    angle = torch.outer(position, ROTARY_BASE ** (-pair / e))
    cos = angle.cos().to(heads.dtype)
    sin = angle.sin().to(heads.dtype)
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class PlainGPT(nn.Module):
    """A model with the shape of `spec`; with `recompute` full, each block is checkpointed.

    Parameters
    ----------
    place : callable
        Takes each block as soon as it is built, and returns what runs in its place; so a block can
        be spread over ranks before the next one takes memory.
    reentrant : bool
        Whether checkpoints run the whole block again; others stop once the backward pass has all
        that it reads.
    """

    def __init__(
        self,
        spec: Model,
        attention: str,
        recompute: str,
        place: Callable[[PlainBlock], nn.Module] = lambda block: block,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self._recompute = recompute
        self._reentrant = reentrant
        self.embedding = nn.Embedding(spec.padded_vocab_size, spec.hidden_size)
        self.position: nn.Parameter | None = None
        if spec.position == "learned":
            self.position = nn.Parameter(torch.empty(spec.seq_len, spec.hidden_size))
        self.blocks = nn.ModuleList(
            place(PlainBlock(spec, attention == "flash")) for _ in range(spec.n_layers)
        )
        self.norm = _norm(spec)
        self.head = nn.Linear(spec.hidden_size, spec.padded_vocab_size, bias=False)
        self._is_tied = spec.tied_embeddings
        self.tie()

    def tie(self) -> None:
        """Let the head and the embedding share their weight, if the model does so."""
        if self._is_tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def initialise(self, seed: int) -> PlainGPT:
        """Draw random weights, the same on every layout, and return the model.

        A rank draws only what it stores of a parameter that is spread over ranks.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                _draw(parameter, name, seed)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (b, s) to logits (b, s, v)."""
        stream = self.embedding(tokens)
        if self.position is not None:
            stream = stream + self.position[: tokens.shape[1]]
        for block in self.blocks:
            if self._recompute == "full" and torch.is_grad_enabled():
                stream = checkpoint(block, stream, use_reentrant=self._reentrant)
            else:
                stream = block(stream)
        return self.head(self.norm(stream))


def _draw(matrix: torch.Tensor, name: str, seed: int) -> None:
    """Fill what this rank stores of a matrix with normal deviates, some rows at a time."""
    local = matrix.to_local() if isinstance(matrix, DTensor) else matrix
    rows = _stored_places(matrix, dim=0)
    columns = _stored_places(matrix, dim=1)
    n_at_once = max(CHUNK // max(len(columns), 1), 1)
    for part, places in zip(local.split(n_at_once), rows.split(n_at_once), strict=True):
        index = places[:, None] * matrix.shape[1] + columns
        part.copy_(INITIAL_STD * normal_deviates(index, name, seed))


def _stored_places(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the numbers of the rows, or columns, of a matrix that this rank stores."""
    places = torch.arange(matrix.shape[dim], device=matrix.device)
    if not isinstance(matrix, DTensor):
        return places
    placements = [
        Shard(0) if placement.is_shard(dim) else Replicate() for placement in matrix.placements
    ]
    spread = distribute_tensor(places, matrix.device_mesh, placements, src_data_rank=None)
    return spread.to_local()
