"""What a call of one of torch's operators is: a product, fused attention, or another kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from axonn_tune.spec.rehearsal import FusedAttention, OtherKernel, Product, Rehearsed

# The position of the first factor among the arguments of operators that multiply matrices.
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
_ATTENTION = "_scaled_dot_product_"
# Operators that launch nothing: they make a tensor that nobody has written, or a view of one.
_NO_KERNEL = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "set_",
    "_local_scalar_dense",
    "device",
    "_reshape_alias",
    "_unsafe_view",
    "is_same_size",
}
# Operators that read as many elements of their first argument as they return, not all of them.
_READS_ROWS = {"embedding", "index_select", "gather", "index"}
# Operators that write as many elements of their first argument as they are given.
_WRITES_ROWS = {"scatter_", "scatter_add_", "index_add_", "index_put_"}
# Operators that copy element by element, besides those that torch tags as pointwise.
_COPIES = {"clone", "copy_", "_to_copy"}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def kernel_of(func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> Rehearsed | None:
    """Return what a call launches; None if it launches nothing."""
    name = func._schema.name.rpartition("::")[2]
    if name in _PRODUCTS:
        first = _PRODUCTS[name]
        return _product(args[first], args[first + 1])
    if name.startswith(_ATTENTION):
        return _attention(func, name, args, kwargs)
    if name in _NO_KERNEL or func.is_view:
        return None
    kernel = _other(name, args, kwargs, result)
    if kernel is None or not (torch.Tag.pointwise in func.tags or name in _COPIES):
        return kernel
    moved = [*tensors_in(args), *tensors_in(result)]
    # Wider elements take no longer for it than their bytes do.
    is_narrow = max(tensor.element_size() for tensor in moved) == 2
    return replace(kernel, is_strided=is_narrow and is_strided(moved))


def is_strided(moved: Sequence[torch.Tensor]) -> bool:
    """Return whether a pointwise kernel cannot run through its operands as if they had one axis.

    One of them is broadcast or a slice, or they lie in memory in different orders. Torch's kernels
    then handle one element at a time (ATen/native/cuda/CUDALoops.cuh, gpu_kernel_impl_nocast).
    """
    large = [tensor for tensor in moved if tensor.numel() > 1]
    orders = {tuple(_long_axes(tensor)) for tensor in large}
    is_dense = all(
        sum((size - 1) * stride for size, stride in order) + 1 == math.prod(n for n, _ in order)
        for order in orders
    )
    return len(orders) > 1 or not is_dense


def _long_axes(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield size and stride of the axes that have more than one element."""
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size > 1:
            yield size, stride


def _product(a: torch.Tensor, b: torch.Tensor) -> Product:
    *batch, m, k = a.shape
    mode = ("T" if _is_transposed(a) else "N") + ("T" if _is_transposed(b) else "N")
    return Product(
        m,
        b.shape[-1],
        k,
        "TN" if mode == "TT" else mode,
        dtype_name(a),
        batch=batch[0] if batch else 1,
    )


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Return whether the columns of a matrix lie one after another in memory."""
    rows, columns = matrix.stride()[-2:]
    return columns != 1 and rows == 1


def _attention(func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> FusedAttention:
    is_backward = name.endswith("backward")
    # A backward pass has the gradient of the output before the queries.
    queries = args[1] if is_backward else args[0]
    b, h, s, e = queries.shape
    return FusedAttention(
        b,
        h,
        s,
        e,
        is_backward,
        bool(_argument(func, args, kwargs, "is_causal")),
        dtype_name(queries),
    )


def _argument(func: Any, args: tuple[Any, ...], kwargs: Any, name: str) -> Any:
    """Return the value of an argument of an operator, given or by default."""
    if name in kwargs:
        return kwargs[name]
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else argument.default_value
    return None


def _other(name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> OtherKernel | None:
    read = list(tensors_in((args, tuple(kwargs.values()))))
    written = list(tensors_in(result))
    if name in _READS_ROWS and read:
        read = read[1:] + written
    elif name in _WRITES_ROWS and written:
        given = max(read[1:], key=_nbytes, default=written[0])
        read, written = read[1:], [given, given]
    nbytes = sum(map(_nbytes, read)) + sum(map(_nbytes, written))
    moved = written or read
    return OtherKernel(name, nbytes, dtype_name(moved[0])) if nbytes else None


def one_kernel(name: str, args: tuple[Any, ...], result: Any) -> OtherKernel:
    """Return a kernel that reads its arguments and writes its results."""
    moved = [*tensors_in(args), *tensors_in(result)]
    return OtherKernel(name, sum(map(_nbytes, moved)), dtype_name(moved[0]))


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; those that stand for many count once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type, as options have it, or as torch has it."""
    return DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments or of a result, through lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
