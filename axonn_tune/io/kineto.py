"""Read the trace of one rank by torch's profiler (Kineto): kernels and collectives with sizes.

A kernel has the "External id" of the operation that launched it, whose "Input Dims" are in the
trace if the profiler ran with ``record_shapes=True``. A kernel of NCCL or RCCL has the arguments of
its collective (pytorch/kineto, libkineto/src/output_json.cpp). A trace of a CPU has no kernels: its
operations are those of torch themselves, and the collectives of gloo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from axonn_tune.errors import FileError
from axonn_tune.io.files import FileName, read_packed_text, read_text
from axonn_tune.io.json_files import parse_json
from axonn_tune.io.logs.collective_log import kind_in
from axonn_tune.spec.traced import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MEMORY_BOUND,
    OPTIMIZER,
    PRODUCT,
    UNKNOWN_COLLECTIVE,
    Trace,
    TracedOperation,
)

LARGEST_TRACE_BYTES = 2**29
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = "ProfilerStep#"
_GLOO = "gloo:"
_CPU_ATTENTION = "aten::_scaled_dot_product"
_NCCL = re.compile(r"^(?:nccl|rccl|mscclKernel)")
# The first two dimensions of these operations' matrices are at these places of their inputs.
_PRODUCTS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
}
_PRODUCT_KERNEL = re.compile(r"gemm|nvjet|xmma|Cijk_|cutlass", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|sdpa|attn", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd|bprop", re.IGNORECASE)
_OPTIMIZER = re.compile(r"adam|multi_tensor_apply|optimizer|lamb", re.IGNORECASE)
_ELEMENT_BYTES = {
    "BFloat16": 2,
    "Half": 2,
    "Float": 4,
    "Double": 8,
    "Byte": 1,
    "Char": 1,
    "Int": 4,
    "Long": 8,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
}
# Versions of torch before 2.5 leave the value out where a group has no description.
_NO_VALUE = re.compile(r'("Process Group Description": ?),')


def load_trace(path: FileName) -> Trace:
    """Return the kernels and collectives of a trace, or a CPU's operations and collectives.

    Raises
    ------
    FileError
        The file, which may be packed with gzip, cannot be read, is no trace, or has nothing that
        ran.
    """
    name = os.fspath(path)
    read = read_packed_text if name.endswith(".gz") else read_text
    document = parse_json(_NO_VALUE.sub(r'\1"",', read(path, LARGEST_TRACE_BYTES)), path)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise FileError(
            f"{name}: not a trace of torch's profiler; allowed: JSON with a list traceEvents"
        )
    complete = [event for event in events if _is_complete(event)]
    kernels = [event for event in complete if event.get("cat") in _KERNELS]
    try:
        if kernels:
            operations = tuple(_operations(kernels, _launchers(complete)))
        else:
            operations = tuple(_cpu_operations(complete, _world_size(document)))
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise FileError(f"{name}: malformed event: {error}") from None
    if not operations:
        raise FileError(f"{name}: it has neither kernels nor operations with times")
    steps = {event["name"] for event in complete if event["name"].startswith(_STEP)}
    return Trace(operations, max(len(steps), 1))


def _is_complete(event: object) -> bool:
    """Return whether an event of the trace has a name and a possible duration."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and isinstance(event.get("dur"), int | float)
        and event["dur"] >= 0
        and isinstance(event.get("args", {}), dict)
    )


def _launchers(events: Sequence[Mapping[str, Any]]) -> dict[object, Mapping[str, Any]]:
    """Return the operations of torch by their external id."""
    return {
        event["args"]["External id"]: event
        for event in events
        if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})
    }


def _operations(
    kernels: Sequence[Mapping[str, Any]], launchers: Mapping[object, Mapping[str, Any]]
) -> Iterator[TracedOperation]:
    """Yield the kernels and collectives of a GPU."""
    for event in kernels:
        arguments = event.get("args", {})
        if "Collective name" in arguments or _NCCL.match(event["name"]):
            yield _collective(event["name"], _seconds(event), arguments)
        else:
            launcher = launchers.get(arguments.get("External id"), event)
            yield _kernel(event["name"], launcher, _seconds(event))


def _cpu_operations(
    events: Sequence[Mapping[str, Any]], world_size: int
) -> Iterator[TracedOperation]:
    """Yield the products, the attention and the collectives of a CPU."""
    for event in events:
        name = event["name"]
        is_kernel = name in _PRODUCTS or name.startswith(_CPU_ATTENTION)
        if event.get("cat") == "user_annotation" and name.startswith(_GLOO):
            yield _gloo_collective(event, world_size)
        elif event.get("cat") == "cpu_op" and is_kernel:
            yield _kernel(name, event, _seconds(event))


def _kernel(name: str, launcher: Mapping[str, Any], seconds: float) -> TracedOperation:
    """Return a kernel, whose kind and sizes its name and those of its launcher tell."""
    names = f"{launcher['name']} {name}"
    if launcher["name"] in _PRODUCTS:
        return TracedOperation(name, PRODUCT, seconds, _shape(launcher))
    if _ATTENTION.search(names):
        kind = ATTENTION_BACKWARD if _BACKWARD.search(names) else ATTENTION
    elif _OPTIMIZER.search(names):
        kind = OPTIMIZER
    else:
        kind = PRODUCT if _PRODUCT_KERNEL.search(name) else MEMORY_BOUND
    return TracedOperation(name, kind, seconds)


def _shape(launcher: Mapping[str, Any]) -> tuple[int, ...]:
    """Return m, n and k of a product; those of a batch of products count one product's."""
    dims = launcher.get("args", {}).get("Input Dims")
    if not dims:
        return ()
    first = _PRODUCTS[launcher["name"]]
    left, right = dims[first], dims[first + 1]
    return int(left[-2]), int(right[-1]), int(left[-1])


def _collective(name: str, seconds: float, arguments: Mapping[str, Any]) -> TracedOperation:
    """Return a collective of NCCL, with the sizes that its arguments state."""
    called = str(arguments.get("Collective name", ""))
    kind = _kind(called) or _kind(name) or UNKNOWN_COLLECTIVE
    element = _ELEMENT_BYTES.get(str(arguments.get("dtype", "")), 0)
    received, sent = (int(arguments.get(f"{way} msg nelems", 0)) for way in ("Out", "In"))
    elements = sent if kind in ("reduce_scatter", "all_reduce") else max(received, sent)
    return TracedOperation(
        name,
        kind,
        seconds,
        nbytes=float(elements * element),
        n_ranks=int(arguments.get("Group size", 0)),
        group=str(arguments.get("Process Group Description") or ""),
    )


def _gloo_collective(event: Mapping[str, Any], world_size: int) -> TracedOperation:
    """Return a collective of gloo over all ranks, whose groups a trace does not tell apart."""
    kind = _kind(event["name"]) or UNKNOWN_COLLECTIVE
    arguments = event.get("args", {})
    dims: list[int] = next(iter(arguments.get("Input Dims", [])), [])
    element = 4 if "float" in arguments.get("Input type", []) else 2
    nbytes = float(prod(dims) * element) * (world_size if kind == "all_gather" else 1)
    return TracedOperation(event["name"], kind, _seconds(event), nbytes=nbytes, n_ranks=world_size)


def _kind(name: str) -> str | None:
    """Return the kind of collective that torch's or NCCL's name means."""
    words = name.lower().strip("_")
    if words in ("send", "recv", "gloo:send", "gloo:recv"):
        return "send_recv"
    # Torch names an exchange so if it was told the splits, be they equal or not.
    return kind_in(words.replace("all_to_allv", "all_to_all"))


def _world_size(document: object) -> int:
    """Return the number of ranks that a trace states, or 0."""
    info = document.get("distributedInfo") if isinstance(document, dict) else None
    size = info.get("world_size") if isinstance(info, dict) else None
    return size if isinstance(size, int) else 0


def _seconds(event: Mapping[str, Any]) -> float:
    """Return the duration of an event, which is in microseconds."""
    return 1e-6 * float(event["dur"])
