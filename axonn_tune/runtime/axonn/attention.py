"""Causal attention over the rank's heads (Y splits them), and rotary position embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.spans import Amount, recorded
from axonn_tune.spec import names

ROTARY_BASE = 10_000.0  # Su et al., arXiv 2104.09864, section 3.3
_NAME = "attention"


class CausalAttention:
    """Causal attention in which q query heads share one head of keys and values.

    Parameters
    ----------
    engine : Engine
    head_dim, queries_per_kv_head : int
        Sizes e and q.
    fused : bool
        Whether to use torch's fused kernel (flash attention) instead of products and a softmax.
    rotary : bool
        Whether to rotate queries and keys by their position.
    recompute : bool
        Whether to form the score matrix of unfused attention again in the backward pass.
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
        self.engine = engine
        self.head_dim = head_dim
        self.queries_per_kv_head = queries_per_kv_head
        self.fused = fused
        self.rotary = rotary
        self.recompute = recompute

    def __call__(self, qkv_bsn: torch.Tensor) -> torch.Tensor:
        """Return what the heads attend to, given the output of the fused projection.

        Parameters
        ----------
        qkv_bsn : shape (b, s, g * (q + 2) * e / G_y)
            The queries, the key and the value of each key-value head, one head after another.

        Returns
        -------
        shape (b, s, h * e / G_y)
        """
        b, s, _ = qkv_bsn.shape
        n_queries = self.queries_per_kv_head
        if self.rotary:
            n_rotated = qkv_bsn.numel() * (n_queries + 1) // (n_queries + 2)
            nbytes = 2.0 * n_rotated * qkv_bsn.element_size()
            qkv_bsn = recorded(self.engine, "rotary", Amount(nbytes, nbytes), self._rotate, qkv_bsn)
        n_heads = qkv_bsn.shape[-1] // ((n_queries + 2) * self.head_dim) * n_queries
        flops = 4.0 * b * n_heads * (float(s) ** 2 * self.head_dim)
        amount = Amount(flops, 2.0 * flops, "attention")
        if self.fused:
            return recorded(self.engine, _NAME, amount, self._flash, qkv_bsn)
        queries, keys, values = self._split(qkv_bsn)
        if n_queries > 1:
            keys = keys.repeat_interleave(n_queries, dim=1)
            values = values.repeat_interleave(n_queries, dim=1)
        output = _Unfused.apply(queries, keys, values, self.engine, amount, self.recompute)
        return _merge_heads(output)

    def _split(self, qkv_bsn: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries (b, h / G_y, s, e), then keys and values (b, g / G_y, s, e)."""
        b, s, _ = qkv_bsn.shape
        n_queries = self.queries_per_kv_head
        parts = qkv_bsn.view(b, s, -1, n_queries + 2, self.head_dim)
        return tuple(t.flatten(2, 3).transpose(1, 2) for t in parts.split((n_queries, 1, 1), dim=3))

    def _rotate(self, qkv_bsn: torch.Tensor) -> torch.Tensor:
        b, s, _ = qkv_bsn.shape
        parts = qkv_bsn.view(b, s, -1, self.queries_per_kv_head + 2, self.head_dim)
        turned, values = parts[..., :-1, :], parts[..., -1:, :]
        cos, sin = rotary_angles(s, self.head_dim, qkv_bsn.device)
        cos = cos[None, :, None, None, :]
        sin = sin[None, :, None, None, :]
        first, second = turned.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((turned.to(qkv_bsn.dtype), values), dim=-2).view_as(qkv_bsn)

    def _flash(self, qkv_bsn: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self._split(qkv_bsn)
        grouped = {"enable_gqa": True} if self.queries_per_kv_head > 1 else {}
        return _merge_heads(
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True, **grouped)
        )


def _merge_heads(heads_bhse: torch.Tensor) -> torch.Tensor:
    """Return the heads side by side, shape (b, s, h * e)."""
    return heads_bhse.transpose(1, 2).flatten(2)


class _Unfused(torch.autograd.Function):
    """Attention by products and a softmax; keeps the softmax's result or forms it again.

    Queries, keys, values and the output have the shape (b, h / G_y, s, e).
    """

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
        name = names.of_layer(engine.chain, _NAME)
        with engine.recorder.kernel(name, amount.kind, flops=amount.forward):
            weights = _attention_weights(queries, keys)
            output = weights @ values
        if recompute:
            ctx.save_for_backward(queries, keys, values)
        else:
            ctx.save_for_backward(queries, keys, values, weights)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        recorder = ctx.engine.recorder
        amount = ctx.amount
        queries, keys, values, *kept = ctx.saved_tensors
        (d_output,) = gradients
        if ctx.recompute:
            name = names.of_layer(names.RECOMPUTE, _NAME)
            with recorder.kernel(name, amount.kind, flops=amount.forward):
                weights = _attention_weights(queries, keys)
        else:
            (weights,) = kept
        name = names.of_layer(names.BACKWARD, _NAME)
        with recorder.kernel(name, amount.kind, flops=amount.backward):
            d_values = weights.transpose(-1, -2) @ d_output
            d_weights = (d_output @ values.transpose(-1, -2)).float()
            d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
            d_scores = (d_scores / math.sqrt(queries.shape[-1])).to(queries.dtype)
            d_queries = d_scores @ keys
            d_keys = d_scores.transpose(-1, -2) @ queries
        return d_queries, d_keys, d_values, None, None, None


def _attention_weights(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the past of the scaled scores, shape (b, h / G_y, s, s)."""
    scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    s = scores.shape[-1]
    future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(future, -math.inf).softmax(-1, dtype=torch.float32).to(keys.dtype)


def rotary_angles(
    seq_len: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the angle of each position and pair, shape (s, e / 2) each."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    frequencies = ROTARY_BASE ** (-pairs / head_dim)
    angles = torch.arange(seq_len, device=device).double()[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()
