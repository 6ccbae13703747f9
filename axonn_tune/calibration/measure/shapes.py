"""Time matrix products and fused attention in given shapes, on random data."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from axonn_tune.calibration.measure.timing import Sampling, Timing, time_work
from axonn_tune.runtime.axonn.gemm import synchronize

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_CACHE_BYTES = 64 * 2**20
MAX_COPIES = 16
# Edge of the square products that settle the clocks, by type of device.
SETTLING_EDGES = {"cpu": 512, "cuda": 8192}
# The rate of products is taken in this many windows, and the device is awaited after each batch.
N_WINDOWS = 5
BATCH = 4


@dataclass(frozen=True, order=True)
class GemmShape:
    """An (m x k) times (k x n) product in one mode and dtype."""

    m: int
    n: int
    k: int
    mode: str
    dtype: str

    @property
    def flops(self) -> float:
        """The floating-point operations of the product, which are 2 m n k."""
        return 2.0 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.mode} {self.dtype}"


@dataclass(frozen=True, order=True)
class AttentionShape:
    """Causal attention over whole sequences."""

    n_sequences: int
    n_heads: int
    seq_len: int
    head_dim: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.n_sequences}x{self.n_heads}x{self.seq_len}x{self.head_dim} {self.dtype}"


def time_gemm(shape: GemmShape, device: torch.device, sampling: Sampling) -> Timing:
    """Time one product in its mode as training runs it: its operands are not in the cache."""
    operands = itertools.cycle(_operands(shape, device))
    out = torch.empty(shape.m, shape.n, dtype=DTYPES[shape.dtype], device=device)
    return time_work(lambda: torch.mm(*next(operands), out=out), device, sampling)


def time_attention(
    shape: AttentionShape, backward: bool, device: torch.device, sampling: Sampling
) -> Timing:
    """Time the forward pass, or the backward pass alone."""
    size = (shape.n_sequences, shape.n_heads, shape.seq_len, shape.head_dim)
    q, k, v, d_out = (torch.randn(size, device=device).to(DTYPES[shape.dtype]) for _ in range(4))
    if not backward:
        return time_work(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device, sampling
        )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
    return time_work(
        lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True), device, sampling
    )


def settled_rates(dtype: str, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return the rate of large products at first and after some seconds: clocks fall under load.

    Both rates are in FLOP/s.
    """
    edge = SETTLING_EDGES[device.type]
    shape = GemmShape(edge, edge, edge, "NN", dtype)
    a, b = _operands(shape, device)[0]
    out = torch.empty(edge, edge, dtype=DTYPES[dtype], device=device)

    def rate() -> float:
        n_products = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds / N_WINDOWS:
            for _ in range(BATCH):
                torch.mm(a, b, out=out)
            synchronize(device)
            n_products += BATCH
        return n_products * shape.flops / (time.perf_counter() - start)

    rate()  # the first calls load libraries
    rates = [rate() for _ in range(N_WINDOWS)]
    return rates[0], rates[-1]


def _operands(shape: GemmShape, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return enough pairs of operands to exceed the cache twice over."""
    dtype = DTYPES[shape.dtype]
    a_size = (shape.k, shape.m) if shape.mode == "TN" else (shape.m, shape.k)
    b_size = (shape.n, shape.k) if shape.mode == "NT" else (shape.k, shape.n)
    pair_bytes = (shape.m + shape.n) * shape.k * dtype.itemsize
    n_copies = min(max(-(-2 * cache_bytes(device) // pair_bytes), 1), MAX_COPIES)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(a_size, device=device).to(dtype)
        b = torch.randn(b_size, device=device).to(dtype)
        return a.t() if shape.mode == "TN" else a, b.t() if shape.mode == "NT" else b

    return [pair() for _ in range(n_copies)]


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last cache before memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return int(getattr(properties, "L2_cache_size", DEFAULT_CACHE_BYTES))
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or DEFAULT_CACHE_BYTES
    except (ValueError, OSError):
        return DEFAULT_CACHE_BYTES
