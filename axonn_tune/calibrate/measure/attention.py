"""Time fused attention in the shapes that a search asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from axonn_tune.calibrate.measure.gemm import DTYPES
from axonn_tune.calibrate.measure.timing import Effort, Timing, time_work


@dataclass(frozen=True, order=True)
class AttentionShape:
    """Causal attention over whole sequences."""

    n_sequences: int
    n_heads: int
    seq_len: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        sizes = (self.n_sequences, self.n_heads, self.seq_len, self.head_dim)
        return f"{'x'.join(map(str, sizes))} {self.dtype}"


def time_attention(
    shape: AttentionShape, backward: bool, device: torch.device, effort: Effort
) -> Timing:
    """The forward pass, or the backward pass alone."""
    size = (shape.n_sequences, shape.n_heads, shape.seq_len, shape.head_dim)
    q, k, v, d_out = (torch.randn(size, device=device).to(DTYPES[shape.dtype]) for _ in range(4))
    if not backward:
        return time_work(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, effort
        )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
    return time_work(
        lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True), device, effort
    )
