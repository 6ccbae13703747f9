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
    rotary : RotaryAngles or None
        By what to rotate queries and keys; None for no rotation.
    recompute : bool
        Whether to form the score matrix of unfused attention again in the backward pass.
    """

    def __init__(
        self,
        engine: Engine,
        head_dim: int,
        queries_per_kv_head: int,
        fused: bool,
        rotary: RotaryAngles | None,
        recompute: bool,
    ) -> None:
        self.engine = engine
        self.head_dim = head_dim
        self.queries_per_kv_head = queries_per_kv_head
        self.fused = fused
        self.rotary = rotary
        self.recompute = recompute

    def __call__(self, qkv_tn: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Return what the heads attend to, given the output of the fused projection.

        Parameters
        ----------
        qkv_tn : shape (t, g * (q + 2) * e / G_y)
            The queries, the key and the value of each key-value head, one head after another.

        Returns
        -------
        shape (t, h * e / G_y)
        """
        n_queries = self.queries_per_kv_head
        n_sequences = len(qkv_tn) // seq_len
        heads = qkv_tn.view(n_sequences, seq_len, -1, n_queries + 2, self.head_dim)
        if self.rotary is not None:
            n_rotated = heads.numel() * (n_queries + 1) // (n_queries + 2)
            nbytes = 2.0 * n_rotated * heads.element_size()
            heads = recorded(self.engine, "rotary", Amount(nbytes, nbytes), self._rotate, heads)
        n_heads = heads.shape[2] * n_queries
        flops = 4.0 * n_sequences * n_heads * (float(seq_len) ** 2 * self.head_dim)
        amount = Amount(flops, 2.0 * flops, "attention")
        if self.fused:
            return recorded(self.engine, _NAME, amount, self._flash, heads)
        queries, keys, values = self._split(heads)
        if n_queries > 1:
            keys = keys.repeat_interleave(n_queries, dim=1)
            values = values.repeat_interleave(n_queries, dim=1)
        output = _Unfused.apply(queries, keys, values, self.engine, amount, self.recompute)
        return _merge_heads(output)

    def _split(self, heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split (b, s, g / G_y, q + 2, e) into queries (b, h / G_y, s, e), keys and values."""
        n_queries = self.queries_per_kv_head
        return tuple(
            t.flatten(2, 3).transpose(1, 2) for t in heads.split_with_sizes((n_queries, 1, 1), 3)
        )

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        assert self.rotary is not None
        cos, sin = self.rotary.of_positions(heads.shape[1], heads.device)
        return _Rotation.apply(heads, cos, sin)

    def _flash(self, heads: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self._split(heads)
        grouped = {"enable_gqa": True} if self.queries_per_kv_head > 1 else {}
        return _merge_heads(
            F.scaled_dot_product_attention(queries, keys, values, is_causal=True, **grouped)
        )


def _merge_heads(heads_bhse: torch.Tensor) -> torch.Tensor:
    """Return the heads side by side, shape (t, h * e)."""
    n_sequences, n_heads, seq_len, head_dim = heads_bhse.shape
    return heads_bhse.transpose(1, 2).reshape(n_sequences * seq_len, n_heads * head_dim)


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


class RotaryAngles:
    """The angles by which the layers of a model rotate pairs of elements of size-e heads."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._known: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of_positions(self, seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine for each position and pair, shape (1, s, 1, 1, e / 2) each."""
        key = seq_len, device
        if key not in self._known:
            pairs = torch.arange(0, self._head_dim, 2, dtype=torch.float64, device=device)
            frequencies = ROTARY_BASE ** (-pairs / self._head_dim)
            angles = torch.arange(seq_len, device=device).double()[:, None] * frequencies
            angles = angles[None, :, None, None, :]
            self._known[key] = angles.cos().float(), angles.sin().float()
        return self._known[key]


class _Rotation(torch.autograd.Function):
    """Rotates pairs of elements of the queries and the key of each key-value head.

    The heads have the shape (b, s, g / G_y, q + 2, e); the value, which is the last of the q + 2,
    stays as it is.
    """

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        ctx.angles = cos, sin
        return _rotated(heads, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.angles
        return _rotated(gradients[0], cos, sin, -1.0), None, None


def _rotated(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: float
) -> torch.Tensor:
    """Rotate forwards (1.0) or back (-1.0), and write each half of the result once or twice."""
    result = torch.empty_like(heads)
    first, second = heads[..., :-1, :].chunk(2, dim=-1)
    new_first, new_second = result[..., :-1, :].chunk(2, dim=-1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    result[..., -1:, :] = heads[..., -1:, :]
    return result
