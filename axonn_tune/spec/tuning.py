"""Fine-tuning with low-rank adapters: what is trained beside weights that stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import Linear
from axonn_tune.spec.checks import require_choice, require_count

# The weights of a block beside which adapters may stand, by what users may name.
TARGETS = {
    "attention": ("qkv", "proj"),
    "mlp": ("up", "down"),
    **{layer: (layer,) for layer in ("qkv", "proj", "up", "down")},
}


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA; Hu et al., arXiv 2106.09685); all other weights are frozen.

    Beside a weight W (k x n) stand A (k x rank) and B (rank x n), and the layer's output becomes
    ``I W + scale * (I A) B``. Only A and B have gradients and optimizer states.

    rank
        Number of columns of A, and of rows of B.
    targets
        Weights beside which adapters stand, keys of `TARGETS`.
    dropout
        Whether dropout precedes A.
    """

    rank: int
    targets: tuple[str, ...] = ("attention", "mlp")
    dropout: bool = False

    def __post_init__(self) -> None:
        require_count("adapters", "rank", self.rank)
        if not self.targets:
            raise InputError(f"adapters: targets is empty; allowed: some of {', '.join(TARGETS)}")
        for target in self.targets:
            require_choice("adapters", "targets", target, TARGETS)

    def are_beside(self, layer: str) -> bool:
        """Return whether an adapter stands beside a weight of a block."""
        return any(layer in TARGETS[target] for target in self.targets)

    def n_beside(self, linears: Iterable[Linear]) -> int:
        """Return the number of weights among some layers that have adapters."""
        return sum(self.are_beside(linear.name) for linear in linears)

    def parameters_beside(self, linear: Linear) -> float:
        """Return the number of elements of A and B beside a weight; 0 where there is no adapter."""
        if not self.are_beside(linear.name):
            return 0.0
        return float(self.rank) * (linear.n_in + linear.n_out)

    def __str__(self) -> str:
        dropout = ", with dropout" if self.dropout else ""
        return f"adapters of rank {self.rank} beside {' and '.join(self.targets)}{dropout}"
