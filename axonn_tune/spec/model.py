"""A transformer's shape, its parameter count and its FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import Block, Experts, LatentAttention, Linear, attended_keys
from axonn_tune.spec.checks import require_choice, require_count, require_name
from axonn_tune.spec.tuning import NOTHING_FROZEN, Adapters, Frozen

VOCABULARY_MULTIPLE = 128  # Megatron-LM's --make-vocab-size-divisible-by default
RECOMPUTES = ("none", "selective", "full")
# The fields of a dense model that say how it is built, at any sequence length.
DENSE_SIZES = (
    "n_layers",
    "hidden_size",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "gated_mlp",
    "norm",
    "position",
    "bias",
    "qkv_bias",
    "proj_bias",
    "tied_embeddings",
    "parallel_block",
)
SQUARED_RELU, XIELU = "squared-relu", "xielu"
MOST_LAYERS = 10_000  # Each layer is visited, and no model has a tenth as many.


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
        Number of features of a head; 0 stands for ``hidden_size / n_heads``. Latent attention has
        its own sizes.
    ffn_hidden_size
        Number of inner features of the MLP; 0 stands for ``4 * hidden_size``.
    gated_mlp
        Whether the MLP has a gate (SwiGLU).
    clamped_gate
        Whether the two inputs of a gate are limited before it.
    activation
        Activation of an MLP without gate, ``squared-relu`` or ``xielu``; empty for GELU. Each is
        predicted as one kernel that reads and writes what GELU does.
    norm
        Kind of norm, ``layer`` or ``rms``.
    position
        Kind of position embedding: ``learned``, ``rotary`` or ``none``.
    scaled_rotary
        Whether the rotary embedding also scales queries and keys, as YaRN's may.
    bias
        Whether linear layers have biases.
    qkv_bias
        Whether the product that forms queries, keys and values has a bias; None stands for `bias`.
    proj_bias
        Whether the last product of attention has a bias; None stands for `bias`. In latent
        attention it has one if queries, keys and values have.
    tied_embeddings
        Whether the embedding and the head share one weight.
    parallel_block
        Whether attention and MLP of a block read the same input.
    norms_per_block
        Number of norms of a block: 1 where attention and MLP share one, 2, or 4 where the outputs
        of both are normalised, too.
    qk_norm
        Norms of queries and keys: ``head`` for those of each head, ``all`` for one norm over all
        heads together (OLMo), empty where there are none.
    window
        Number of tokens, its own included, that a token attends to in layers with a sliding window;
        0 for models without one.
    full_attention_every
        Distance between the layers that attend to all earlier tokens in spite of `window`, of which
        the last layer of each period is one; 0 where no layer does.
    experts
        The mixture of experts in the place of the MLP, in models that have one.
    latent_attention
        The sizes of multi-head latent attention, in models that have it.
    mtp_modules
        Number of modules of multi-token prediction that the model's config has; a job says how many
        are trained.
    published_parameters, published_active_parameters
        Numbers of parameters that the source states: all, and those that a token passes through.
    source
        Publication of the sizes.
    seq_len_key
        Key of the config from which `seq_len` was taken, if that is the longest possible sequence
        and not the one of the training.
    not_modelled
        Parts of the architecture that predictions leave out.

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
    clamped_gate: bool = False
    activation: str = ""
    norm: str = "layer"
    position: str = "learned"
    scaled_rotary: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    proj_bias: bool | None = None
    tied_embeddings: bool = True
    parallel_block: bool = False
    norms_per_block: int = 2
    qk_norm: str = ""
    window: int = 0
    full_attention_every: int = 0
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    mtp_modules: int = 0
    published_parameters: float | None = None
    published_active_parameters: float | None = None
    source: str = ""
    seq_len_key: str = ""
    not_modelled: str = ""

    def __post_init__(self) -> None:
        owner = f"model '{self.name}'"
        require_name("model", self.name)
        for name in ("n_layers", "hidden_size", "n_heads", "vocab_size", "seq_len"):
            require_count(owner, name, getattr(self, name))
        needs_head_dim = not self.head_dim and self.latent_attention is None
        if needs_head_dim and self.hidden_size % self.n_heads:
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
        for name in ("qkv_bias", "proj_bias"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.bias)
        require_choice(owner, "norm", self.norm, ("layer", "rms"))
        require_choice(owner, "position", self.position, ("learned", "rotary", "none"))
        if self.qk_norm:
            require_choice(owner, "qk_norm", self.qk_norm, ("head", "all"))
        if self.clamped_gate and not self.gated_mlp:
            raise InputError(f"{owner}: clamped_gate is true; allowed: only with gated_mlp: true")
        if self.activation:
            require_choice(owner, "activation", self.activation, (SQUARED_RELU, XIELU))
            if self.gated_mlp:
                raise InputError(
                    f"{owner}: activation is {self.activation}; allowed: only without gated_mlp"
                )
        if self.scaled_rotary and self.position != "rotary":
            raise InputError(
                f"{owner}: scaled_rotary is true; allowed: only with position: rotary, "
                f"not {self.position}"
            )
        if self.n_layers > MOST_LAYERS:
            raise InputError(
                f"{owner}: n_layers is {self.n_layers}; allowed: at most {MOST_LAYERS}"
            )
        if self.norms_per_block not in (1, 2, 4):
            raise InputError(
                f"{owner}: norms_per_block is {self.norms_per_block!r}; allowed: 1, 2 or 4"
            )
        if self.n_heads % self.n_kv_heads:
            raise InputError(
                f"{owner}: n_kv_heads is {self.n_kv_heads}; allowed: a divisor of "
                f"n_heads ({self.n_heads})"
            )
        for name in ("window", "full_attention_every", "mtp_modules"):
            require_count(owner, name, getattr(self, name), least=0)
        if self.experts is not None and self.experts.first_layer >= self.n_layers:
            raise InputError(
                f"{owner}: experts.first_layer is {self.experts.first_layer}; allowed: less than "
                f"n_layers ({self.n_layers})"
            )

    def check_possible(self) -> None:
        """Raise InputError if the source states other numbers of parameters."""
        for field, counted in (
            ("published_parameters", self.parameters),
            ("published_active_parameters", self.active_parameters),
        ):
            published = getattr(self, field)
            if published is not None and not (0.5 <= published / counted <= 2.0):
                raise InputError(
                    f"model '{self.name}': {field} is {published:.4g}, and the sizes give "
                    f"{counted:.4g}; allowed: half to twice what the sizes give"
                )

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to a multiple of 128, so that it divides over the grid."""
        return math.ceil(self.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def left_out_sentence(self) -> str:
        """What predictions leave out of the model, if it is anything."""
        return f"Predictions leave out {self.not_modelled}." if self.not_modelled else ""

    # Layers ------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """What distinguishes each layer, in order."""
        return tuple(
            Block(
                has_experts=self.experts is not None and self.experts.are_in(layer),
                window=0 if self._attends_to_all(layer) else self.window,
            )
            for layer in range(self.n_layers)
        )

    def _attends_to_all(self, layer: int) -> bool:
        """Return whether the window does not hold for a layer."""
        every = self.full_attention_every
        return bool(every) and (layer + 1) % every == 0

    def counts(self, layers: Sequence[int]) -> dict[Block, int]:
        """Count the given layers of each kind, in the model's order of kinds."""
        if layers and len(self._kinds) == 1:
            return {self._kinds[0]: len(layers)}
        number = Counter(self.blocks[layer] for layer in layers)
        return {kind: number[kind] for kind in self._kinds if kind in number}

    @cached_property
    def _kinds(self) -> tuple[Block, ...]:
        """The kinds of layers, in the order of the first layer of each."""
        return tuple(dict.fromkeys(self.blocks))

    @property
    def is_dense(self) -> bool:
        """Whether no layer has experts."""
        return self.experts is None

    @property
    def n_experts(self) -> int:
        """The number of routed experts of a layer that has some; 1 for a model without."""
        return 1 if self.experts is None else self.experts.n_experts

    @property
    def placed_parts(self) -> list[str]:
        """The names of the parts for which a strategy must say where they lie."""
        experts = [] if self.experts is None else ["experts"]
        latent_attention = [] if self.latent_attention is None else ["latent attention"]
        return experts + latent_attention

    def special_parts(self, seq_len: int) -> list[str]:
        """Name the parts of the model that GPT and Llama lack, for sequences of a length."""
        has_window = 0 < self.window < seq_len
        window = [f"a sliding window of {self.window} tokens"] if has_window else []
        norms = ["norms of queries and keys"] if self.qk_norm else []
        return self.placed_parts + window + norms

    # Weights -----------------------------------------------------------------------------

    @cached_property
    def attention_linears(self) -> tuple[Linear, ...]:
        """The weights of attention in forward order; the projection of its output comes last."""
        if self.latent_attention is not None:
            bias = bool(self.qkv_bias)
            return self.latent_attention.linears(self.hidden_size, self.n_heads, bias)
        heads = self.n_heads * self.head_dim
        kv = self.n_kv_heads * self.head_dim
        return (
            Linear("qkv", self.hidden_size, heads + 2 * kv, False, bool(self.qkv_bias)),
            Linear("proj", heads, self.hidden_size, True, bool(self.proj_bias)),
        )

    @cached_property
    def mlp_linears(self) -> tuple[Linear, Linear]:
        """The weights up and down of the MLP of a layer without experts."""
        return self._mlp("up", "down", self.ffn_hidden_size)

    @cached_property
    def shared_linears(self) -> tuple[Linear, ...]:
        """The weights of the experts that every token passes through, if there are any."""
        if self.experts is None or not self.experts.shared_hidden_size:
            return ()
        return self._mlp("shared_up", "shared_down", self.experts.shared_hidden_size)

    def _mlp(self, up: str, down: str, inner: int) -> tuple[Linear, Linear]:
        """Return the weights of an MLP with some inner features."""
        return (
            Linear(up, self.hidden_size, inner * self.gate_factor, False, self.bias),
            Linear(down, inner, self.hidden_size, True, self.bias),
        )

    @property
    def gate_factor(self) -> int:
        """The ratio of an MLP's widths before and after its activation: 2 with a gate, else 1."""
        return 2 if self.gated_mlp else 1

    def linears_of(self, block: Block) -> tuple[Linear, ...]:
        """Return the weights of a layer in forward order, without router and routed experts."""
        return (*self.attention_linears, *self.mlp_linears_of(block))

    def mlp_linears_of(self, block: Block) -> tuple[Linear, ...]:
        """Return the weights of a layer's MLP or of its shared experts; empty without either."""
        return self.shared_linears if block.has_experts else self.mlp_linears

    @property
    def block_linears(self) -> tuple[Linear, ...]:
        """The weights of a layer without experts in forward order, such as qkv, proj, up, down."""
        return (*self.attention_linears, *self.mlp_linears)

    @property
    def router_parameters(self) -> float:
        """The number of elements of a layer's router, and of the gate of its shared experts."""
        experts = self.experts
        if experts is None:
            return 0.0
        bias = experts.n_experts if experts.bias else 0
        return float((experts.n_experts + experts.shared_gate) * self.hidden_size + bias)

    @property
    def expert_parameters(self) -> float:
        """The number of elements of one routed expert."""
        experts = self.experts
        if experts is None:
            return 0.0
        inner = experts.hidden_size
        biases = self.gate_factor * inner + self.hidden_size if experts.bias else 0
        return float((self.gate_factor + 1) * self.hidden_size) * inner + biases

    def block_products(self, joins_queries: bool = False) -> tuple[Product, ...]:
        """Return the products of a block in forward order if none of them are formed together.

        With `joins_queries` one product forms query, key and value.
        """
        query = self.n_heads / (self.n_heads + 2 * self.n_kv_heads)
        key = 0.5 * (1.0 - query)
        parts = (("query", query), ("key", key), ("value", key))
        attention = (("qkv", 1.0),) if joins_queries else parts
        gate = (Product("gate", "up", 0.5), Product("up", "up", 0.5))
        return (
            *(Product(name, "qkv", share) for name, share in attention),
            Product("proj", "proj", 1.0),
            *(gate if self.gated_mlp else (Product("up", "up", 1.0),)),
            Product("down", "down", 1.0),
        )

    def recomputed_shares(self, joins_queries: bool = False) -> dict[str, float]:
        """Return the share of each layer that recomputation of every second product forms again.

        The first product of a block is kept, the second one is formed again, and so on. No backward
        pass reads the output of the last product, which is not formed again in any case.
        """
        products = self.block_products(joins_queries)
        shares = {product.layer: 0.0 for product in products}
        for product in products[1:-1:2]:
            shares[product.layer] += product.share
        return shares

    @property
    def head(self) -> Linear:
        """The projection onto the (padded) vocabulary."""
        return Linear("head", self.hidden_size, self.padded_vocab_size, False, False)

    @property
    def mtp_projection(self) -> Linear:
        """The weight of a module of multi-token prediction that joins two vectors of a token."""
        return Linear("mtp_projection", 2 * self.hidden_size, self.hidden_size, False, False)

    @property
    def mtp_parameters(self) -> float:
        """The number of elements of a module of multi-token prediction that it shares with nothing.

        It has a block like the last layer, a projection and three norms. Embedding and head are the
        model's (DeepSeek-V3, arXiv 2412.19437, section 2.2).
        """
        block = self._parameters_of(self.blocks[-1], self.n_experts)
        block += self.norms_per_block * self.norm_parameters + self.head_norm_parameters
        return block + self.mtp_projection.parameters + 3.0 * self.norm_parameters

    @property
    def block_matmul_parameters(self) -> float:
        """The number of weight elements of the linear layers of a block without experts."""
        return self.matmul_parameters_of(Block())

    def matmul_parameters_of(self, block: Block) -> float:
        """Return the number of elements of a layer's matrices that no router chooses."""
        return sum(linear.parameters for linear in self.linears_of(block))

    def matrix_parameters_of(self, block: Block) -> float:
        """Return the number of elements of a layer's matrices, with its router and all experts."""
        elements = self.matmul_parameters_of(block)
        if block.has_experts and self.experts is not None:
            of_expert = (self.gate_factor + 1.0) * self.hidden_size * self.experts.hidden_size
            elements += self.n_experts * (self.hidden_size + of_expert)
        return elements

    @property
    def norm_parameters(self) -> int:
        """The number of elements of one norm."""
        return self.hidden_size * self.vectors_per_norm

    @property
    def vectors_per_norm(self) -> int:
        """The number of vectors of one norm: a gain, and a shift for layer norm."""
        return 2 if self.norm == "layer" else 1

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
    def head_norm_parameters(self) -> int:
        """The number of elements of a block's norms of queries, keys and latent vectors."""
        latent = self.latent_attention
        if latent is not None:
            return latent.q_rank + latent.kv_rank
        if self.qk_norm == "all":
            return (self.n_heads + self.n_kv_heads) * self.head_dim
        return 2 * self.head_dim if self.qk_norm == "head" else 0

    @property
    def n_vectors(self) -> int:
        """The number of gains, shifts and biases in a whole model without experts."""
        n_biases = sum(linear.bias for linear in self.block_linears)
        n_head_norms = 2 if self.head_norm_parameters else 0
        return self.n_norms * self.vectors_per_norm + self.n_layers * (n_biases + n_head_norms)

    @property
    def position_parameters(self) -> int:
        """The number of elements of a learned position embedding, 0 for other embeddings."""
        return self.seq_len * self.hidden_size if self.position == "learned" else 0

    @property
    def parameters(self) -> float:
        """The number of trainable elements, with the vocabulary as published (not padded)."""
        return self._parameters_with(self.n_experts)

    @property
    def active_parameters(self) -> float:
        """The number of trainable elements that one token passes through; embeddings count."""
        return self._parameters_with(self._top_k)

    def _parameters_with(self, n_experts: int) -> float:
        """Return the number of elements with some experts in each layer that has any."""
        embedding = float(self.vocab_size) * self.hidden_size
        total = (
            self.n_norms * self.norm_parameters
            + self.n_layers * self.head_norm_parameters
            + embedding * (1 if self.tied_embeddings else 2)
            + self.position_parameters
        )
        for block, count in self.counts(range(self.n_layers)).items():
            total += count * self._parameters_of(block, n_experts)
        return total

    def _parameters_of(self, block: Block, n_experts: int) -> float:
        """Return the number of elements of a layer without its norms, with some experts."""
        linears = self.linears_of(block)
        elements = sum(linear.parameters + linear.bias * linear.n_out for linear in linears)
        if block.has_experts:
            elements += self.router_parameters + n_experts * self.expert_parameters
        return elements

    def adapter_parameters(self, adapters: Adapters) -> float:
        """Return the number of elements of the adapters beside the weights of all blocks."""
        return sum(
            count * sum(adapters.parameters_beside(linear) for linear in self.linears_of(block))
            for block, count in self.counts(range(self.n_layers)).items()
        )

    def trained_parameters(
        self, adapters: Adapters | None, frozen: Frozen = NOTHING_FROZEN
    ) -> float:
        """Return the number of elements that are trained: of weights, or of the adapters."""
        if adapters is not None:
            return self.adapter_parameters(adapters)
        trained = self.parameters
        matrix = float(self.vocab_size) * self.hidden_size
        if frozen.embedding:
            trained -= self.position_parameters + matrix * (not self.tied_embeddings)
        if frozen.head:
            trained -= self.norm_parameters + matrix
        of_norms = self.norms_per_block * self.norm_parameters + self.head_norm_parameters
        for block, count in self.counts(range(frozen.n_layers)).items():
            trained -= count * (self._parameters_of(block, self.n_experts) + of_norms)
        return trained

    def model_flops(
        self,
        n_tokens: float,
        seq_len: float,
        adapters: Adapters | None = None,
        mtp_modules: int = 0,
        frozen: Frozen = NOTHING_FROZEN,
    ) -> float:
        """Return the FLOPs of a forward and a backward pass, without recomputation (for MFU).

        Every product counts 2 m n k forward and twice that backward; attention counts the
        full (not the causal half of the) score matrix, as the published formula ``96 B s l h^2 (1 +
        s/6h + V/16lh)`` does (Narayanan et al., SC21, eq. 3). That counts a recomputed forward
        pass; without it, the formula is ``72 B s l h^2 (1 + s/6h + V/12lh)``.

        With adapters the weights themselves have no gradients, which leaves two of a weight's three
        products. The adapters have all three. A module of multi-token prediction has a block, a
        projection and the head's logits. Frozen layers have a forward pass only, and a frozen head
        no gradient.
        """
        forward = self._block_forward_flops(n_tokens, seq_len)
        head = self._head_flops(n_tokens)
        above = self._block_forward_flops(n_tokens, seq_len, frozen)
        trained = 3.0 * (forward + head) - 2.0 * (forward - above) - frozen.head * head
        if mtp_modules:
            projection = 2.0 * n_tokens * self.mtp_projection.parameters
            module = self._module_block_flops(n_tokens, seq_len) + projection
            trained += 3.0 * mtp_modules * (module + self._head_flops(n_tokens))
        if adapters is None:
            return trained
        not_formed = 2.0 * n_tokens * self._weights_of_products()
        return trained - not_formed + 6.0 * n_tokens * self.adapter_parameters(adapters)

    def causal_flops(
        self,
        n_tokens: float,
        seq_len: float,
        adapters: Adapters | None = None,
        mtp_modules: int = 0,
        frozen: Frozen = NOTHING_FROZEN,
    ) -> float:
        """Return `model_flops` with the causal half of the score matrix alone.

        Megatron-LM (core_v0.19.0, `num_floating_point_operations`) and Megatron-Bridge count so.
        """
        with_scores, without_scores = (
            self.model_flops(n_tokens, length, adapters, mtp_modules, frozen)
            for length in (seq_len, 0.0)
        )
        return (with_scores + without_scores) / 2.0

    def hardware_flops(
        self,
        n_tokens: float,
        seq_len: float,
        recompute: str,
        recomputed_share: float = 1.0,
        adapters: Adapters | None = None,
        mtp_modules: int = 0,
        frozen: Frozen = NOTHING_FROZEN,
    ) -> float:
        """Return the FLOPs of all passes, including recomputation (for HFU).

        Full recomputation forms a share `recomputed_share` of the layers again.

        With ``full`` this is ``96 B s l h^2 (1 + s/6h + V/16lh)`` for a GPT with a
        4h MLP (Narayanan et al., SC21, eq. 3).
        """
        require_choice("job", "recompute", recompute, RECOMPUTES)
        repeated = 0.0
        if recompute == "full":
            repeated = self._block_forward_flops(n_tokens, seq_len, frozen)
            if adapters is not None:
                repeated += 2.0 * n_tokens * self.adapter_parameters(adapters)
            repeated += mtp_modules * self._module_block_flops(n_tokens, seq_len)
        flops = self.model_flops(n_tokens, seq_len, adapters, mtp_modules, frozen)
        return flops + recomputed_share * repeated

    @property
    def query_width(self) -> int:
        """The number of features of all queries of a token."""
        return self.n_heads * self._query_dim

    @property
    def key_width(self) -> int:
        """The number of features of all keys of a token, as attention reads them."""
        n_keys = self.n_kv_heads if self.latent_attention is None else self.n_heads
        return n_keys * self._query_dim

    @property
    def value_width(self) -> int:
        """The number of features of all values of a token, as attention reads them."""
        latent = self.latent_attention
        if latent is None:
            return self.n_kv_heads * self.head_dim
        return self.n_heads * latent.value_dim

    @property
    def _query_dim(self) -> int:
        """The number of features of a head's query, and of its key."""
        latent = self.latent_attention
        return self.head_dim if latent is None else latent.query_dim

    @property
    def attention_dim(self) -> float:
        """The mean number of features of a head's query and value, which attention's FLOPs need."""
        latent = self.latent_attention
        if latent is None:
            return float(self.head_dim)
        return (latent.query_dim + latent.value_dim) / 2.0

    def recomputed_product_flops(self, n_tokens: float, joins_queries: bool = False) -> float:
        """Return the FLOPs of recomputation that forms every second product again."""
        shares = self.recomputed_shares(joins_queries)
        elements = sum(shares[linear.name] * linear.parameters for linear in self.block_linears)
        return n_tokens * self.n_layers * 2.0 * elements

    def recomputed_module_flops(
        self,
        n_tokens: float,
        seq_len: float,
        modules: Set[str],
        frozen: Frozen = NOTHING_FROZEN,
        mtp_modules: int = 0,
    ) -> float:
        """Return the FLOPs of recomputation that runs some `MODULES` of trained layers again.

        A module of multi-token prediction has one more layer, of the kind of the last one.
        """
        total = 0.0
        is_up_projected = "mla_up_proj" in modules
        layers = {"q_up": is_up_projected, "kv_up": is_up_projected}
        layers |= dict.fromkeys(("up", "down"), "mlp" in modules)
        is_shared = bool(modules & {"moe", "shared_experts"})
        layers |= dict.fromkeys(("shared_up", "shared_down"), is_shared)
        counts = Counter(self.counts(frozen.layers_above(range(self.n_layers))))
        counts[self.blocks[-1]] += mtp_modules
        for block, count in counts.items():
            linears = self.linears_of(block)
            elements = sum(each.parameters for each in linears if layers.get(each.name))
            if block.has_experts and "moe" in modules:
                elements += self._active_expert_parameters
            flops = 2.0 * elements
            if "core_attn" in modules:
                flops += self._attention_flops(seq_len, block)
            total += count * flops
        return n_tokens * total

    def last_product_flops(self, n_tokens: float, frozen: Frozen) -> float:
        """Return the FLOPs of the last products of blocks that are not frozen in a forward pass."""
        n_layers = len(frozen.layers_above(range(self.n_layers)))
        return 2.0 * n_tokens * n_layers * self.block_linears[-1].parameters

    def _block_forward_flops(
        self, n_tokens: float, seq_len: float, frozen: Frozen = NOTHING_FROZEN
    ) -> float:
        """Return the FLOPs of all blocks that are not frozen in a forward pass."""
        total = 0.0
        for block, count in self.counts(frozen.layers_above(range(self.n_layers))).items():
            total += count * self._token_flops_of(block, seq_len)
        return n_tokens * total

    def _module_block_flops(self, n_tokens: float, seq_len: float) -> float:
        """Return the FLOPs of the block of a module of multi-token prediction in a forward pass."""
        return n_tokens * self._token_flops_of(self.blocks[-1], seq_len)

    def _token_flops_of(self, block: Block, seq_len: float) -> float:
        """Return the FLOPs of a layer for one token in a forward pass."""
        return 2.0 * self._weights_of(block) + self._attention_flops(seq_len, block)

    def _weights_of(self, block: Block) -> float:
        """Return the number of elements of a layer's weights that multiply a token."""
        parameters = self.matmul_parameters_of(block)
        return parameters + (self._active_expert_parameters if block.has_experts else 0.0)

    @property
    def _active_expert_parameters(self) -> float:
        """The elements of a layer's router and of the routed experts that a token passes."""
        return self.router_parameters + self._top_k * self.expert_parameters

    @property
    def _top_k(self) -> int:
        """The number of routed experts that a token passes in a layer that has some."""
        return 0 if self.experts is None else self.experts.top_k

    def _attention_flops(self, seq_len: float, block: Block) -> float:
        """Return the FLOPs of a layer's attention for one token in a forward pass."""
        keys = attended_keys(seq_len, block.window)
        return 4.0 * keys * self.n_heads * self.attention_dim

    def attention_share(self, seq_len: float) -> float:
        """Return attention's share of a forward pass's FLOPs, with the causal half of scores."""
        counts = self.counts(range(self.n_layers))
        scores = sum(n * self._attention_flops(seq_len, block) for block, n in counts.items()) / 2.0
        return scores / (scores + 2.0 * self._weights_of_products())

    def _weights_of_products(self) -> float:
        """Return the number of elements of all weights that multiply a token, with the head's."""
        counts = self.counts(range(self.n_layers))
        in_blocks = sum(count * self._weights_of(block) for block, count in counts.items())
        return in_blocks + self.head.parameters

    def _head_flops(self, n_tokens: float) -> float:
        """Return the FLOPs of the logits in a forward pass."""
        return 2.0 * n_tokens * self.head.parameters
