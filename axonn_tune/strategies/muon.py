"""Muon in Megatron-Core: what a rank keeps, multiplies and sends to update whole matrices.

Jordan et al., kellerjordan.github.io/posts/muon, and Liu et al., arXiv 2502.16982 (Moonlight). The
code is NVIDIA/Megatron-LM at d98e8a64 (core/optimizer/emerging_optimizers.py, __init__.py and
layer_wise_optimizer.py) with NVIDIA-NeMo/Emerging-Optimizers at fd772926
(orthogonalized_optimizers/muon_utils.py), with the usual --muon-* flags.

Muon updates every matrix but the embedding and the head: those of blocks, routers, each expert and
learned positions. All else has AdamW. A matrix has one moment in fp32, which a few steps of the
iteration of Newton and Schulz make nearly orthogonal in bf16. A rank of a tensor group gathers the
moment of the whole matrix first, and all ranks of the group do the same (--muon-tp-mode
duplicated). With the distributed optimizer each replica updates some of the matrices (`owners`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.candidates import Placements, distinct
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import EXPERT, EXPERT_REPLICAS
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, RepeatedGemm
from axonn_tune.spec.schedule import DUALPIPE
from axonn_tune.strategies.megatron_stage import trained_parameters
from axonn_tune.strategies.optimizer import has_master_copy
from axonn_tune.strategies.owners import Piece, shared
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes

if TYPE_CHECKING:
    from axonn_tune.strategies.megatron3d import Megatron3D

# --muon-num-ns-steps, --muon-fp32-matmul-prec medium.
N_STEPS = 5
_BF16_BYTES = 2.0
# Bytes that torch's kernels of one operation each read and write of an element in fp32. Before the
# iteration they are the decay of the weight (8) and the moment (12); after it two scales (16) and
# the sum with the weight (12).
_BEFORE_BYTES, _BEFORE_KERNELS = 20.0, 2.0
_AFTER_BYTES, _AFTER_KERNELS = 28.0, 3.0
# The same of an element of the whole matrix: its norm (4), the quotient (8), and the casts to bf16
# and back (12).
_NORMALIZE_BYTES, _NORMALIZE_KERNELS = 24.0, 4.0
# What is gathered lies in one buffer, is copied to a tensor for each rank, and then joined.
_JOIN_BYTES, _JOIN_KERNELS = 16.0, 2.0
# Queries, keys and values are copied out of their common matrix, and joined again.
_SPLIT_BYTES, _SPLIT_KERNELS = 16.0, 4.0
# Torch copies what a product is added to, and the product reads the copy.
_SUM_BYTES = 3.0 * _BF16_BYTES


class Matrix(NamedTuple):
    """A kind of matrix that Muon updates.

    Attributes
    ----------
    layer
        Name of its layer.
    n_in, n_out
        Sizes of the whole matrix.
    splits_input
        Whether a tensor group splits `n_in`, and not `n_out`.
    is_split
        Whether a tensor group splits it at all.
    of_expert
        Whether it is of a routed expert.
    parts
        Names and outer sizes of the parts that are made orthogonal by themselves.
    """

    layer: str
    n_in: int
    n_out: int
    splits_input: bool
    is_split: bool
    of_expert: bool
    parts: tuple[tuple[str, int], ...]

    def n_split(self, shapes: Shapes) -> Array:
        """Return over how many ranks it is split, shape (C,)."""
        n_ranks = shapes.expert_tensor if self.of_expert else shapes.table.size("tensor")
        return np.asarray(n_ranks if self.is_split else 1.0) * np.ones(len(shapes.table))

    def piece(self, n_split: float) -> Piece:
        """Return what a rank holds of it, if it is split over so many."""
        rows, columns = float(self.n_out), float(self.n_in)
        flops = sum(newton_schulz_flops(width, self.n_in) for _, width in self.parts)
        if self.splits_input:
            return Piece(rows, columns / n_split, flops)
        return Piece(rows / n_split, columns, flops)


def newton_schulz_flops(rows: float, columns: float) -> float:
    """Return the FLOPs that make a matrix nearly orthogonal.

    With m for the shorter side and n for the longer one, each of the steps forms A = X X^T, its
    square, and the product of both with X: 4 m^2 n + 2 m^3.
    """
    short, long = min(rows, columns), max(rows, columns)
    return N_STEPS * (4.0 * short**2 * long + 2.0 * short**3)


def _matrix(
    layer: str,
    n_in: int,
    n_out: int,
    splits_input: bool = False,
    is_split: bool = True,
    of_expert: bool = False,
) -> Matrix:
    """Return a matrix that is made orthogonal as a whole."""
    return Matrix(layer, n_in, n_out, splits_input, is_split, of_expert, ((layer, n_out),))


@dataclass(frozen=True)
class Matrices:
    """The kinds of matrices of a model that Muon updates."""

    attention: tuple[Matrix, ...]
    mlp: tuple[Matrix, ...]
    shared: tuple[Matrix, ...]
    router: tuple[Matrix, ...]
    expert: tuple[Matrix, ...]
    positions: tuple[Matrix, ...]
    module: tuple[Matrix, ...]

    @classmethod
    def of(cls, model: Model) -> Matrices:
        """Return the kinds of matrices of a model.

        Query, key and value are made orthogonal by themselves where one matrix forms them.
        """
        groups = model.attention_linears, model.mlp_linears, model.shared_linears
        attention, mlp, shared_mlp = (
            tuple(
                _matrix(each.name, each.n_in, each.n_out, each.transposed, each.is_split)
                for each in linears
            )
            for linears in groups
        )
        if model.latent_attention is None:
            widths = model.query_width, model.key_width, model.value_width
            parts = tuple(
                (f"qkv.{part}", width)
                for part, width in zip(("query", "key", "value"), widths, strict=True)
            )
            attention = (attention[0]._replace(parts=parts), *attention[1:])
        hidden, experts = model.hidden_size, model.experts
        router: tuple[Matrix, ...] = ()
        of_expert: tuple[Matrix, ...] = ()
        positions: tuple[Matrix, ...] = ()
        if experts is not None:
            inner = experts.hidden_size
            router = (_matrix("router", hidden, experts.n_experts, is_split=False),)
            of_expert = (
                _matrix("experts_up", hidden, inner * model.gate_factor, of_expert=True),
                _matrix("experts_down", inner, hidden, splits_input=True, of_expert=True),
            )
        if model.position_parameters:
            positions = (_matrix("position", hidden, model.seq_len, is_split=False),)
        projection = model.mtp_projection
        module = (_matrix(projection.name, projection.n_in, projection.n_out),)
        return cls(attention, mlp, shared_mlp, router, of_expert, positions, module)

    @property
    def dense(self) -> tuple[Matrix, ...]:
        """All kinds but those of experts."""
        beside = (*self.router, *self.positions, *self.module)
        return (*self.attention, *self.mlp, *self.shared, *beside)

    def of_layer(self, has_experts: bool) -> tuple[Matrix, ...]:
        """Return those of a layer in forward order, apart from its experts."""
        return (*self.attention, *(self.router + self.shared if has_experts else self.mlp))


@dataclass(frozen=True)
class Owned:
    """What ranks of one stage have of the matrices, arrays of shape (C,).

    Attributes
    ----------
    padding, expert_padding
        Elements of the buffers of gradients and weights that no matrix fills, for routed experts
        and for all else.
    others
        Trained elements that the rank holds besides these matrices, which AdamW updates.
    elements
        Elements of the matrices that the rank updates that owns most.
    numbers
        Numbers of matrices of each kind of the rank that has most to compute.
    """

    padding: Array
    expert_padding: Array
    others: Array
    elements: Array
    numbers: dict[Matrix, Array]

    @classmethod
    def of(cls, model: Model, columns: Array) -> Owned:
        """Return what `owned_columns` has formed."""
        padding, expert_padding, others, elements, *numbers = columns
        kinds = Matrices.of(model)
        of_kinds = dict(zip(kinds.dense + kinds.expert, numbers, strict=True))
        return cls(padding, expert_padding, others, elements, of_kinds)

    def memory(
        self, shapes: Shapes, terms: Mapping[str, Array], of_others: Array, gradient_bytes: float
    ) -> dict[str, Array]:
        """Return those of the terms of a rank's memory that are others than with AdamW.

        The iteration runs when no activations are there.

        Parameters
        ----------
        terms
            Bytes by term with AdamW.
        of_others
            Bytes of the states of what AdamW updates.
        gradient_bytes
            Bytes of an element of the sums of gradients.
        """
        padding = self.padding + self.expert_padding
        matrix_bytes = FP32_BYTES * (1.0 + has_master_copy(shapes.job))
        in_step = self._workspace_bytes(shapes) - terms["activations"]
        return {
            "weights": terms["weights"] + padding * shapes.element_bytes,
            "gradients": terms["gradients"] + padding * gradient_bytes,
            "optimizer_states": of_others + self.elements * matrix_bytes,
            "working_set": np.maximum(terms["working_set"], in_step),
        }

    def _workspace_bytes(self, shapes: Shapes) -> Array:
        """Return the most that the iteration holds beside a matrix's states, shape (C,).

        The iterate and the next one are in bf16, and so are two products of m x m; before and after
        these the iterate is in fp32, too. A matrix that was gathered is there twice, in fp32.
        """
        most = np.zeros(len(shapes.table))
        for kind, number in self.numbers.items():
            gathered = 2.0 * FP32_BYTES * (kind.n_split(shapes) > 1.0)
            for _, width in kind.parts:
                elements, short = float(width) * kind.n_in, float(min(width, kind.n_in))
                of_ends = (FP32_BYTES + _BF16_BYTES) * elements
                of_steps = 2.0 * _BF16_BYTES * (elements + short**2)
                nbytes = gathered * elements + max(of_ends, of_steps)
                most = np.maximum(most, np.where(number > 0.0, nbytes, 0.0))
        return most


def owned_columns(
    shapes: Shapes, options: Megatron3D, layers: Sequence[int], first: bool, last: bool
) -> Array:
    """Return the fields of `Owned` for a stage with some layers, as rows of an array.

    The layers are taken to be cut evenly where a rank has several virtual stages. Each of these has
    buffers of its own, and only those of the first virtual stage of the first stage are cut into
    buckets (training/training.py, disable_bucketing).
    """
    kinds = Matrices.of(shapes.model)
    table = shapes.table
    layers = shapes.backward_layers(layers)
    ones = np.ones(len(table))
    n_tensor = table.size("tensor") * ones
    n_replicas, n_expert_replicas = ones, ones
    if options.distributed_optimizer:
        n_replicas = table.size(options.replicas) * ones
        if options.has_experts:
            n_expert_replicas = table.size(EXPERT_REPLICAS) * ones
    n_split, n_spread = shapes.expert_tensor * ones, shapes.expert_split * ones
    given = n_tensor, n_replicas, n_expert_replicas, n_split, n_spread, table.n_virtual * ones
    rows, row_of = distinct(*given)
    trained = np.sum(trained_parameters(shapes, layers, first, last), axis=0)
    found = []
    for tensor, replicas, expert_replicas, expert_tensor, spread, n_virtual in zip(
        *(size[rows].tolist() for size in given), strict=True
    ):
        total = np.zeros(4 + len(kinds.dense) + len(kinds.expert))
        for number, chunk in enumerate(np.array_split(np.asarray(layers, int), int(n_virtual))):
            is_first, is_last = first and number == 0, last and number == n_virtual - 1
            order = _order(shapes, kinds, chunk.tolist(), is_first, is_last)
            n_local = 0 if shapes.model.experts is None else shapes.model.n_experts / spread
            of_experts = _order_of_experts(shapes, kinds, chunk.tolist(), round(n_local))
            least = partial(_least_elements, options, shapes, is_first)
            for group, ordered, n_ranks, n_parts, place in (
                (kinds.dense, order, replicas, tensor, 0),
                (kinds.expert, of_experts, expert_replicas, expert_tensor, 1),
            ):
                pieces = tuple(each.piece(n_parts if each.is_split else 1.0) for each in group)
                share = shared(pieces, ordered, int(n_ranks), least(n_ranks))
                stored = sum(pieces[kind].elements for kind in ordered)
                begin = 4 + place * len(kinds.dense)
                total[place] += share.buffer_elements - stored
                total[2] -= stored
                total[3] += share.owned_elements
                total[begin : begin + len(group)] += share.numbers
        found.append(total)
    columns = np.stack(found, axis=1)[:, row_of]
    columns[2] += trained
    return columns


def _least_elements(
    options: Megatron3D, shapes: Shapes, is_first: bool, n_replicas: float
) -> float:
    """Return the least number of elements of a bucket; infinite where there is one."""
    if not (is_first and options.overlaps_reduction(shapes.job)):
        return np.inf
    program = options.engine.megatron
    return max(program.bucket_elements, program.bucket_elements_per_replica * n_replicas)


def _order(
    shapes: Shapes, kinds: Matrices, layers: Sequence[int], first: bool, last: bool
) -> tuple[int, ...]:
    """Return the kinds of a rank's matrices as the backward pass comes to them, without experts."""
    model, job = shapes.model, shapes.job
    found = list(kinds.module * (last * job.mtp_modules))
    for layer in reversed(layers):
        found += reversed(kinds.of_layer(model.blocks[layer].has_experts))
    if first and job.trains_embedding:
        found += kinds.positions
    place = {kind: number for number, kind in enumerate(kinds.dense)}
    return tuple(place[kind] for kind in found)


def _order_of_experts(
    shapes: Shapes, kinds: Matrices, layers: Sequence[int], n_local: int
) -> tuple[int, ...]:
    """Return the same of the matrices of a rank's experts."""
    n_layers = sum(shapes.model.blocks[layer].has_experts for layer in layers)
    up, down = range(len(kinds.expert)) if kinds.expert else (0, 0)
    return ((down,) * n_local + (up,) * n_local) * n_layers if kinds.expert else ()


def broken_muon_rules(
    options: Megatron3D, model: Model, job: Job, placements: Placements
) -> dict[str, np.ndarray]:
    """Return, for each of Megatron-Core's rules of Muon, the placements that break it, shape (P,).

    training/arguments.py asserts it without Megatron-FSDP, and core/optimizer/__init__.py that no
    expert has parameters that AdamW updates. Weights in a low format, and pipelines that are fed
    from both ends, are not modelled.
    """
    every = np.ones(len(placements), dtype=bool)
    has_biases = model.experts is not None and model.experts.bias and options.distributed_optimizer
    rules = {
        "Muon has no sharded gradients": every & options.shards_gradients,
        "Muon is modelled without --low-weights": every & options.stores_low_weights(job),
        "Muon is modelled without DualPipe": every & (options.schedule == DUALPIPE),
    }
    if has_biases:
        reason = "Muon updates no biases of experts that are spread"
        rules[reason] = placements.size(EXPERT) > 1
    return {reason: is_broken for reason, is_broken in rules.items() if is_broken.any()}


def update_matrices(host: HostProgram, shapes: Shapes, owned: Owned, gradient_bytes: float) -> None:
    """Update the matrices of the rank that has most to compute, while all others wait for it."""
    local = {
        kind: number * (kind.n_in * kind.n_out / kind.n_split(shapes))
        for kind, number in owned.numbers.items()
    }
    elements = sum(local.values(), np.zeros(len(shapes.table)))
    n_matrices = sum(owned.numbers.values(), np.zeros(len(shapes.table)))
    if gradient_bytes < FP32_BYTES:
        host.memory_bound("muon.gradient", elements * (gradient_bytes + FP32_BYTES), "cast")
    host.memory_bound(
        "muon.moment", elements * _BEFORE_BYTES, "add", np.maximum(_BEFORE_KERNELS * n_matrices, 1)
    )
    for kind, number in owned.numbers.items():
        n_split = kind.n_split(shapes)
        if len(kind.parts) > 1:
            n_launches = np.maximum(_SPLIT_KERNELS * number, 1.0)
            host.memory_bound(
                f"muon.{kind.layer}.split", _SPLIT_BYTES * local[kind], "copy", n_launches
            )
        for part, width in kind.parts:
            _gather(host, f"muon.{part}", number, float(width) * kind.n_in, n_split)
            _orthogonalize(host, f"muon.{part}", number, width, kind.n_in)
    host.memory_bound(
        "muon.update", elements * _AFTER_BYTES, "add", np.maximum(_AFTER_KERNELS * n_matrices, 1)
    )
    if has_master_copy(shapes.job):
        nbytes = elements * (FP32_BYTES + shapes.element_bytes)
        host.memory_bound("muon.weights", nbytes, "copy")


def _gather(host: HostProgram, name: str, number: Array, elements: float, n_split: Array) -> None:
    """Gather the moments of matrices that a tensor group splits, one matrix after another."""
    if not (n_split > 1.0).any():
        return
    nbytes = number * elements * FP32_BYTES * (n_split > 1.0)
    host.run(names.all_gather(name), "all_gather", nbytes, "tensor", np.maximum(number, 1.0))
    n_launches = np.maximum(_JOIN_KERNELS * number, 1.0)
    host.memory_bound(names.join(name), _JOIN_BYTES / FP32_BYTES * nbytes, "copy", n_launches)


def _orthogonalize(
    host: HostProgram, name: str, number: Array, rows: float, columns: float
) -> None:
    """Make as many matrices of these sizes nearly orthogonal, one after another."""
    short, long = float(min(rows, columns)), float(max(rows, columns))
    n_launches = np.maximum(_NORMALIZE_KERNELS * number, 1.0)
    nbytes = number * (_NORMALIZE_BYTES * short * long)
    host.memory_bound(f"{name}.normalize", nbytes, "copy", n_launches)
    n_times = N_STEPS * number
    for product, n, k, mode in (
        ("gram", short, long, "NT"),
        ("square", short, short, "NN"),
        ("step", long, short, "NN"),
    ):
        host.launch(RepeatedGemm(f"{name}.{product}", short, n, k, mode, n_times=n_times))
    sum_bytes = n_times * (_SUM_BYTES * short * (short + long))
    host.memory_bound(f"{name}.sums", sum_bytes, "copy", np.maximum(2.0 * n_times, 1.0))
