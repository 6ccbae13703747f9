"""What to measure: shapes, sizes and groups, for a quick or a thorough calibration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tune.calibrate.measure.gemm import GemmShape
from axonn_tune.calibrate.measure.kernels import Workload
from axonn_tune.calibrate.measure.links import Groups
from axonn_tune.calibrate.measure.timing import QUICK, THOROUGH, Effort
from axonn_tune.runtime.axonn.engine import DTYPES as TRAINED_DTYPES
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import KINDS, MODES

SMALLEST_MESSAGE_BYTES = 2**10
# AxoNN's own collectives; a thorough calibration measures the others too.
QUICK_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
MOST_PAIRS = 10  # of strides and sizes in a quick calibration


@dataclass(frozen=True)
class Extent:
    """How much to measure.

    gemm_sizes: values of m, n and k of the grid of products. Work that takes longer than
    `longest_seconds` once is left out, and so are messages above `most_bytes`.
    """

    effort: Effort
    gemm_sizes: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    kernel_tokens: tuple[int, ...]
    n_kernel_steps: int
    message_growth: int
    most_bytes: int
    longest_seconds: float
    sustain_seconds: float
    is_quick: bool


def extent_of(is_quick: bool, on_gpu: bool) -> Extent:
    """A minute or so, or a thorough calibration."""
    if is_quick:
        return Extent(
            effort=QUICK,
            gemm_sizes=(1024, 8192) if on_gpu else (128, 1024),
            copy_bytes=(2**14, 2**20, 2**26),
            kernel_tokens=(1024, 8192) if on_gpu else (128, 1024),
            n_kernel_steps=4,
            message_growth=4,
            most_bytes=2**28 if on_gpu else 2**24,
            longest_seconds=0.4,
            sustain_seconds=1.0,
            is_quick=True,
        )
    return Extent(
        effort=THOROUGH,
        gemm_sizes=(256, 1024, 4096, 16384) if on_gpu else (64, 256, 1024, 4096),
        copy_bytes=tuple(2**power for power in range(12, 31, 2)),
        kernel_tokens=(256, 1024, 4096, 16384) if on_gpu else (64, 256, 1024, 4096),
        n_kernel_steps=10,
        message_growth=4,
        most_bytes=2**30,
        longest_seconds=5.0,
        sustain_seconds=10.0,
        is_quick=False,
    )


def gemm_shapes(extent: Extent, dtypes: Sequence[str]) -> list[GemmShape]:
    """The grid of products, smallest first.

    >>> from axonn_tune.calibrate.plan import extent_of, gemm_shapes
    >>> len(gemm_shapes(extent_of(is_quick=True, on_gpu=True), ["bf16"]))
    24
    """
    sizes = itertools.product(extent.gemm_sizes, repeat=3)
    return [
        GemmShape(m, n, k, mode, dtype)
        for m, n, k in sorted(sizes, key=lambda s: s[0] * s[1] * s[2])
        for dtype in dtypes
        for mode in MODES
    ]


def workloads(
    extent: Extent, dtypes: Sequence[str], models: Sequence[Model], on_gpu: bool
) -> list[Workload]:
    """Small models that train on few, some and many tokens; all kinds of kernels of `models`."""
    hidden_size = 1024 if on_gpu else 256
    seq_len = 1024 if on_gpu else 128
    small = {model.name: _small(model, hidden_size) for model in models}
    return [
        Workload(small[model.name], min(seq_len, n), max(n // seq_len, 1), dtype, attention)
        for dtype in dtypes
        if dtype in TRAINED_DTYPES
        for model in models
        for attention in (("flash",) if extent.is_quick else ("flash", "unfused"))
        for n in extent.kernel_tokens
    ]


GPT_LIKE = Model("gpt-like", 1, 256, 4, 512, 128)
LLAMA_LIKE = Model(
    "llama-like",
    1,
    256,
    4,
    512,
    128,
    gated_mlp=True,
    norm="rms",
    position="rotary",
    bias=False,
    tied_embeddings=False,
)


# Of the small models, whose positions are parameters.
LONGEST_SEQUENCE = 1024


def _small(model: Model, hidden_size: int) -> Model:
    """A model of one block with the kinds of kernels of another one, and heads of 64."""
    return Model(
        name=f"one block like {model.name}",
        n_layers=1,
        hidden_size=hidden_size,
        n_heads=hidden_size // 64,
        vocab_size=2 * hidden_size,
        seq_len=LONGEST_SEQUENCE,
        gated_mlp=model.gated_mlp,
        norm=model.norm,
        position=model.position,
        bias=model.bias,
        tied_embeddings=model.tied_embeddings,
    )


def copy_sizes(extent: Extent, memory_bytes: float) -> list[int]:
    """Bytes that plain copies move."""
    return [size for size in extent.copy_bytes if size <= memory_bytes / 4]


def kinds(extent: Extent) -> tuple[str, ...]:
    """Kinds of collectives to measure."""
    return QUICK_KINDS if extent.is_quick else KINDS


def group_choices(
    extent: Extent, n_ranks: int, n_per_node: int, units: Sequence[int]
) -> list[Groups]:
    """Groups that communicate: those of every axis that a grid can have, then parts of them.

    A quick calibration of many ranks keeps to the axes that fill a unit, or that have a rank in
    each of several. Fewer rings at once, and one block alone, show how rings share links.
    """
    axes = [
        (stride, size)
        for stride, size in itertools.product(range(1, n_ranks + 1), range(2, n_ranks + 1))
        if n_ranks % (stride * size) == 0
    ]
    if extent.is_quick and len(axes) > MOST_PAIRS:
        ends = {*units, n_per_node, n_ranks}
        axes = [axis for axis in axes if axis[0] * axis[1] in ends or axis[0] in ends]
    whole = [Groups(stride, size, stride, True) for stride, size in axes]
    return whole + _parts(extent, axes, n_ranks, n_per_node)


def _parts(
    extent: Extent, axes: Sequence[tuple[int, int]], n_ranks: int, n_per_node: int
) -> list[Groups]:
    parts = []
    for stride, size in axes:
        crosses_nodes = stride == n_per_node and n_per_node < n_ranks
        if crosses_nodes:
            counts = [2**i for i in range(n_per_node.bit_length()) if 2**i < stride]
            parts += [Groups(stride, size, n_rings, True) for n_rings in counts]
        elif not extent.is_quick and stride * size < n_ranks:
            parts.append(Groups(stride, size, 1, False))
        elif not extent.is_quick and stride > 1:
            parts.append(Groups(stride, size, 1, True))
    return parts


def message_sizes(extent: Extent, most_bytes: float) -> list[int]:
    """Full buffers, smallest first, as far as memory allows."""
    sizes, size = [], SMALLEST_MESSAGE_BYTES
    while size <= min(extent.most_bytes, most_bytes):
        sizes.append(size)
        size *= extent.message_growth
    return sizes
