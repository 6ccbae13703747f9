"""Sees every operator that a program calls, and records what it launches, sends and holds."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from axonn_tune.runtime.rehearsal.kernels import kernel_of, one_kernel, tensors_in
from axonn_tune.runtime.rehearsal.memory import MemoryLog
from axonn_tune.runtime.rehearsal.messages import is_of_collectives, message_of
from axonn_tune.spec.rehearsal import GATHERED_WEIGHTS, Rehearsed

# Whole numbers in tensors of up to this size are real: ranks of a mesh, positions, tokens. Masks
# may be larger, since they say how many elements are selected.
MOST_VALUES = 2**18
MOST_OF_MASK = 2**22
_SCALAR = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
_COALESCED = torch.ops.c10d.allreduce_coalesced_.default
_MASKED_SELECT = torch.ops.aten.masked_select.default
_WHOLE = (torch.int64, torch.int32, torch.bool, torch.uint8, torch.int16, torch.int8)


class Tape(TorchDispatchMode):
    """Records while it is `running`; it always keeps account of memory.

    Attributes
    ----------
    counts : Counter
        How often each operation was issued.
    memory : MemoryLog
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = False
        self._looks_away = False
        self.counts: Counter[Rehearsed] = Counter()
        self.memory = MemoryLog()

    def begin_step(self) -> None:
        """Forget what was recorded, and record from here on."""
        self.counts.clear()
        self.memory.begin_step()
        self.running = True

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Note nothing of what is run meanwhile, neither operations nor memory."""
        before, self._looks_away = self._looks_away, True
        try:
            yield
        finally:
            self._looks_away = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and note what it did."""
        if func is _DEVICE:
            return func(*args)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the rank's own parts
        kwargs = kwargs or {}
        if func is _SCALAR and isinstance(args[0], FakeTensor):
            return _stand_in(args[0])
        result = _run(func, types, args, kwargs)
        if self._looks_away:
            return result
        for tensor in tensors_in(result):
            self.memory.note(tensor)
        if func.namespace == "fsdp" or is_of_collectives(func):
            self._collective(func, args, kwargs, result)
        elif self.running:
            kernel = kernel_of(func, args, kwargs, result)
            if kernel is not None:
                self.counts[kernel] += 1
        return result

    def run_as_one(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a function that is one kernel on a GPU, so that its parts leave nothing in memory."""
        with self.looking_away():
            result = function(*args)
        for tensor in tensors_in(result):
            self.memory.note(tensor)
        if self.running:
            self.counts[one_kernel(name, args, result)] += 1
        return result

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Note a message, and the buffers of those that bring weights or take gradients."""
        name = func._schema.name
        if "gather" in name or "scatter" in name or func.namespace == "fsdp":
            self.memory.hold_rest(
                GATHERED_WEIGHTS, tensors_in((args, tuple(kwargs.values()), result))
            )
        if self.running and is_of_collectives(func):
            message = message_of(func, args, kwargs, result)
            if message is not None:
                self.counts[message] += 1


def as_one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is one kernel of a rehearsal; elsewhere it runs as it is."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        tapes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Tape)]
        return tapes[-1].run_as_one(function.__name__, function, args) if tapes else function(*args)

    return run


def _run(func: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run an operator; on whole numbers alone, it really computes."""
    if func is _COALESCED:
        return _one_by_one(*args)
    if func is _MASKED_SELECT and [isinstance(a, FakeTensor) for a in args] == [True, False]:
        return _selected(*args)
    if any(issubclass(kind, FakeTensor) for kind in types) or not _is_small(args, kwargs):
        return func(*args, **kwargs)
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _one_by_one(tensors: list[torch.Tensor], group: Any, op: Any, *_: Any) -> Any:
    """Reduce some tensors one after another, since fake tensors cannot be reduced together."""
    for tensor in tensors:
        _, work = torch.ops.c10d.allreduce_.default([tensor], group, op, None)
    return work


def _selected(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor as long as what a mask with real values selects."""
    with unset_fake_temporarily():
        n_selected = int(mask.expand(torch.broadcast_shapes(mask.shape, tensor.shape)).sum())
    return tensor.new_empty(n_selected)


def _is_small(args: tuple[Any, ...], kwargs: Any) -> bool:
    """Return whether an operator that has no fake argument gives few whole numbers."""
    inputs = list(tensors_in((args, tuple(kwargs.values()))))
    if inputs:
        dtypes = {tensor.dtype for tensor in inputs}
        return dtypes <= set(_WHOLE) and _n_together(inputs) <= _most(dtypes)
    dtype = kwargs.get("dtype")
    numbers = args[0] if args and isinstance(args[0], (list, tuple)) else args
    if not all(isinstance(number, int) for number in numbers):
        return False
    is_whole = dtype in _WHOLE or (dtype is None and all(isinstance(a, int) for a in args))
    return is_whole and math.prod(max(1, abs(number)) for number in numbers) <= _most({dtype})


def _most(dtypes: set[Any]) -> int:
    """Return up to how many elements an operator on tensors of these types really computes."""
    return MOST_OF_MASK if torch.bool in dtypes else MOST_VALUES


def _n_together(inputs: list[torch.Tensor]) -> int:
    """Return the number of elements of tensors once broadcast, or the sum if they cannot be."""
    try:
        return torch.broadcast_shapes(*(tensor.shape for tensor in inputs)).numel()
    except RuntimeError:
        return sum(tensor.numel() for tensor in inputs)


def _stand_in(tensor: torch.Tensor) -> float | int | bool:
    """Return what a program reads where it asks for a number that nobody knows."""
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1
