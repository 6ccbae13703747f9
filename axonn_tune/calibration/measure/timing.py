"""Time some work: warm up, make each sample long enough, take the middle of several.

As in pyperf, the number of loops in a sample is calibrated to a least time, and warming up ends
when two windows of samples agree.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from axonn_tune.calibration.fit.robust import robust_spread_fraction
from axonn_tune.runtime.axonn.gemm import synchronize
from axonn_tune.runtime.ranks.device_stream import give_host_a_lead
from axonn_tune.units import rounded

# Work is warmed up once the medians of two windows of samples differ by less than this.
SETTLED_FRACTION = 0.05
WARM_UP_SAMPLES = 3
MAX_WARM_UP_WINDOWS = 8
# Where ranks share a core, they take turns of some 3 ms (Linux: sched_base_slice_ns).
TURN_SECONDS = 3e-3
# On a GPU the host issues a kernel in 5 to 50 us (assumed), which is longer than a short one takes.
LEAD_SECONDS = 50e-6
MOST_LEAD_SECONDS = 20e-3
# Of the kernels that wait for a GPU, about a thousand have room (assumed); then the host waits.
MOST_LOOPS_ON_GPU = 500


@dataclass(frozen=True)
class Sampling:
    """How the time of one thing is sampled.

    Parameters
    ----------
    sample_seconds : float
        Least length of a sample. [s]
    n_samples : int
        Number of samples that are kept.
    max_seconds : float
        Most time of all samples; longer work gets fewer samples, at least 3. [s]
    n_turns : int
        Number of turns of each rank that a sample spans where ranks share a core, so that it
        holds the rank's share of the core.
    """

    sample_seconds: float
    n_samples: int
    max_seconds: float
    n_turns: int = 8

    def on_shared_cores(self, ranks_per_core: float) -> Sampling:
        """Return samples long enough for `ranks_per_core` ranks to take their turns on a core."""
        if ranks_per_core <= 1.0:
            return self
        sample_seconds = max(self.sample_seconds, self.n_turns * TURN_SECONDS * ranks_per_core)
        max_seconds = max(self.max_seconds, 3 * sample_seconds)
        return replace(self, sample_seconds=sample_seconds, max_seconds=max_seconds)


QUICK = Sampling(sample_seconds=1e-3, n_samples=5, max_seconds=0.25)
THOROUGH = Sampling(sample_seconds=5e-3, n_samples=15, max_seconds=1.5)


def ranks_per_core(device: torch.device, n_local_ranks: int) -> float:
    """Return how many threads of ranks compute on each core of this machine; 0 on a GPU."""
    if device.type == "cuda":
        return 0.0
    n_threads = n_local_ranks * int(torch.get_num_threads())
    return n_threads / (os.cpu_count() or 1)


@dataclass(frozen=True)
class Timing:
    """Holds the median seconds of one piece of work, and the relative spread of the samples."""

    seconds: float
    spread_fraction: float

    @classmethod
    def from_samples(cls, samples: Sequence[float]) -> Timing:
        """Summarise samples in as many digits as a profile needs."""
        spread = min(robust_spread_fraction(samples), 1.0)
        return cls(rounded(median(samples), 6), rounded(spread, 3))


def own_time(seconds: float) -> float:
    """Return the time of this rank: ranks that work independently need not agree on one."""
    return seconds


def time_work(
    work: Callable[[], object],
    device: torch.device,
    sampling: Sampling,
    agree: Callable[[float], float] = own_time,
) -> Timing:
    """Time `work`.

    On a GPU, work of one rank alone is issued ahead, so that no kernel waits for its launch. Work
    of several ranks is timed as the host issues it.

    Parameters
    ----------
    agree : callable
        Turns the time of this rank into one on which all ranks agree, such as the longest, so
        that all of them repeat a collective equally often.
    """
    is_ahead = device.type == "cuda" and agree is own_time
    most_loops = MOST_LOOPS_ON_GPU if is_ahead else math.inf

    def sample(n_loops: int) -> float:
        if is_ahead:
            give_host_a_lead(min(n_loops * LEAD_SECONDS, MOST_LEAD_SECONDS))
        return agree(_loop_seconds(work, n_loops, device)) / n_loops

    n_loops = 1
    while True:
        seconds = sample(n_loops) * n_loops
        if seconds >= sampling.sample_seconds or n_loops >= most_loops:
            break
        growth = 1.2 * sampling.sample_seconds / max(seconds, 1e-9)
        wanted = math.ceil(n_loops * min(max(growth, 1.5), 100.0))
        n_loops = int(min(wanted, most_loops))
    affordable = int(sampling.max_seconds / seconds)
    n_samples = max(3, min(sampling.n_samples, affordable))
    if affordable > n_samples:
        _warm_up(lambda: sample(n_loops))
    return Timing.from_samples([sample(n_loops) for _ in range(n_samples)])


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
