"""How much memory a rank takes: of tensors, of torch's allocator, and of all else."""

from __future__ import annotations

import platform
import resource
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tune.spec.measurement import WARM_UP_STEPS


def peak_memory_bytes(device: torch.device) -> float:
    """Return the most memory in use so far, by tensors on a GPU or by the process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    scale = 1 if platform.system() == "Darwin" else 1024  # getrusage(2)
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * scale


def idle_bytes(device: torch.device) -> float:
    """Return the memory that training cannot use.

    On a GPU this is what is in use but not by tensors. On a CPU it is the most that the process
    ever held, so it must be asked before the process does any work.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free - torch.cuda.memory_allocated(device))
    return peak_memory_bytes(device)


@dataclass(frozen=True)
class Peaks:
    """The most memory of the ranks.

    Attributes
    ----------
    steady_bytes
        While the timed steps ran.
    first_bytes
        From the beginning on: weights are drawn and products are tuned before that.
    held_bytes
        What the allocator held for both; None on a CPU.
    """

    steady_bytes: float
    first_bytes: float
    held_bytes: float | None


class MemoryWatch:
    """Follows the memory of a rank from the building of the model to the last step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first_bytes = 0.0
        self._forget()

    def before_step(self, index: int) -> None:
        """Note that step `index` begins."""
        if index == WARM_UP_STEPS:
            self._first_bytes = peak_memory_bytes(self._device)
            self._forget()

    def of_all_ranks(self) -> Peaks:
        """Return the peaks of the ranks that need most; all ranks call it together."""
        steady = peak_memory_bytes(self._device)
        on_gpu = self._device.type == "cuda"
        held = float(torch.cuda.max_memory_reserved(self._device)) if on_gpu else 0.0
        own = [steady, max(self._first_bytes, steady), held]
        most = torch.tensor(own, dtype=torch.float64, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        steady, first, held = most.tolist()
        return Peaks(steady, first, held if on_gpu else None)

    def _forget(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
