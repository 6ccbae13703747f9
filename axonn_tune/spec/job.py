"""What the user wants to run, apart from the grid."""

from __future__ import annotations

from dataclasses import dataclass, field

from axonn_tune.spec.checks import require_choice, require_count

BYTES_PER_ELEMENT = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
ATTENTIONS = ("flash", "unfused")


@dataclass(frozen=True)
class Overlap:
    """Which collectives run beside computation (AxoNN's three overlaps).

    oar: the backward all-reduce of dI beside the dW product.
    ors: the reduce-scatter of dW behind the rest of the backward pass.
    oag: the all-gather of the next weight beside the present layer.
    """

    oar: bool = True
    ors: bool = True
    oag: bool = True

    def __str__(self) -> str:
        active = [name.upper() for name in ("oar", "ors", "oag") if getattr(self, name)]
        return "+".join(active) if active else "none"


@dataclass(frozen=True)
class Job:
    """One training step: the GPUs, the global batch and the numerical choices."""

    n_gpus: int
    global_batch: int  # sequences per optimizer step
    seq_len: int
    dtype: str = "bf16"
    attention: str = "flash"
    overlap: Overlap = field(default_factory=Overlap)
    kernel_tuning: bool = True
    keep_gathered_weights: bool = False
    dropout: bool = False  # after attention's softmax, and before both additions of a block

    def __post_init__(self) -> None:
        for name in ("n_gpus", "global_batch", "seq_len"):
            require_count("job", name, getattr(self, name))
        require_choice("job", "dtype", self.dtype, BYTES_PER_ELEMENT)
        require_choice("job", "attention", self.attention, ATTENTIONS)

    @property
    def element_bytes(self) -> float:
        """Bytes of a weight or activation element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def tokens(self) -> float:
        """Tokens of one global batch."""
        return float(self.global_batch) * self.seq_len
