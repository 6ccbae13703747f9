"""Causal attention over the rank's heads (Y splits them), and rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.ranks.spans import Amount, recorded

ROTARY_BASE = 10_000.0  # Su et al., arXiv 2104.09864, section 3.3


class CausalAttention:
    """Attention of grouped queries.

    Shapes: b sequences, s positions, g key-value heads, q queries per key-value head, d
    elements of a head, all of this rank.

    Parameters
    ----------
    engine : Engine
    head_dim, queries_per_kv_head : int
    fused : bool
        torch's fused kernel (flash attention), or products and softmax one by one.
    rotary : bool
        Rotate queries and keys by their position.
    recompute : bool
        Form the score matrix of unfused attention again in the backward pass.
    """

    def __init__(
        self,
        engine: Engine,
        head_dim: int,
        queries_per_kv_head: int,
        fused: bool,
        rotary: bool,
        recompute: bool,
    ) -> None:
        self.engine, self.fused, self.rotary, self.recompute = engine, fused, rotary, recompute
        self.head_dim, self.queries_per_kv_head = head_dim, queries_per_kv_head

    def __call__(self, qkv_bsn: torch.Tensor) -> torch.Tensor:
        """Attention of the fused projection.

        Parameters
        ----------
        qkv_bsn : shape (b, s, g * (q + 2) * d)
            For each key-value head its queries, its key and its value.

        Returns
        -------
        shape (b, s, g * q * d)
        """
        b, s, _ = qkv_bsn.shape
        n_queries, d = self.queries_per_kv_head, self.head_dim
        if self.rotary:
            n_rotated = qkv_bsn.numel() * (n_queries + 1) // (n_queries + 2)
            amount = Amount(*[2.0 * n_rotated * qkv_bsn.element_size()] * 2)
            qkv_bsn = recorded(self.engine, "rotary", amount, self._rotate, qkv_bsn)
        n_heads = qkv_bsn.shape[-1] // ((n_queries + 2) * d) * n_queries
        flops = 4.0 * b * n_heads * (float(s) ** 2 * d)
        amount = Amount(flops, 2.0 * flops, "attention")
        if self.fused:
            return recorded(self.engine, "attention", amount, self._flash, qkv_bsn)
        queries, keys, values = self._split(qkv_bsn)
        keys, values = (t.repeat_interleave(n_queries, dim=1) for t in (keys, values))
        output = _Unfused.apply(queries, keys, values, self.engine, amount, self.recompute)
        return _merge_heads(output)

    def _split(self, qkv_bsn: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries (b, g*q, s, d), keys and values (b, g, s, d)."""
        b, s, _ = qkv_bsn.shape
        n_queries = self.queries_per_kv_head
        parts = qkv_bsn.view(b, s, -1, n_queries + 2, self.head_dim)
        return tuple(t.flatten(2, 3).transpose(1, 2) for t in parts.split((n_queries, 1, 1), dim=3))

    def _rotate(self, qkv_bsn: torch.Tensor) -> torch.Tensor:
        b, s, _ = qkv_bsn.shape
        parts = qkv_bsn.view(b, s, -1, self.queries_per_kv_head + 2, self.head_dim)
        turned, values = parts[..., :-1, :], parts[..., -1:, :]
        cos, sin = rotary_angles(s, self.head_dim, qkv_bsn.device)
        first, second = turned.float().chunk(2, dim=-1)
        cos, sin = (angle[None, :, None, None, :] for angle in (cos, sin))
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned.to(qkv_bsn.dtype), values), dim=-2).view_as(qkv_bsn)

    def _flash(self, qkv_bsn: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self._split(qkv_bsn)
        grouped = {"enable_gqa": True} if self.queries_per_kv_head > 1 else {}
        return _merge_heads(
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True, **grouped)
        )


def _merge_heads(heads_bhsd: torch.Tensor) -> torch.Tensor:
    return heads_bhsd.transpose(1, 2).flatten(2)


class _Unfused(torch.autograd.Function):
    """Attention by products and a softmax; keeps the softmax's result or forms it again."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        engine: Engine,
        amount: Amount,
        recompute: bool,
    ) -> torch.Tensor:
        ctx.engine, ctx.amount, ctx.recompute = engine, amount, recompute
        name = f"{engine.chain}.attention"
        with engine.recorder.kernel(name, amount.kind, flops=amount.forward):
            weights = _attention_weights(queries, keys)
            output = weights @ values
        ctx.save_for_backward(queries, keys, values, *(() if recompute else (weights,)))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recorder, amount = ctx.engine.recorder, ctx.amount
        queries, keys, values, *kept = ctx.saved_tensors
        (d_output,) = gradients
        if ctx.recompute:
            with recorder.kernel("recompute.attention", amount.kind, flops=amount.forward):
                kept = [_attention_weights(queries, keys)]
        (weights,) = kept
        with recorder.kernel("backward.attention", amount.kind, flops=amount.backward):
            d_values = weights.transpose(-1, -2) @ d_output
            d_weights = (d_output @ values.transpose(-1, -2)).float()
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
            d_scores = (d_scores / math.sqrt(queries.shape[-1])).to(queries.dtype)
            d_queries, d_keys = d_scores @ keys, d_scores.transpose(-1, -2) @ queries
        return d_queries, d_keys, d_values, None, None, None


def _attention_weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Softmax over the past of the scaled scores, shape (b, heads, s, s)."""
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    s = scores.shape[-1]
    future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(future, -math.inf).softmax(-1, dtype=torch.float32).to(keys.dtype)


def rotary_angles(
    seq_len: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, shape (s, d / 2), of the angle of each position and pair of elements."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    frequencies = ROTARY_BASE ** (-pairs / head_dim)
    angles = torch.arange(seq_len, device=device).double()[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()
