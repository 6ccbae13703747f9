"""The collectives that an engine calls in torch.distributed, issued and recorded by the runtime.

An engine gives its collectives no names. Each is recorded under its kind and the axis of its ranks
(`names.over_axis`), under which it is compared with all such collectives of the plan. On a CPU it
goes through the runtime's own exchange, which calibration measured: gloo's does not use a slow link
in both directions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from axonn_tune.runtime.ranks.collectives import Issuer, issuer_of
from axonn_tune.runtime.ranks.recorder import PendingCollective
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.spec import names
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.groups import axes_by_ranks
from axonn_tune.spec.layout import Axes, Layout


class TorchCalls:
    """Functions that take the place of torch's own while an engine trains on a layout."""

    def __init__(self, recorder: WaitRecorder, layout: Layout, axes: Axes) -> None:
        self._recorder = recorder
        self._axes = axes_by_ranks(Placements.of([layout], axes=axes), dist.get_rank())
        self._issuers: dict[tuple[int, ...], Issuer] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Let the collectives that are called within this context come here.

        A rehearsal sees them without this.
        """
        if dist.get_backend() == "fake":
            yield
            return
        replacements: Mapping[str, Callable[..., Any]] = {
            "all_reduce": self._all_reduce,
            "all_gather_into_tensor": self._all_gather_into_tensor,
            "all_gather": self._all_gather,
            "reduce_scatter_tensor": self._reduce_scatter_tensor,
        }
        with ExitStack() as patches:
            for name, function in replacements.items():
                patches.enter_context(patch.object(dist, name, function))
            yield

    def _all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> PendingCollective | None:
        return self._issued("all_reduce", group, async_op, tensor, tensor, op)

    def _all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> PendingCollective | None:
        arguments = (output_tensor, input_tensor)
        return self._issued("all_gather", group, async_op, output_tensor, *arguments)

    def _all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        full = tensor.new_empty(len(tensor_list) * tensor.numel())
        self._all_gather_into_tensor(full, tensor, group)
        for part, gathered in zip(tensor_list, full.tensor_split(len(tensor_list)), strict=True):
            part.copy_(gathered.view_as(part))

    def _reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> PendingCollective | None:
        assert op == dist.ReduceOp.SUM
        return self._issued("reduce_scatter", group, async_op, input, output, input)

    def _issued(
        self,
        kind: str,
        group: dist.ProcessGroup | None,
        async_op: bool,
        full: torch.Tensor,
        *arguments: Any,
    ) -> PendingCollective | None:
        """Issue a collective, and wait for it unless the engine waits itself."""
        group = group or dist.group.WORLD
        assert group is not None
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return _alone(arguments)
        if ranks not in self._issuers:
            self._issuers[ranks] = issuer_of(group)
        start = partial(getattr(self._issuers[ranks], kind), *arguments)
        axis = self._axes.get(ranks, f"{len(ranks)} ranks")
        name = names.over_axis(kind, axis)
        pending = self._recorder.collective(name, kind, full.nbytes, axis, start)
        if async_op:
            return pending
        pending.wait()
        return None


class _Done:
    """A collective of one rank, which is done at once."""

    def wait(self) -> None:
        """Return at once, since nothing has to be awaited."""

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that is done already."""
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


@torch.no_grad()
def _alone(arguments: tuple[Any, ...]) -> PendingCollective:
    """Copy what a rank sends to itself: the second tensor, where there is one, to the first."""
    into, source = arguments
    if isinstance(source, torch.Tensor):
        into.copy_(source.view_as(into))
    return _Done()
