"""The memory that tensors hold, from every storage that is made, resized or freed."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from axonn_tune.spec.rehearsal import ACTIVATIONS


class MemoryLog:
    """Notes every change of memory in order, so that the peak and its holders can be found later.

    A storage that nobody names counts as activations, which is what forward and backward passes
    leave.
    """

    def __init__(self) -> None:
        self._changes: list[tuple[int, int]] = []  # number of the storage, bytes
        self._live: dict[int, tuple[int, int]] = {}  # number and bytes by address
        self._holders: dict[int, str] = {}
        self._n_storages = 0
        self._step_start = 0

    def begin_step(self) -> None:
        """Look for the peak from here on."""
        self._step_start = len(self._changes)

    def note(self, tensor: torch.Tensor) -> None:
        """Note the storage of a tensor that an operator returned, unless it is known."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._live:
            self._n_storages += 1
            self._live[address] = self._n_storages, 0
            weakref.finalize(storage, self._free, address)
            self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note the size of a storage that is known."""
        known = self._live.get(storage._cdata)
        if known is None:
            return
        number, nbytes = known
        size = storage.nbytes()
        if size != nbytes:
            self._changes.append((number, size - nbytes))
            self._live[storage._cdata] = number, size

    def _free(self, address: int) -> None:
        number, nbytes = self._live.pop(address)
        self._changes.append((number, -nbytes))

    def hold(self, holder: str, tensors: Iterable[torch.Tensor | None]) -> None:
        """Name what holds the storages of some tensors; a later name replaces an earlier one."""
        for number in self._numbers(tensors):
            self._holders[number] = holder

    def hold_rest(self, holder: str, tensors: Iterable[torch.Tensor]) -> None:
        """Name what holds those storages of some tensors that have no holder."""
        for number in self._numbers(tensors):
            self._holders.setdefault(number, holder)

    def _numbers(self, tensors: Iterable[torch.Tensor | None]) -> Iterator[int]:
        for tensor in tensors:
            if tensor is not None:
                known = self._live.get(_local(tensor).untyped_storage()._cdata)
                if known is not None:
                    yield known[0]

    def peak(self) -> tuple[float, dict[str, float]]:
        """Return the most bytes that were held at once in the step, and the bytes by holder."""
        held = highest = sum(change for _, change in self._changes[: self._step_start])
        peak_at = self._step_start
        for position in range(self._step_start, len(self._changes)):
            held += self._changes[position][1]
            if held > highest:
                highest, peak_at = held, position + 1
        by_holder: dict[str, float] = defaultdict(float)
        for number, change in self._changes[:peak_at]:
            by_holder[self._holders.get(number, ACTIVATIONS)] += change
        return float(highest), dict(by_holder)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rank's own part of a tensor that may be spread over ranks."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
