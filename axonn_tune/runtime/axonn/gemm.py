"""Matrix products, each in the mode (NN, NT, TN) that is fastest on this device.

Kernel tuning follows AxoNN (Singh et al., arXiv 2502.08145, section on tuning of BLAS
kernels). The three modes of a library differ in speed, and a mode that needs an operand stored in
another way costs a transposed copy of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from axonn_tune.runtime.ranks.device_stream import give_host_a_lead, recorded_event
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.plan import MODES

N_TIMINGS = 4
# A GPU computes this many products between two events, once the host has issued them.
N_IN_A_ROW = 4
LEAD_SECONDS = 1e-3
# A mode replaces the one in which the operands are stored if it takes less than this part of its
# seconds.
CLEARLY_FASTER = 0.95


class Gemms:
    """Multiplies matrices, and remembers the fastest mode of each shape.

    Attributes
    ----------
    modes : dict
        The mode of each product, by name.
    """

    def __init__(self, recorder: Recorder, tuning: bool) -> None:
        self._recorder = recorder
        self._tuning = tuning
        self._fastest: dict[tuple[object, ...], str] = {}
        self.modes: dict[str, str] = {}

    def __call__(
        self,
        name: str,
        a: torch.Tensor,
        b: torch.Tensor,
        mode: str,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the product, shape (m, n), of two matrices that are stored as `mode` says.

        Parameters
        ----------
        a : shape (m, k); stored as (k, m) in mode TN
        b : shape (k, n); stored as (n, k) in mode NT
        out : shape (m, n), optional
            The tensor to which the product is written.
        bias : shape (n,), optional
            A row to add in the product's epilogue.
        """
        a_mk = a.t() if mode == "TN" else a
        b_kn = b.t() if mode == "NT" else b
        fastest = mode
        if self._tuning:
            key = (mode, a_mk.shape, b_kn.shape, bias is None, a.dtype)
            if key not in self._fastest:
                self._fastest[key] = self._time_modes(mode, a_mk, b_kn, bias)
            fastest = self._fastest[key]
        self.modes[name] = fastest
        if not self._recorder.active:
            return _multiply(a_mk, b_kn, mode, fastest, out, bias)
        with self._recorder.kernel(name, "gemm", flops=2.0 * a_mk.numel() * b_kn.shape[1]):
            return _multiply(a_mk, b_kn, mode, fastest, out, bias)

    def _time_modes(
        self, stored: str, a_mk: torch.Tensor, b_kn: torch.Tensor, bias: torch.Tensor | None
    ) -> str:
        """Return the fastest mode, or the operands' own mode where none is clearly faster.

        Noise only adds time, and comes and goes, so modes take turns and the least time counts.
        """
        seconds = dict.fromkeys(MODES, math.inf)
        for _ in range(N_TIMINGS):
            for mode in MODES:
                multiply = partial(_multiply, a_mk, b_kn, stored, mode, None, bias)
                seconds[mode] = min(seconds[mode], _seconds_of(multiply, a_mk.device))
        fastest = min(MODES, key=seconds.__getitem__)
        return fastest if seconds[fastest] < CLEARLY_FASTER * seconds[stored] else stored


def _multiply(
    a_mk: torch.Tensor,
    b_kn: torch.Tensor,
    stored: str,
    mode: str,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply in a mode; an operand that is stored in another way is copied first."""
    if mode != stored:
        a_mk = a_mk.t().contiguous().t() if mode == "TN" else a_mk.contiguous()
        b_kn = b_kn.t().contiguous().t() if mode == "NT" else b_kn.contiguous()
    if bias is not None:
        return torch.addmm(bias, a_mk, b_kn, out=out)
    return torch.mm(a_mk, b_kn, out=out)


def _seconds_of(multiply: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a product takes.

    On a CPU, whose cores ranks may share, only the time in which this thread runs counts.
    """
    if device.type == "cuda":
        return _device_seconds_of(multiply)
    start = time.thread_time()
    multiply()
    return time.thread_time() - start


def _device_seconds_of(multiply: Callable[[], object]) -> float:
    """Return the seconds that a GPU takes for a product, without the host's time to issue it."""
    give_host_a_lead(LEAD_SECONDS)
    begin = recorded_event()
    for _ in range(N_IN_A_ROW):
        multiply()
    end = recorded_event()
    end.synchronize()
    return 1e-3 * begin.elapsed_time(end) / N_IN_A_ROW


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
