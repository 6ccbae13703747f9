"""What a call of one of torch's collective operators sends, and over which ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axonn_tune.runtime.rehearsal.kernels import dtype_name, tensors_in
from axonn_tune.spec.rehearsal import Message

# The kind of each operator, by a part of its name that no other one has.
_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send_recv",
}
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


def is_of_collectives(func: Any) -> bool:
    """Return whether an operator is one of torch.distributed's."""
    return func.namespace in _NAMESPACES


def message_of(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Message | None:
    """Return what a call sends; None for waits, barriers and receives, and for a single rank."""
    name = func._schema.name.rpartition("::")[2]
    kind = next((kind for part, kind in _KINDS.items() if part in name), None)
    group = _group_of((*args, *kwargs.values()))
    if kind is None or group is None:
        return None
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    if len(ranks) < 2:
        return None
    sent = list(tensors_in((args, result)))
    # The full buffer is the largest of the tensors: the gathered result, or what is scattered.
    lists = [list(tensors_in(value)) for value in (*args, result)]
    nbytes = max(sum(t.numel() * t.element_size() for t in tensors) for tensors in lists)
    if kind == "send_recv":
        ranks = tuple(sorted({dist.get_rank(), _peer(group, args)}))
    return Message(kind, nbytes, dtype_name(sent[0]), ranks)


def _group_of(values: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments, which may be there by its name."""
    for value in values:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):  # another object, such as the kind of reduction
                continue
        if isinstance(value, dist.ProcessGroup):
            return value
    names = [value for value in values if isinstance(value, str)]
    if names:
        return dist.distributed_c10d._resolve_process_group(names[-1])
    return None


def _peer(group: dist.ProcessGroup, args: tuple[Any, ...]) -> int:
    """Return the rank to which something is sent."""
    number = next(value for value in args if isinstance(value, int))
    return dist.get_process_group_ranks(group)[number]
