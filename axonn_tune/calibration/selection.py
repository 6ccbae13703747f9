"""Choose the shapes, sizes and groups of ranks that a calibration measures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tune.calibration.measure.kernels import Workload
from axonn_tune.calibration.measure.links import Groups
from axonn_tune.calibration.measure.shapes import GemmShape
from axonn_tune.calibration.measure.timing import QUICK, THOROUGH, Sampling
from axonn_tune.runtime.axonn.engine import DTYPES as TRAINED_DTYPES
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import KINDS, MODES

SMALLEST_MESSAGE_BYTES = 2**10
# AxoNN uses these collectives; a thorough calibration measures the others too.
QUICK_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# A quick calibration measures at most this many pairs of a stride and a size, if it can.
MOST_PAIRS = 10


@dataclass(frozen=True)
class Extent:
    """How much a calibration measures.

    Parameters
    ----------
    sampling : Sampling
        Says how long to measure one thing.
    gemm_sizes : tuple of int
        Values of m, n and k; products of all combinations are measured.
    copy_bytes : tuple of int
        Bytes that plain copies move.
    kernel_tokens : tuple of int
        Tokens of the steps in which kernels are timed.
    n_kernel_steps : int
        Number of steps in which kernels are timed, after the warm-up.
    message_growth : int
        Ratio of one message size to the one before.
    most_bytes : int
        Size of the largest message. [bytes]
    longest_seconds : float
        Work that takes longer than this once is left out. [s]
    sustain_seconds : float
        Time of products before the clocks count as settled. [s]
    is_quick : bool
        Whether fewer kinds of work are measured.
    """

    sampling: Sampling
    gemm_sizes: tuple[int, ...]
    copy_bytes: tuple[int, ...]
    kernel_tokens: tuple[int, ...]
    n_kernel_steps: int
    message_growth: int
    most_bytes: int
    longest_seconds: float
    sustain_seconds: float
    is_quick: bool


def quick_extent(on_gpu: bool) -> Extent:
    """Return the extent of a calibration that takes about a minute."""
    return Extent(
        sampling=QUICK,
        gemm_sizes=(1024, 8192) if on_gpu else (128, 1024),
        # The largest copy must not fit in a cache: 256 MiB on an MI300X (AMD's data sheet).
        copy_bytes=(2**14, 2**20, 2**30) if on_gpu else (2**14, 2**20, 2**26),
        kernel_tokens=(1024, 8192) if on_gpu else (128, 1024),
        n_kernel_steps=4,
        message_growth=4,
        most_bytes=2**28 if on_gpu else 2**24,
        longest_seconds=0.4,
        sustain_seconds=1.0,
        is_quick=True,
    )


def thorough_extent(on_gpu: bool) -> Extent:
    """Return the extent of a thorough calibration."""
    return Extent(
        sampling=THOROUGH,
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
    """Return the products of all combinations of sizes, smallest first.

    >>> from axonn_tune.calibration.selection import gemm_shapes, quick_extent
    >>> len(gemm_shapes(quick_extent(on_gpu=True), ["bf16"]))
    24
    """
    sizes = itertools.product(extent.gemm_sizes, repeat=3)
    return [
        GemmShape(m, n, k, mode, dtype)
        for m, n, k in sorted(sizes, key=lambda mnk: mnk[0] * mnk[1] * mnk[2])
        for dtype in dtypes
        for mode in MODES
    ]


def workloads(
    extent: Extent, dtypes: Sequence[str], models: Sequence[Model], on_gpu: bool
) -> list[Workload]:
    """Return small models with the kernels of `models`, each with few, some and many tokens."""
    hidden_size = 1024 if on_gpu else 256
    seq_len = 1024 if on_gpu else 128
    small_models = [_one_block_like(model, hidden_size) for model in models]
    attentions = ("flash",) if extent.is_quick else ("flash", "unfused")
    return [
        Workload(model, min(seq_len, n_tokens), max(n_tokens // seq_len, 1), dtype, attention)
        for dtype in dtypes
        if dtype in TRAINED_DTYPES
        for model in small_models
        for attention in attentions
        for n_tokens in extent.kernel_tokens
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

# The positions of the small models are parameters, one for each token of a sequence.
LONGEST_SEQUENCE = 1024


def _one_block_like(model: Model, hidden_size: int) -> Model:
    """Return a model of one block with the kinds of kernels of `model` and heads of 64."""
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
    """Return the bytes that plain copies move, as far as memory allows."""
    return [size for size in extent.copy_bytes if size <= memory_bytes / 4]


def collective_kinds(extent: Extent) -> tuple[str, ...]:
    """Return the kinds of collectives to measure."""
    return QUICK_KINDS if extent.is_quick else KINDS


def group_choices(
    extent: Extent, n_ranks: int, n_per_node: int, units: Sequence[int]
) -> list[Groups]:
    """Return the groups of every axis that a grid can have, then parts of them.

    A quick calibration of many ranks keeps to the axes that fill a unit, or that have a rank in
    each of several. Fewer rings at once, and one block alone, show how rings share links.

    Parameters
    ----------
    units : ints
        Number of ranks in a unit of each link level.
    """
    axes = [
        (stride, size)
        for stride, size in itertools.product(range(1, n_ranks + 1), range(2, n_ranks + 1))
        if n_ranks % (stride * size) == 0
    ]
    if extent.is_quick and len(axes) > MOST_PAIRS:
        ends = {*units, n_per_node, n_ranks}
        axes = [(stride, size) for stride, size in axes if stride * size in ends or stride in ends]
    whole = [Groups(stride, size, stride, True) for stride, size in axes]
    return whole + _parts_of_axes(extent, axes, n_ranks, n_per_node)


def _parts_of_axes(
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
    """Return the sizes of full buffers, smallest first, up to `most_bytes`."""
    sizes = []
    size = SMALLEST_MESSAGE_BYTES
    while size <= min(extent.most_bytes, most_bytes):
        sizes.append(size)
        size *= extent.message_growth
    return sizes
