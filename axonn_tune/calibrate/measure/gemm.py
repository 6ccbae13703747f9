"""Time matrix products as training runs them: random data, operands that are not in the cache."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass

import torch

from axonn_tune.calibrate.measure.timing import Effort, Timing, time_work
from axonn_tune.runtime.axonn.gemm import synchronize

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_CACHE_BYTES = 64 * 2**20
MAX_COPIES = 16
SETTLING_EDGES = {"cpu": 512, "cuda": 8192}
N_WINDOWS, BATCH = 5, 4


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
        """2 m n k."""
        return 2.0 * self.m * self.n * self.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.mode} {self.dtype}"


def time_gemm(shape: GemmShape, device: torch.device, effort: Effort) -> Timing:
    """Time one product in its mode."""
    operands = itertools.cycle(_operands(shape, device))
    out = torch.empty(shape.m, shape.n, dtype=DTYPES[shape.dtype], device=device)
    return time_work(lambda: torch.mm(*next(operands), out=out), device, effort)


def settled_rates(dtype: str, device: torch.device, seconds: float) -> tuple[float, float]:
    """FLOP/s of large products at first and after some seconds: clocks fall under load."""
    edge = SETTLING_EDGES[device.type]
    shape = GemmShape(edge, edge, edge, "NN", dtype)
    a, b = _operands(shape, device)[0]
    out = torch.empty(edge, edge, dtype=DTYPES[dtype], device=device)

    def rate() -> float:
        n_products, start = 0, time.perf_counter()
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
    """As many pairs as it takes to be larger than the cache twice over."""
    dtype = DTYPES[shape.dtype]
    a_size = (shape.k, shape.m) if shape.mode == "TN" else (shape.m, shape.k)
    b_size = (shape.n, shape.k) if shape.mode == "NT" else (shape.k, shape.n)
    pair_bytes = (shape.m + shape.n) * shape.k * dtype.itemsize
    n_copies = min(max(-(-2 * cache_bytes(device) // pair_bytes), 1), MAX_COPIES)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (torch.randn(size, device=device).to(dtype) for size in (a_size, b_size))
        return a.t() if shape.mode == "TN" else a, b.t() if shape.mode == "NT" else b

    return [pair() for _ in range(n_copies)]


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return int(getattr(properties, "L2_cache_size", DEFAULT_CACHE_BYTES))
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or DEFAULT_CACHE_BYTES
    except (ValueError, OSError):
        return DEFAULT_CACHE_BYTES
