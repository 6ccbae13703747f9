"""A decoder-only transformer as one writes it for one device, for torch's own parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from axonn_tune.runtime.axonn.gpt import INITIAL_STD
from axonn_tune.spec.model import Model

_ROTARY_BASE = 10000.0


class PlainBlock(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream.

    The columns of `qkv` lie head by head, so that a tensor-parallel rank has whole heads.
    """

    def __init__(self, spec: Model, fused_attention: bool) -> None:
        super().__init__()
        self._spec, self._fused = spec, fused_attention
        qkv, proj, up, down = spec.block_linears
        self.norm1, self.norm2 = norm_of(spec), norm_of(spec)
        self.qkv = nn.Linear(qkv.n_in, qkv.n_out, bias=qkv.bias)
        self.proj = nn.Linear(proj.n_in, proj.n_out, bias=proj.bias)
        self.up = nn.Linear(up.n_in, up.n_out, bias=up.bias)
        self.down = nn.Linear(down.n_in, down.n_out, bias=down.bias)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """One block, (b, s, hidden) to the same shape."""
        stream = stream + self.proj(self._attend(self.qkv(self.norm1(stream))))
        return stream + self.down(self._activate(self.up(self.norm2(stream))))

    def _attend(self, qkv: torch.Tensor) -> torch.Tensor:
        spec, (b, s, _) = self._spec, qkv.shape
        n_queries = spec.n_heads // spec.n_kv_heads
        groups = qkv.view(b, s, -1, n_queries + 2, spec.head_dim)
        queries = groups[..., :n_queries, :].flatten(2, 3).transpose(1, 2)
        keys, values = (groups[..., n_queries + i, :].transpose(1, 2) for i in range(2))
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


def norm_of(spec: Model) -> nn.Module:
    """The model's norm over the hidden dimension."""
    make = nn.RMSNorm if spec.norm == "rms" else nn.LayerNorm
    return make(spec.hidden_size, eps=1e-5)


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + d/2) of each head turned by position * base^(-2i/d), (b, heads, s, d)."""
    s, d = heads.shape[-2:]
    place = torch.arange(s, device=heads.device, dtype=torch.float32)
    turn = _ROTARY_BASE ** (-torch.arange(0, d, 2, device=heads.device, dtype=torch.float32) / d)
    angle = torch.outer(place, turn)
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class PlainGPT(nn.Module):
    """The model of a `spec.Model`; `recompute` full checkpoints each block."""

    def __init__(self, spec: Model, attention: str, recompute: str) -> None:
        super().__init__()
        self._recompute = recompute
        self.embedding = nn.Embedding(spec.padded_vocab_size, spec.hidden_size)
        self.position: nn.Parameter | None = None
        if spec.position == "learned":
            self.position = nn.Parameter(torch.empty(spec.seq_len, spec.hidden_size))
        self.blocks = nn.ModuleList(
            PlainBlock(spec, attention == "flash") for _ in range(spec.n_layers)
        )
        self.norm = norm_of(spec)
        self.head = nn.Linear(spec.hidden_size, spec.padded_vocab_size, bias=False)
        if spec.tied_embeddings:
            self.head.weight = self.embedding.weight

    def initialise(self, seed: int) -> PlainGPT:
        """The same random weights on every rank."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(INITIAL_STD * values)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, (b, s) to (b, s, padded vocabulary)."""
        stream = self.embedding(tokens)
        if self.position is not None:
            stream = stream + self.position[: tokens.shape[1]]
        for block in self.blocks:
            if self._recompute == "full" and torch.is_grad_enabled():
                stream = checkpoint(block, stream, use_reentrant=False)
            else:
                stream = block(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits
