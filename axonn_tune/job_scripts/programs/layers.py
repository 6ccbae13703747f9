"""The parts of a transformer that do not depend on how it is spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

INITIAL_STD = 0.02
ROTARY_BASE = 10000.0
EPS = 1e-5
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention(settings: SimpleNamespace, qkv: torch.Tensor, reentrant: bool) -> torch.Tensor:
    """Map queries, keys and values, shape (b, s, g * (q + 2) * e), to (b, s, g * q * e).

    The columns lie by groups of q queries, a key and a value, so that a part of the columns is
    that of whole heads. `reentrant` is the kind of checkpoint with which scores are recomputed.
    """
    if settings.attention == "unfused" and settings.recompute == "selective":
        return checkpoint(_attention, settings, qkv, use_reentrant=reentrant)
    return _attention(settings, qkv)


def _attention(settings: SimpleNamespace, qkv: torch.Tensor) -> torch.Tensor:
    model = settings.model
    n_queries = model.n_heads // model.n_kv_heads
    groups = qkv.unflatten(-1, (-1, n_queries + 2, model.head_dim))
    queries = groups[..., :n_queries, :].flatten(2, 3).transpose(1, 2)
    keys, values = (groups[..., n_queries + i, :].transpose(1, 2) for i in (0, 1))
    if model.position == "rotary":
        queries, keys = _rotated(queries), _rotated(keys)
    with sdpa_kernel(FLASH if settings.attention == "flash" else [SDPBackend.MATH]):
        heads = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=settings.dropout,
            is_causal=True,
            enable_gqa=n_queries > 1,
        )
    return heads.transpose(1, 2).flatten(2)


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + e/2) of each head by position * base^(-2i/e), shape (b, h, s, e)."""
    s, e = heads.shape[-2:]
    position = torch.arange(s, device=heads.device, dtype=torch.float32)
    pair = torch.arange(0, e, 2, device=heads.device, dtype=torch.float32)
    angle = torch.outer(position, ROTARY_BASE ** (-pair / e))
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def activation(settings: SimpleNamespace, hidden: torch.Tensor) -> torch.Tensor:
    """Return what the MLP's second layer reads; in a gated MLP, gates and values alternate."""
    if settings.model.gated_mlp:
        gates, values = hidden.unflatten(-1, (-1, 2)).unbind(-1)
        return F.silu(gates) * values
    return F.gelu(hidden, approximate="tanh")


class Block(nn.Module):
    """Attention and MLP, each a branch of the residual stream that begins with a norm."""

    def __init__(
        self,
        settings: SimpleNamespace,
        make_norm: Callable[[], nn.Module],
        make_linear: Callable[..., nn.Module],
        reentrant: bool,
    ) -> None:
        """Take how to make a norm, and a linear layer of (n_in, n_out, bias, transpose)."""
        super().__init__()
        model = settings.model
        self._settings, self.reentrant = settings, reentrant
        d, heads = model.hidden_size, model.n_heads * model.head_dim
        n_qkv = heads + 2 * model.n_kv_heads * model.head_dim
        n_up = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
        self.norm1 = make_norm()
        self.qkv = make_linear(d, n_qkv, model.qkv_bias, False)
        self.proj = make_linear(heads, d, model.proj_bias, True)
        self.norm2 = make_norm()
        self.up = make_linear(d, n_up, model.bias, False)
        self.down = make_linear(model.ffn_hidden_size, d, model.bias, True)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """Map the residual stream, shape (b, s, d), to the stream behind the block."""
        after_attention = stream + self._dropped(self._attend(stream))
        read = stream if self._settings.model.parallel_block else after_attention
        return after_attention + self._dropped(self._feed_forward(read))

    def _attend(self, stream: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(stream)
        qkv = self._apply_linear(self.qkv, normed, lambda: self.norm1(stream))
        return self.proj(attention(self._settings, qkv, self.reentrant))

    def _feed_forward(self, stream: torch.Tensor) -> torch.Tensor:
        normed = self.norm2(stream)
        hidden = self._apply_linear(self.up, normed, lambda: self.norm2(stream))
        activated = activation(self._settings, hidden)
        return self._apply_linear(self.down, activated, lambda: activation(self._settings, hidden))

    def _apply_linear(
        self, layer: nn.Module, given: torch.Tensor, form: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return a layer's output; with selective recomputation its input is not kept.

        The backward pass then forms the input again by `form`.
        """
        if self._settings.recompute != "selective":
            return layer(given)
        address = given.data_ptr()

        def keep(saved: torch.Tensor) -> object:
            is_given = saved.data_ptr() == address
            return (saved.shape, saved.stride()) if is_given else saved

        def bring(kept: object) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            with torch.no_grad():
                return form().as_strided(*kept)

        with torch.autograd.graph.saved_tensors_hooks(keep, bring):
            return layer(given)

    def _dropped(self, branch: torch.Tensor) -> torch.Tensor:
        return F.dropout(branch, self._settings.dropout) if self._settings.dropout else branch


def run_blocks(
    settings: SimpleNamespace, blocks: Sequence[Block], stream: torch.Tensor
) -> torch.Tensor:
    """Run the blocks of a model or of a stage; with full recomputation nothing in them is kept.

    ``full:4`` recomputes the first four blocks as a whole and keeps the activations of the others.
    """
    kind, _, count = settings.recompute.partition(":")
    n_recomputed = int(count or len(blocks)) if kind == "full" else 0
    for number, block in enumerate(blocks):
        if number < n_recomputed and torch.is_grad_enabled():
            stream = checkpoint(block, stream, use_reentrant=block.reentrant)
        else:
            stream = block(stream)
    return stream
