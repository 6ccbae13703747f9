"""A transformer's shape, its parameter count and its FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_choice, require_count

VOCABULARY_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by default
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Linear:
    """One weight of a transformer block: ``n_in`` rows, ``n_out`` columns, with or without bias.

    A transposed layer exchanges the X and Y axes of the grid.
    """

    name: str
    n_in: int
    n_out: int
    transposed: bool
    bias: bool

    @property
    def parameters(self) -> float:
        """Elements of the weight, without the bias."""
        return float(self.n_in) * self.n_out


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Raises
    ------
    InputError
        A count that is not a positive whole number, or sizes that do not divide.
    """

    name: str
    n_layers: int
    hidden_size: int
    n_heads: int
    vocab_size: int
    seq_len: int
    n_kv_heads: int = 0
    head_dim: int = 0
    ffn_hidden_size: int = 0
    gated_mlp: bool = False
    norm: str = "layer"
    position: str = "learned"
    bias: bool = True
    qkv_bias: bool | None = None
    tied_embeddings: bool = True
    parallel_block: bool = False
    published_parameters: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        owner = f"model '{self.name}'"
        for name in ("n_layers", "hidden_size", "n_heads", "vocab_size", "seq_len"):
            require_count(owner, name, getattr(self, name))
        if not self.head_dim and self.hidden_size % self.n_heads:
            raise InputError(
                f"{owner}: hidden_size is {self.hidden_size}; allowed: a multiple of n_heads "
                f"({self.n_heads}), or give head_dim"
            )
        for name, default in (
            ("n_kv_heads", self.n_heads),
            ("head_dim", self.hidden_size // self.n_heads),
            ("ffn_hidden_size", 4 * self.hidden_size),
        ):
            if getattr(self, name) in (0, None):
                object.__setattr__(self, name, default)
            require_count(owner, name, getattr(self, name))
        if self.qkv_bias is None:
            object.__setattr__(self, "qkv_bias", self.bias)
        require_choice(owner, "norm", self.norm, ("layer", "rms"))
        require_choice(owner, "position", self.position, ("learned", "rotary", "none"))
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"{owner}: n_kv_heads is {self.n_kv_heads}; allowed: a divisor of "
                f"n_heads ({self.n_heads})"
            )

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 128, so that it divides over the grid."""
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def block_linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The four weights of a block in forward order: qkv, proj, up, down."""
        heads, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        up = self.ffn_hidden_size * (2 if self.gated_mlp else 1)
        return (
            Linear("qkv", self.hidden_size, heads + 2 * kv, False, bool(self.qkv_bias)),
            Linear("proj", heads, self.hidden_size, True, self.bias),
            Linear("up", self.hidden_size, up, False, self.bias),
            Linear("down", self.ffn_hidden_size, self.hidden_size, True, self.bias),
        )

    @property
    def head(self) -> Linear:
        """The projection onto the (padded) vocabulary."""
        return Linear("head", self.hidden_size, self.padded_vocab_size, False, False)

    @property
    def block_matmul_parameters(self) -> float:
        """Weight elements of one block's four linear layers."""
        return sum(linear.parameters for linear in self.block_linears)

    @property
    def norm_parameters(self) -> int:
        """Elements of one norm: gain, and a shift for layer norm."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def n_norms(self) -> int:
        """Norms in a whole model: two in each block and a final one."""
        return 2 * self.n_layers + 1

    @property
    def position_parameters(self) -> int:
        """Elements of a learned position embedding."""
        return self.seq_len * self.hidden_size if self.position == "learned" else 0

    @property
    def parameters(self) -> float:
        """All trainable elements, with the vocabulary as published (not padded)."""
        embedding = float(self.vocab_size) * self.hidden_size
        biases = sum(linear.n_out for linear in self.block_linears if linear.bias)
        return (
            self.n_layers * (self.block_matmul_parameters + biases)
            + self.n_norms * self.norm_parameters
            + embedding * (1 if self.tied_embeddings else 2)
            + self.position_parameters
        )

    def model_flops(self, n_tokens: float, seq_len: int) -> float:
        """FLOPs of a forward and a backward pass, without recomputation (those of MFU).

        Every product counts 2 m n k forward and twice that backward; attention counts the
        full (not the causal half of the) score matrix, as the published formula
        ``96 B s l h^2 (1 + s/6h + V/16lh)`` does (Narayanan et al., SC21, eq. 3, whose
        96 counts a recomputed forward; without it 72).
        """
        return 3.0 * (self._block_forward_flops(n_tokens, seq_len) + self._head_flops(n_tokens))

    def hardware_flops(self, n_tokens: float, seq_len: int, recompute: str) -> float:
        """FLOPs including those of recomputation (those of HFU).

        With ``full`` this is ``96 B s l h^2 (1 + s/6h + V/16lh)`` for a GPT with a
        4h MLP (Narayanan et al., SC21, eq. 3).
        """
        require_choice("job", "recompute", recompute, RECOMPUTES)
        again = self._block_forward_flops(n_tokens, seq_len) if recompute == "full" else 0.0
        return self.model_flops(n_tokens, seq_len) + again

    def _block_forward_flops(self, n_tokens: float, seq_len: int) -> float:
        attention = 4.0 * seq_len * self.n_heads * self.head_dim
        return n_tokens * self.n_layers * (2.0 * self.block_matmul_parameters + attention)

    def _head_flops(self, n_tokens: float) -> float:
        return 2.0 * n_tokens * self.head.parameters
