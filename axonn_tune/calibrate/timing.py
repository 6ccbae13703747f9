"""Time some work: warm up, make each sample long enough, keep every sample.

After pyperf: the number of loops in a sample is calibrated to a minimum time, and warming up
ends when two windows of samples agree.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from axonn_tune.calibrate.fit import robust_spread_fraction
from axonn_tune.runtime.gemm import synchronize

# Windows of samples whose medians differ by less count as warmed up; and the most windows.
SETTLED_FRACTION = 0.05
WARM_UP_SAMPLES, MAX_WARM_UP_WINDOWS = 3, 8


@dataclass(frozen=True)
class Effort:
    """How long to measure one thing.

    sample_seconds: least length of a sample. n_samples: samples kept. max_seconds: of all of
    them together; work that takes longer gets fewer samples, at least 3.
    """

    sample_seconds: float
    n_samples: int
    max_seconds: float


QUICK = Effort(sample_seconds=1e-3, n_samples=5, max_seconds=0.1)
THOROUGH = Effort(sample_seconds=5e-3, n_samples=15, max_seconds=1.0)


@dataclass(frozen=True)
class Timing:
    """Median seconds of one piece of work, with the relative spread of the samples."""

    seconds: float
    spread_fraction: float


def alone(seconds: float) -> float:
    """For work that ranks do independently: each goes by its own time."""
    return seconds


def time_work(
    work: Callable[[], object],
    device: torch.device,
    effort: Effort,
    agree: Callable[[float], float] = alone,
) -> Timing:
    """Time `work`.

    Parameters
    ----------
    agree : callable
        Makes one of the times that ranks have measured, such as the longest, so that all of them
        repeat a collective equally often.
    """

    def sample(n_loops: int) -> float:
        return agree(_loop_seconds(work, n_loops, device)) / n_loops

    n_loops = 1
    while True:
        seconds = sample(n_loops) * n_loops
        if seconds >= effort.sample_seconds:
            break
        growth = 1.2 * effort.sample_seconds / max(seconds, 1e-9)
        n_loops = math.ceil(n_loops * min(max(growth, 1.5), 100.0))
    affordable = int(effort.max_seconds / seconds)
    n_samples = max(3, min(effort.n_samples, affordable))
    if affordable > n_samples:
        _warm_up(lambda: sample(n_loops))
    samples = [sample(n_loops) for _ in range(n_samples)]
    return Timing(median(samples), min(robust_spread_fraction(samples), 1.0))


def _warm_up(sample: Callable[[], float]) -> None:
    before = math.inf
    for _ in range(MAX_WARM_UP_WINDOWS):
        now = median(sample() for _ in range(WARM_UP_SAMPLES))
        if abs(now - before) < SETTLED_FRACTION * now:
            return
        before = now


def _loop_seconds(work: Callable[[], object], n_loops: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n_loops):
            work()
        end.record()
        synchronize(device)
        return float(1e-3 * start.elapsed_time(end))
    begin = time.perf_counter()
    for _ in range(n_loops):
        work()
    return time.perf_counter() - begin
