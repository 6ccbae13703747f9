"""Precisions: the number formats of matrix products, and the recipes that cast to them.

A recipe runs the three products of each linear layer of a block (its output, dI and dW) in a low
format; their results are in the job's type. The embedding, the router of experts, norms and, unless
an engine says otherwise, the head and attention stay in the job's type (DeepSeek-V3, arXiv
2412.19437, section 3.3; Transformer Engine's autocast, of which Megatron-Core puts only the blocks
under its recipe).

The numbers are Transformer Engine's (d0067d0d, docs/features/low_precision_training and
transformer_engine/pytorch), unless a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of an element in the types of weights and activations.
BYTES_PER_ELEMENT = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}


@dataclass(frozen=True)
class NumberFormat:
    """A format of the operands of products.

    nbytes
        Bytes of an element with its share of the scales.
    nearest
        Other formats, the nearest first, whose measured products stand for those of this format.
    """

    nbytes: float
    nearest: tuple[str, ...]


FORMATS = {
    # One scale for a tensor (fp8_current_scaling.rst).
    "fp8": NumberFormat(1.0, ("mxfp8", "fp8_block", "bf16", "fp16")),
    # A scale of four bytes for 128 elements (fp8_blockwise_scaling.rst).
    "fp8_block": NumberFormat(1.0 + 4.0 / 128.0, ("fp8", "mxfp8", "bf16", "fp16")),
    # A scale of one byte for 32 elements (mxfp8.rst).
    "mxfp8": NumberFormat(1.0 + 1.0 / 32.0, ("fp8", "fp8_block", "bf16", "fp16")),
    # A scale of one byte for 16 elements of four bits (nvfp4.rst).
    "nvfp4": NumberFormat(0.5 + 1.0 / 16.0, ("mxfp8", "fp8", "fp8_block", "bf16", "fp16")),
}
# The format of products of fp32 in a job of 16 bits. Tensor cores form them at half the rate of 16
# bits (NVIDIA's datasheets: 156 of 312 TFLOP/s on A100, 495 of 989 on H100), and all elements are
# twice as long, so that they take twice as long as products in the job's type.
TF32 = "tf32"
TF32_FACTOR = 2.0
# The format of attention in 8 bits: one scale for a tensor, as for products.
EIGHT_BITS = "fp8"
# All formats in which products may be priced or measured.
PRODUCT_FORMATS = (*BYTES_PER_ELEMENT, *FORMATS)


def operand_bytes(number_format: str) -> float:
    """Return the bytes of an element of an operand, one of `PRODUCT_FORMATS`."""
    low = FORMATS.get(number_format)
    return BYTES_PER_ELEMENT[number_format] if low is None else low.nbytes


def result_bytes(number_format: str) -> float:
    """Return the bytes of an element of a product, which is bf16 where operands are low."""
    return BYTES_PER_ELEMENT.get(number_format, BYTES_PER_ELEMENT["bf16"])


@dataclass(frozen=True)
class Recipe:
    """How the operands of a low product are cast.

    number_format
        Format of both operands, one of `FORMATS`.
    reads
        Number of times that a cast reads its tensor.
    reads_after_norm
        The same for a norm's output, whose largest value the norm's kernel may find, or which it
        may write in the low format itself (csrc/extensions/normalization.cpp, `Impl`); and for what
        an activation forms, if the engine has such kernels.
    quantises_columns
        Whether the backward pass needs a second copy, whose scales run along the columns and which
        is cast from the original tensor. Otherwise both passes use one copy, which a GPU that reads
        operands along rows only transposes.
    saves_attention_cast
        Whether proj saves its cast input although attention saves the same tensor uncast
        (Megatron-Core d98e8a64, core/transformer/attention.py, set_save_original_input). Otherwise
        the backward pass casts that tensor again.
    casts_experts_apart
        Whether the host allocates and casts the operand of each expert by itself, with kernels for
        its largest value, its scale and its copies (Transformer Engine d0067d0d,
        csrc/extensions/cast.cpp, `split_quantize`, and csrc/quantizer.cpp).
    gathers_low
        Whether weights that are kept in the format alone are also gathered in it. MXFP8's copies
        along the columns cannot be formed from those along the rows, so that both are cast from
        what has been gathered in the job's type (Megatron-Core d98e8a64,
        core/distributed/param_and_grad_buffer.py, `_post_param_sync`).
    slowdown
        Time of a cast over that of a kernel which only streams the same bytes. It is above 1 where
        a cast finds scales of small blocks along both sides, and rotates or rounds at random.
    """

    number_format: str
    reads: float
    reads_after_norm: float
    quantises_columns: bool
    saves_attention_cast: bool = False
    casts_experts_apart: bool = False
    gathers_low: bool = True
    slowdown: float = 1.0

    @property
    def knows_scales(self) -> bool:
        """Whether scales come from earlier steps, so that a kernel can write the low format."""
        return self.reads_after_norm == 0.0

    @property
    def finds_scale_of_tensor(self) -> bool:
        """Whether a cast finds one scale for the whole tensor, in a read of its own."""
        return self.reads > 1.0


# The precision in which products have the job's type, and no tensor is cast.
FULL = "bf16"
RECIPES = {
    # Scales come from earlier steps, so that a cast reads once (fp8_delayed_scaling.rst).
    "fp8-delayed": Recipe("fp8", 1.0, 0.0, False, saves_attention_cast=True),
    # One read finds the largest value, another casts (fp8_current_scaling.rst).
    "fp8-current": Recipe("fp8", 2.0, 1.0, False, casts_experts_apart=True),
    # A block of 128 or 128 x 128 is read once for its scale and its cast
    # (fp8_blockwise_scaling.rst).
    "fp8-block": Recipe("fp8_block", 1.0, 1.0, True),
    # Measured: the casts of a layer's products on B300 take 1.82 ms, where their bytes alone would
    # take 1.45 (examples/gemm_profiling/gemm_profiling.rst: with casts 8.984, without 7.161 ms).
    "mxfp8": Recipe("mxfp8", 1.0, 1.0, True, gathers_low=False, slowdown=1.25),
    # The scale of the whole tensor takes a read of its own (nvfp4.rst). Measured: 2.69 ms on B300,
    # where bytes alone would take 1.91 (the same page: 6.453 and 3.764 ms).
    "nvfp4": Recipe("nvfp4", 2.0, 2.0, True, slowdown=1.41),
}
PRECISIONS = (FULL, *RECIPES)
# What users may write for the first low precision that an engine has.
USUAL_LOW = "fp8"
