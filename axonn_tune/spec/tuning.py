"""Fine-tuning: adapters that are trained beside weights, and parts of a model that are frozen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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


_LAYERS = re.compile(r"layers:0-(\d+)")


@dataclass(frozen=True)
class Frozen:
    """The parts of a model whose weights are frozen; all others are trained.

    Frozen layers are the first ones, so that nothing below the lowest trained layer has a backward
    pass.

    embedding
        Whether the embedding is frozen.
    n_layers
        Number of layers after it that are frozen.
    head
        Whether the final norm and the head are frozen.
    """

    embedding: bool = False
    n_layers: int = 0
    head: bool = False

    def __post_init__(self) -> None:
        require_count("frozen", "n_layers", self.n_layers, least=0)
        if self.n_layers and not self.embedding:
            layers = f"layers:0-{self.n_layers - 1}"
            raise InputError(
                f"--frozen {layers}: the embedding below is trained; allowed: embedding,{layers}"
            )

    @classmethod
    def of_text(cls, text: str) -> Frozen:
        """Read parts such as ``embedding,layers:0-23,head``; an empty text freezes nothing."""
        embedding, n_layers, head = False, 0, False
        for part in filter(None, (part.strip() for part in text.split(","))):
            if layers := _LAYERS.fullmatch(part):
                n_layers = int(layers[1]) + 1
            elif part == "embedding":
                embedding = True
            elif part == "head":
                head = True
            else:
                raise InputError(
                    f"--frozen {text[:60]}: '{part[:40]}' is not a part; allowed: embedding, "
                    "layers:0-N (from the first layer on), head"
                )
        return cls(embedding, n_layers, head)

    def layers_above(self, layers: Sequence[int]) -> Sequence[int]:
        """Return the given layers without those that are frozen."""
        return [layer for layer in layers if layer >= self.n_layers] if self.n_layers else layers

    def __bool__(self) -> bool:
        return self.embedding or self.head

    def __str__(self) -> str:
        parts = [
            *["embedding"] * self.embedding,
            *[f"layers:0-{self.n_layers - 1}"] * (self.n_layers > 0),
            *["head"] * self.head,
        ]
        return ",".join(parts)


NOTHING_FROZEN = Frozen()
