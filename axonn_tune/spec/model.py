"""A transformer's shape, its parameter count and its FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_choice, require_count, require_name

VOCABULARY_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by default
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Linear:
    """One weight of a transformer block.

    name
        Name of the layer.
    n_in, n_out
        Numbers of rows and columns of the weight.
    transposed
        Whether the layer exchanges the X and Y axes of the grid.
    bias
        Whether the layer has a bias.
    """

    name: str
    n_in: int
    n_out: int
    transposed: bool
    bias: bool

    @property
    def parameters(self) -> float:
        """The number of elements of the weight, without the bias."""
        return float(self.n_in) * self.n_out


class Product(NamedTuple):
    """A product of a block where query, key, value and an MLP's gate have weights of their own.

    name
        Name of the product.
    layer
        Name of the weight of `Model.block_linears` to which its weight belongs.
    share
        Share of that weight's columns.
    """

    name: str
    layer: str
    share: float


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    A size that may be 0 or None is filled in when the model is made.

    name
        Name of the model.
    n_layers
        Number of blocks.
    hidden_size
        Number of features of a token.
    n_heads
        Number of attention heads.
    vocab_size
        Number of tokens of the vocabulary, as published (not padded).
    seq_len
        Number of tokens of a sequence.
    n_kv_heads
        Number of heads of keys and values; 0 stands for `n_heads`.
    head_dim
        Number of features of a head; 0 stands for ``hidden_size / n_heads``.
    ffn_hidden_size
        Number of inner features of the MLP; 0 stands for ``4 * hidden_size``.
    gated_mlp
        Whether the MLP has a gate (SwiGLU).
    norm
        Kind of norm, ``layer`` or ``rms``.
    position
        Kind of position embedding: ``learned``, ``rotary`` or ``none``.
    bias
        Whether linear layers have biases.
    qkv_bias
        Whether the product that forms queries, keys and values has a bias; None stands for `bias`.
    tied_embeddings
        Whether the embedding and the head share one weight.
    parallel_block
        Whether attention and MLP of a block read the same input.
    norms_per_block
        Number of norms of a block: 1 where attention and MLP share one, 2, or 4 where the outputs
        of both are normalised, too.
    published_parameters
        Number of parameters that the source states.
    source
        Publication of the sizes.
    seq_len_key
        Key of the config from which `seq_len` was taken, if that is the longest possible sequence
        and not the one of the training.
    not_modelled
        What of the architecture predictions leave out.

    Raises
    ------
    InputError
        A count is not a positive whole number, or sizes do not divide.
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
    norms_per_block: int = 2
    published_parameters: float | None = None
    source: str = ""
    seq_len_key: str = ""
    not_modelled: str = ""

    def __post_init__(self) -> None:
        owner = f"model '{self.name}'"
        require_name("model", self.name)
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
        if self.norms_per_block not in (1, 2, 4):
            raise InputError(
                f"{owner}: norms_per_block is {self.norms_per_block!r}; allowed: 1, 2 or 4"
            )
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"{owner}: n_kv_heads is {self.n_kv_heads}; allowed: a divisor of "
                f"n_heads ({self.n_heads})"
            )

    def check_possible(self) -> None:
        """Raise InputError if the source states another number of parameters."""
        published = self.published_parameters
        if published is not None and not (0.5 <= published / self.parameters <= 2.0):
            raise InputError(
                f"model '{self.name}': published_parameters is {published:.4g}, and the sizes give "
                f"{self.parameters:.4g}; allowed: half to twice what the sizes give"
            )

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 128, so that it divides over the grid."""
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def block_linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The four weights of a block in forward order: qkv, proj, up, down."""
        heads = self.n_heads * self.head_dim
        kv = self.n_kv_heads * self.head_dim
        up = self.ffn_hidden_size * (2 if self.gated_mlp else 1)
        return (
            Linear("qkv", self.hidden_size, heads + 2 * kv, False, bool(self.qkv_bias)),
            Linear("proj", heads, self.hidden_size, True, self.bias),
            Linear("up", self.hidden_size, up, False, self.bias),
            Linear("down", self.ffn_hidden_size, self.hidden_size, True, self.bias),
        )

    @property
    def block_products(self) -> tuple[Product, ...]:
        """The products of a block in forward order if none of them are formed together."""
        query = self.n_heads / (self.n_heads + 2 * self.n_kv_heads)
        key = 0.5 * (1.0 - query)
        gate = (Product("gate", "up", 0.5), Product("up", "up", 0.5))
        return (
            Product("query", "qkv", query),
            Product("key", "qkv", key),
            Product("value", "qkv", key),
            Product("proj", "proj", 1.0),
            *(gate if self.gated_mlp else (Product("up", "up", 1.0),)),
            Product("down", "down", 1.0),
        )

    @property
    def recomputed_shares(self) -> dict[str, float]:
        """The share of each layer's output that recomputation of every second product forms again.

        The first product of a block is kept, the second one is formed again, and so on. No backward
        pass reads the output of the last product, which is not formed again in any case.
        """
        products = self.block_products
        shares = {product.layer: 0.0 for product in products}
        for product in products[1:-1:2]:
            shares[product.layer] += product.share
        return shares

    @property
    def head(self) -> Linear:
        """The projection onto the (padded) vocabulary."""
        return Linear("head", self.hidden_size, self.padded_vocab_size, False, False)

    @property
    def block_matmul_parameters(self) -> float:
        """The number of weight elements of one block's four linear layers."""
        return sum(linear.parameters for linear in self.block_linears)

    @property
    def norm_parameters(self) -> int:
        """The number of elements of one norm: a gain, and a shift for layer norm."""
        return self.hidden_size * (2 if self.norm == "layer" else 1)

    @property
    def n_norms(self) -> int:
        """The number of norms in a whole model: those of the blocks and a final one."""
        return self.norms_per_block * self.n_layers + 1

    @property
    def shares_norm(self) -> bool:
        """Whether attention and MLP of a block read the output of one norm."""
        return self.norms_per_block == 1

    @property
    def normalises_outputs(self) -> bool:
        """Whether the outputs of attention and MLP are normalised, too."""
        return self.norms_per_block == 4

    @property
    def n_vectors(self) -> int:
        """The number of gains, shifts and biases in a whole model."""
        n_biases = sum(linear.bias for linear in self.block_linears)
        return self.n_norms * (2 if self.norm == "layer" else 1) + self.n_layers * n_biases

    @property
    def position_parameters(self) -> int:
        """The number of elements of a learned position embedding, 0 for other embeddings."""
        return self.seq_len * self.hidden_size if self.position == "learned" else 0

    @property
    def parameters(self) -> float:
        """The number of trainable elements, with the vocabulary as published (not padded)."""
        embedding = float(self.vocab_size) * self.hidden_size
        biases = sum(linear.n_out for linear in self.block_linears if linear.bias)
        return (
            self.n_layers * (self.block_matmul_parameters + biases)
            + self.n_norms * self.norm_parameters
            + embedding * (1 if self.tied_embeddings else 2)
            + self.position_parameters
        )

    def model_flops(self, n_tokens: float, seq_len: int) -> float:
        """Return the FLOPs of a forward and a backward pass, without recomputation (for MFU).

        Every product counts 2 m n k forward and twice that backward; attention counts the
        full (not the causal half of the) score matrix, as the published formula
        ``96 B s l h^2 (1 + s/6h + V/16lh)`` does (Narayanan et al., SC21, eq. 3, whose
        96 counts a recomputed forward; without it 72).
        """
        return 3.0 * (self._block_forward_flops(n_tokens, seq_len) + self._head_flops(n_tokens))

    def hardware_flops(
        self, n_tokens: float, seq_len: int, recompute: str, recomputed_share: float = 1.0
    ) -> float:
        """Return the FLOPs of all passes, including recomputation (for HFU).

        Of full recomputation, the share of the layers that are recomputed may be given.

        With ``full`` this is ``96 B s l h^2 (1 + s/6h + V/16lh)`` for a GPT with a
        4h MLP (Narayanan et al., SC21, eq. 3).
        """
        require_choice("job", "recompute", recompute, RECOMPUTES)
        repeated = self._block_forward_flops(n_tokens, seq_len) if recompute == "full" else 0.0
        return self.model_flops(n_tokens, seq_len) + recomputed_share * repeated

    def recomputed_product_flops(self, n_tokens: float) -> float:
        """Return the FLOPs of recomputation that forms every second product again."""
        shares = self.recomputed_shares
        elements = sum(shares[linear.name] * linear.parameters for linear in self.block_linears)
        return n_tokens * self.n_layers * 2.0 * elements

    def _block_forward_flops(self, n_tokens: float, seq_len: int) -> float:
        """Return the FLOPs of all blocks in a forward pass."""
        attention = 4.0 * seq_len * self.n_heads * self.head_dim
        return n_tokens * self.n_layers * (2.0 * self.block_matmul_parameters + attention)

    def _head_flops(self, n_tokens: float) -> float:
        """Return the FLOPs of the logits in a forward pass."""
        return 2.0 * n_tokens * self.head.parameters
