"""What the blocks of a transformer are made of: weights, experts, latent attention."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_between, require_count


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
    is_split
        Whether tensor parallelism splits the weight; otherwise every rank of the group holds it.
    """

    name: str
    n_in: int
    n_out: int
    transposed: bool
    bias: bool
    is_split: bool = True

    @property
    def parameters(self) -> float:
        """The number of elements of the weight, without the bias."""
        return float(self.n_in) * self.n_out

    def elements_on_rank(self, tensor: npt.NDArray[np.float64]) -> npt.NDArray[np.float64] | float:
        """Return how many of them a rank of a tensor group holds, by the size of the group."""
        return self.parameters / tensor if self.is_split else self.parameters


class Block(NamedTuple):
    """What distinguishes one layer of a model from its other layers.

    has_experts
        Whether a mixture of experts stands in the place of the MLP.
    window
        Number of tokens, its own included, that a token attends to; 0 for all earlier ones.
    """

    has_experts: bool = False
    window: int = 0


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that stands in the place of the MLP in some layers.

    n_experts
        Number of experts of a layer among which a router chooses.
    top_k
        Number of experts that each token passes through.
    hidden_size
        Number of inner features of an expert.
    shared_hidden_size
        Number of inner features of the experts that every token passes through, together; 0 for
        none.
    shared_gate
        Whether a gate scales the output of the shared experts (Qwen 2).
    bias
        Whether the router and the experts' products have biases.
    first_layer
        Number of layers before the first one with experts.
    every
        Distance between layers with experts; 1 where all layers after the first one have them.
    n_groups, top_groups
        Number of equal groups of neighbouring experts, and of how many groups the experts of one
        token are (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, node-limited routing).
    """

    n_experts: int
    top_k: int
    hidden_size: int
    shared_hidden_size: int = 0
    shared_gate: bool = False
    bias: bool = False
    first_layer: int = 0
    every: int = 1
    n_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("n_experts", "top_k", "hidden_size", "every", "n_groups", "top_groups"):
            require_count("experts", name, getattr(self, name))
        for name in ("shared_hidden_size", "first_layer"):
            require_count("experts", name, getattr(self, name), least=0)
        if self.top_k > self.n_experts:
            raise InputError(
                f"experts: top_k is {self.top_k}; allowed: at most n_experts ({self.n_experts})"
            )
        if self.n_experts % self.n_groups:
            raise InputError(
                f"experts: n_groups is {self.n_groups}; allowed: a divisor of n_experts "
                f"({self.n_experts})"
            )
        least = -(-self.top_k * self.n_groups // self.n_experts)
        require_between("experts", "top_groups", self.top_groups, least, self.n_groups)
        if self.shared_gate and not self.shared_hidden_size:
            raise InputError("experts: shared_gate is true; allowed: only with shared_hidden_size")

    def n_reached(self, n_units: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return the mean number of units that hold at least one of the experts of a token.

        All choices of groups, and of experts in the chosen groups, are equally likely. Each unit
        holds equally many neighbouring experts.

        Parameters
        ----------
        n_units : array_like
            Whole number of units, such as ranks or nodes.
        """
        numbers = np.asarray(n_units, dtype=np.int64)
        is_asked = np.bincount(numbers.ravel()) > 0
        reached = np.zeros(is_asked.size)
        for number in np.flatnonzero(is_asked).tolist():
            reached[number] = _n_reached(self, number)
        return reached[numbers]

    def are_in(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has experts."""
        return layer >= self.first_layer and (layer - self.first_layer) % self.every == 0


@lru_cache(maxsize=1024)
def _n_reached(experts: Experts, n_units: int) -> float:
    """Return `Experts.n_reached` for one number of units."""
    of_unit = experts.n_experts / n_units
    of_group = experts.n_experts / experts.n_groups
    n_reached = 0.0
    for unit in range(n_units):
        first, end = unit * of_unit, min((unit + 1) * of_unit, experts.n_experts)
        shared = [
            min(end, (group + 1) * of_group) - max(first, group * of_group)
            for group in range(int(first // of_group), math.ceil(end / of_group))
        ]
        n_reached += 1.0 - _missed(experts, shared)
    return n_reached


def _missed(experts: Experts, shared: Sequence[float]) -> float:
    """Return the probability that a token has none of the experts that a unit holds.

    Parameters
    ----------
    experts : Experts
    shared : sequence of float
        Number of these experts in each of the groups that have any.
    """
    # Numbers of ways to choose some of these groups, by how many are chosen and how many of the
    # unit's experts are in them.
    ways = Counter({(0, 0.0): 1})
    for n_shared in shared:
        for (n_chosen, n_own), number in list(ways.items()):
            ways[n_chosen + 1, n_own + n_shared] += number
    n_others = experts.n_groups - len(shared)
    n_chosen_from = experts.n_experts * experts.top_groups // experts.n_groups
    missed = 0.0
    for (n_chosen, n_own), number in ways.items():
        if n_chosen > experts.top_groups:
            continue
        # The share of the choices of experts that leave out those of the unit.
        left_out = math.prod(
            max(n_chosen_from - n_own - i, 0.0) / (n_chosen_from - i) for i in range(experts.top_k)
        )
        missed += number * math.comb(n_others, experts.top_groups - n_chosen) * left_out
    return missed / math.comb(experts.n_groups, experts.top_groups)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values are formed from one latent vector of a token, and queries from another. A part
    of each query and key carries the position; that part of the key is the same for all heads.

    kv_rank
        Number of features of the latent vector of keys and values.
    q_rank
        Number of features of the latent vector of queries; 0 where queries have none.
    content_dim, position_dim
        Features of a head's query and key without and with the position.
    value_dim
        Features of a head's value.
    """

    kv_rank: int
    q_rank: int
    content_dim: int
    position_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("kv_rank", "content_dim", "position_dim", "value_dim"):
            require_count("latent_attention", name, getattr(self, name))
        require_count("latent_attention", "q_rank", self.q_rank, least=0)

    @property
    def query_dim(self) -> int:
        """The number of features of a head's query, and of its key."""
        return self.content_dim + self.position_dim

    def linears(self, hidden_size: int, n_heads: int, bias: bool) -> tuple[Linear, ...]:
        """Return the weights that form queries, keys and values, and the one that follows."""
        queries = n_heads * self.query_dim
        keys_and_values = n_heads * (self.content_dim + self.value_dim)
        latent = self.kv_rank + self.position_dim
        query_input = self.q_rank or hidden_size
        query_down = Linear("q_down", hidden_size, self.q_rank, False, bias, is_split=False)
        return (
            *((query_down,) if self.q_rank else ()),
            Linear("kv_down", hidden_size, latent, False, bias, is_split=False),
            Linear("q_up", query_input, queries, False, False),
            Linear("kv_up", self.kv_rank, keys_and_values, False, False),
            Linear("proj", n_heads * self.value_dim, hidden_size, True, bias),
        )


def attended_keys(seq_len: float, window: int) -> float:
    """Return the number of keys that count for a query, if without a window all keys count.

    By convention causal attention counts with the full score matrix. A window of w tokens leaves
    w - (w^2 - w) / (2 s) of s keys to a query on average, of the (s + 1) / 2 that causality
    leaves; the same share of s counts, up to terms of 1 / s.
    """
    if not window or window >= seq_len:
        return float(seq_len)
    return 2.0 * window - window * window / seq_len
