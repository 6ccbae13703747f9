"""The matrices that Muon updates in Megatron-Core, and what makes one of them nearly orthogonal.

Muon updates every matrix but the embedding and the head: those of blocks, routers, each expert and
learned positions (NVIDIA/Megatron-LM at d98e8a64, core/optimizer/emerging_optimizers.py,
_is_muon_excluded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.blocks import Linear
from axonn_tune.spec.job import BLOCKWISE, DISTRIBUTED
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.megatron.owners import Piece
from axonn_tune.strategies.shapes import Shapes

# --muon-num-ns-steps
NEWTON_SCHULZ_STEPS = 5


class Iterate(NamedTuple):
    """What the iteration of Newton and Schulz multiplies on one rank, arrays of shape (C,).

    Attributes
    ----------
    side
        Rows and columns of the products X X^T.
    other
        The other side of X.
    """

    side: Array
    other: Array

    @property
    def flops(self) -> Array:
        """The FLOPs of all steps, each of which forms X X^T, its square, and their sum times X."""
        return NEWTON_SCHULZ_STEPS * (4.0 * self.side**2 * self.other + 2.0 * self.side**3)


class Matrix(NamedTuple):
    """A kind of matrix that Muon updates.

    Attributes
    ----------
    linear
        The weight.
    of_expert
        Whether it is one of a routed expert.
    parts
        Names and outer sizes of the parts that are made orthogonal by themselves.
    """

    linear: Linear
    of_expert: bool
    parts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, linear: Linear, of_expert: bool = False) -> Matrix:
        """Return a matrix that is made orthogonal as a whole."""
        return cls(linear, of_expert, ((linear.name, linear.n_out),))

    def n_split(self, shapes: Shapes) -> Array:
        """Return over how many ranks it is split, shape (C,)."""
        n_ranks = shapes.expert_tensor if self.of_expert else shapes.table.size("tensor")
        return np.where(self.linear.is_split, n_ranks, 1.0) * np.ones(len(shapes.table))

    def iterate(self, n_out: int, n_split: Array, mode: str) -> Iterate:
        """Return what one rank multiplies of a part with so many rows, if its matrix is split.

        A rank has its own part of the matrix alone (blockwise), or the whole matrix, as all ranks
        of its group have (duplicated). Or it has its own part, and products over the side that is
        split are summed (distributed).
        """
        linear = self.linear
        kept, cut = (n_out, linear.n_in) if linear.transposed else (linear.n_in, n_out)
        is_split = n_split > 1.0
        own = np.where(is_split & (mode in (BLOCKWISE, DISTRIBUTED)), cut / n_split, float(cut))
        is_kept = is_split & (mode == DISTRIBUTED)
        side = np.where(is_kept, float(kept), np.minimum(kept, own))
        return Iterate(side, np.where(is_kept, own, np.maximum(kept, own)))


@lru_cache(maxsize=4096)
def pieces_of(kinds: tuple[Matrix, ...], n_split: float, mode: str) -> tuple[Piece, ...]:
    """Return what a rank holds of each kind, if it is split over so many where it is split."""
    return tuple(_piece(kind, n_split if kind.linear.is_split else 1.0, mode) for kind in kinds)


def _piece(kind: Matrix, n_split: float, mode: str) -> Piece:
    """Return what a rank holds of a matrix that is split over so many."""
    n = np.array([n_split])
    flops = sum(kind.iterate(n_out, n, mode).flops.item() for _, n_out in kind.parts)
    n_in, n_out = float(kind.linear.n_in), float(kind.linear.n_out)
    if kind.linear.transposed:
        return Piece(n_out, n_in / n_split, flops)
    return Piece(n_out / n_split, n_in, flops)


@dataclass(frozen=True)
class Matrices:
    """The kinds of matrices of a model, those of layers in forward order.

    Attributes
    ----------
    attention, mlp, shared
        Those of attention, of an MLP, and of the experts that every token passes through.
    router, experts
        Those of a router, and of one routed expert.
    positions
        That of learned positions.
    module
        That of a module of multi-token prediction beside its block.
    """

    attention: tuple[Matrix, ...]
    mlp: tuple[Matrix, ...]
    shared: tuple[Matrix, ...]
    router: tuple[Matrix, ...]
    experts: tuple[Matrix, ...]
    positions: tuple[Matrix, ...]
    module: tuple[Matrix, ...]

    @classmethod
    def of(cls, model: Model) -> Matrices:
        """Return the kinds of matrices of a model."""
        hidden = model.hidden_size
        router: tuple[Matrix, ...] = ()
        experts: tuple[Matrix, ...] = ()
        positions: tuple[Matrix, ...] = ()
        if model.experts is not None:
            inner, n_experts = model.experts.hidden_size, model.experts.n_experts
            up = Linear("experts_up", hidden, inner * model.gate_factor, False, False)
            down = Linear("experts_down", inner, hidden, True, False)
            experts = (Matrix.of(up, of_expert=True), Matrix.of(down, of_expert=True))
            router = (Matrix.of(Linear("router", hidden, n_experts, False, False, False)),)
        if model.position_parameters:
            learned = Linear("position", hidden, model.seq_len, False, False, False)
            positions = (Matrix.of(learned),)
        return cls(
            _of_attention(model),
            tuple(map(Matrix.of, model.mlp_linears)),
            tuple(map(Matrix.of, model.shared_linears)),
            router,
            experts,
            positions,
            (Matrix.of(model.mtp_projection),),
        )

    @property
    def dense(self) -> tuple[Matrix, ...]:
        """The kinds of all matrices except those of routed experts."""
        beside = (*self.router, *self.positions, *self.module)
        return (*self.attention, *self.mlp, *self.shared, *beside)

    @property
    def all(self) -> tuple[Matrix, ...]:
        """The kinds of all matrices."""
        return (*self.dense, *self.experts)

    def places_of(self, kinds: Sequence[Matrix]) -> tuple[int, ...]:
        """Return the places of some kinds in `dense`."""
        return tuple(map(self.dense.index, kinds))

    def orders(
        self, model: Model, layers: Sequence[int], n_local: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the kinds of matrices of layers as the backward pass comes to them.

        They are places in `dense`, and those in `experts` of the `n_local` experts of each layer.
        """
        of_mlps = {False: self.mlp, True: self.router + self.shared}
        of_layer = {
            has_experts: self.places_of((*reversed(of_mlp), *reversed(self.attention)))
            for has_experts, of_mlp in of_mlps.items()
        }
        have_experts = [model.blocks[layer].has_experts for layer in reversed(layers)]
        dense = tuple(place for each in have_experts for place in of_layer[each])
        of_experts = [place for place in reversed(range(len(self.experts))) for _ in range(n_local)]
        return dense, tuple(of_experts) * sum(have_experts)


def _of_attention(model: Model) -> tuple[Matrix, ...]:
    """Return the matrices of attention.

    Query, key and value are made orthogonal by themselves where one matrix forms them all
    (--muon-no-split-qkv off); with latent attention there is no such matrix.
    """
    first, *others = map(Matrix.of, model.attention_linears)
    if model.latent_attention is None:
        widths = {
            "query": model.query_width,
            "key": model.key_width,
            "value": model.value_width,
        }
        first = first._replace(parts=tuple((f"qkv.{part}", n) for part, n in widths.items()))
    return (first, *others)
