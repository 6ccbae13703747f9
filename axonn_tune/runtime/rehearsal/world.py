"""A world of one rank: the other ranks only answer, and tensors have sizes but no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.runtime.ranks.session import reason
from axonn_tune.runtime.rehearsal.memory import MemoryLog
from axonn_tune.runtime.rehearsal.norm import norm_of_gpus
from axonn_tune.runtime.rehearsal.tape import Tape
from axonn_tune.spec.rehearsal import GRADIENTS, OPTIMIZER_STATES, WEIGHTS

# How DTensor finds out the sizes of a result. Older versions of torch have only the second.
_PROPAGATE = next(
    name
    for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")
    if hasattr(ShardingPropagator, name)
)


@contextmanager
def rehearsed(n_ranks: int, rank: int = 0) -> Iterator[Tape]:
    """Be one rank of a job of which no other rank exists, and yield what records it.

    Raises
    ------
    AxonnTuneError
        The program failed; the message is what it said.
    """
    if dist.is_initialized():
        raise InputError("rehearse: this process is a rank of a job; allowed: a process of its own")
    tape = Tape()
    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=FakeStore())
    try:
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            # It logs the traceback of each error besides raising it.
            stack.enter_context(mock.patch.object(fake_tensor.log, "disabled", True))
            stack.enter_context(norm_of_gpus())
            stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _moved))
            stack.enter_context(_seen_resizes(tape.memory))
            stack.enter_context(_seen_optimizers(tape.memory))
            stack.enter_context(_answered_reductions())
            stack.enter_context(_unseen_propagation(tape))
            stack.enter_context(tape)
            yield tape
    except AxonnTuneError:
        raise
    except Exception as error:
        raise AxonnTuneError(f"{type(error).__name__}: {reason(error)}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_swap_tensors = torch.utils.swap_tensors


def _moved(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give a parameter its new type or device, as torch does where tensors are not fake."""
    if isinstance(old, FakeTensor):
        old.data = new.data
    else:
        _swap_tensors(old, new)


@contextmanager
def _seen_resizes(memory: MemoryLog) -> Iterator[None]:
    """Let the memory see storages that are resized, which no operator does."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        resize(storage, size)
        memory.resized(storage)
        return storage

    with mock.patch.object(torch.UntypedStorage, "resize_", resized):
        yield


@contextmanager
def _answered_reductions() -> Iterator[None]:
    """Give DistributedDataParallel its buckets back, of which the fake backend returns none.

    A program that has a communication hook of its own keeps it.
    """
    prepare = DistributedDataParallel._pre_forward

    def reduced(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer(), group=group)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def prepared(module: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        if not module._comm_hooks:
            # torch compares the annotations of a hook with types, and here they are texts.
            hook = lambda group, bucket: reduced(group, bucket)  # noqa: E731
            module.register_comm_hook(module.process_group, hook)
        return prepare(module, *inputs, **named)

    with mock.patch.object(DistributedDataParallel, "_pre_forward", prepared):
        yield


@contextmanager
def _unseen_propagation(tape: Tape) -> Iterator[None]:
    """Let the tape not see how DTensor finds out the sizes of a result.

    DTensor runs each operator once on fake tensors of the whole size, which no rank holds.
    """
    propagate = getattr(ShardingPropagator, _PROPAGATE)

    def propagated(propagator: ShardingPropagator, schema: Any) -> Any:
        with tape.looking_away():
            return propagate(propagator, schema)

    with mock.patch.object(ShardingPropagator, _PROPAGATE, propagated):
        yield


@contextmanager
def _seen_optimizers(memory: MemoryLog) -> Iterator[None]:
    """Name weights, gradients and states whenever one of torch's optimizers makes a step.

    What an optimizer updates and no module has is its own copy of the weights.
    """
    modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def registered(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        modules.add(module)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        updated = [p for group in optimizer.param_groups for p in group["params"]]
        weights = [p for module in modules for p in module._parameters.values() if p is not None]
        memory.hold(OPTIMIZER_STATES, updated)
        memory.hold(WEIGHTS, weights)
        memory.hold(GRADIENTS, [p.grad for p in (*updated, *weights)])

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            held = [value for value in state.values() if isinstance(value, torch.Tensor)]
            memory.hold(OPTIMIZER_STATES, held)

    handles = (
        register_module_parameter_registration_hook(registered),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
