"""Time the kernels that are not products: attention, and what memory bandwidth limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from axonn_tune.calibrate.gemm import DTYPES
from axonn_tune.calibrate.timing import Effort, Timing, time_work


@dataclass(frozen=True, order=True)
class AttentionShape:
    """Causal attention over whole sequences."""

    n_sequences: int
    n_heads: int
    seq_len: int
    head_dim: int
    dtype: str

    @property
    def flops(self) -> float:
        """Of the causal half of the forward pass: 2 b s^2 a d."""
        return 2.0 * self.n_sequences * self.n_heads * self.head_dim * float(self.seq_len) ** 2


def time_attention(
    shape: AttentionShape, device: torch.device, effort: Effort
) -> tuple[Timing, Timing]:
    """Fused attention: the forward pass, and the backward pass alone."""
    size = (shape.n_sequences, shape.n_heads, shape.seq_len, shape.head_dim)
    dtype = DTYPES[shape.dtype]
    q, k, v, d_out = (torch.randn(size, device=device).to(dtype) for _ in range(4))
    forward = time_work(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, effort
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
    backward = time_work(
        lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True), device, effort
    )
    return forward, backward


# Name of a memory-bound kernel: bytes that it moves for a buffer of n elements, and the kernel.
MemoryKernel = Callable[[int, torch.dtype, torch.device], tuple[float, Callable[[], object]]]


def _copy(n: int, dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], object]]:
    source, target = (torch.randn(n, device=device).to(dtype) for _ in range(2))
    return 2.0 * source.nbytes, lambda: target.copy_(source)


def _layer_norm(
    n: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, Callable[[], object]]:
    width = 1024
    rows = torch.randn(max(n // width, 1), width, device=device).to(dtype)
    gain, shift = (torch.randn(width, device=device).to(dtype) for _ in range(2))
    return 2.0 * rows.nbytes, lambda: F.layer_norm(rows, (width,), gain, shift)


def _gelu(n: int, dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], object]]:
    values = torch.randn(n, device=device).to(dtype)
    return 2.0 * values.nbytes, lambda: F.gelu(values, approximate="tanh")


def _residual(
    n: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, Callable[[], object]]:
    stream, branch = (torch.randn(n, device=device).to(dtype) for _ in range(2))
    return 3.0 * stream.nbytes, lambda: stream + branch


def _optimizer(
    n: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, Callable[[], object]]:
    weight = torch.nn.Parameter(torch.randn(n, device=device))
    weight.grad = torch.randn(n, device=device)
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.step()
    # Gradient read; weight and two moments read and written.
    return 7.0 * weight.nbytes, adamw.step


MEMORY_KERNELS: dict[str, MemoryKernel] = {
    "copy": _copy,
    "layer_norm": _layer_norm,
    "gelu": _gelu,
    "residual": _residual,
    "optimizer": _optimizer,
}


def time_memory_kernel(
    name: str, n_elements: int, dtype: str, device: torch.device, effort: Effort
) -> tuple[float, Timing]:
    """Bytes that the kernel moves, and its time."""
    nbytes, kernel = MEMORY_KERNELS[name](n_elements, DTYPES[dtype], device)
    with torch.no_grad():
        return nbytes, time_work(kernel, device, effort)
