"""Muon in Megatron-Core: what a rank keeps, multiplies and sends to update whole matrices.

Jordan et al., kellerjordan.github.io/posts/muon, and Liu et al., arXiv 2502.16982 (Moonlight). The
code is NVIDIA/Megatron-LM at d98e8a64 (core/optimizer/emerging_optimizers.py, __init__.py and
layer_wise_optimizer.py) with NVIDIA-NeMo/Emerging-Optimizers at fd772926
(orthogonalized_optimizers/muon_utils.py), with the usual --muon-* flags.

A matrix (`muon_matrices`) has one moment in fp32, which a few steps of the iteration of Newton and
Schulz make nearly orthogonal in bf16; all else has AdamW. With the distributed optimizer each
replica updates some whole matrices (`owners`), reduces their gradients to it, and gathers those of
the others, as with AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.candidates import Placements, distinct
from axonn_tune.spec.job import DISTRIBUTED, DUPLICATED, Job
from axonn_tune.spec.layout import EXPERT, EXPERT_REPLICAS
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, RepeatedGemm
from axonn_tune.spec.schedule import DUALPIPE
from axonn_tune.strategies.megatron.muon_matrices import (
    NEWTON_SCHULZ_STEPS,
    Iterate,
    Matrices,
    Matrix,
    pieces_of,
)
from axonn_tune.strategies.megatron.owners import Piece, Shares, dealt, shared
from axonn_tune.strategies.megatron.stage import trained_parameters
from axonn_tune.strategies.optimizer import has_master_copy
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes

if TYPE_CHECKING:
    from axonn_tune.strategies.megatron.megatron3d import Megatron3D

# --muon-fp32-matmul-prec medium.
_BF16_BYTES = 2.0
# Bytes that torch's kernels of one operation each read and write of an element in fp32. Before the
# iteration they are the decay of the weight (8) and the moment (12); after it two scales (16) and
# the sum with the weight (12).
_BEFORE_BYTES = 20.0
_AFTER_BYTES = 28.0
# The same of an element of the iterate: its norm (4), the quotient (8), and the casts to bf16 and
# back (12).
_NORMALIZE_BYTES = 24.0
# What is gathered lies in one buffer, is copied to a tensor for each rank, and then joined.
_JOIN_BYTES = 16.0
# Queries, keys and values are copied out of their common matrix, and joined again.
_SPLIT_BYTES = 16.0
# Torch copies what a product is added to, and the product reads the copy.
_SUM_BYTES = 3.0 * _BF16_BYTES


@dataclass(frozen=True)
class Owned:
    """What ranks of one stage have of the matrices, arrays of shape (C,).

    Attributes
    ----------
    padding, expert_padding
        Elements of the buffers of gradients and weights that no matrix fills, of all but routed
        experts and of these.
    others
        Trained elements that a rank holds besides these matrices, which AdamW updates.
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

    def chosen(self, is_chosen: np.ndarray, other: Owned) -> Owned:
        """Return these columns where `is_chosen`, shape (C,), and those of `other` elsewhere."""
        return Owned(
            np.where(is_chosen, self.padding, other.padding),
            np.where(is_chosen, self.expert_padding, other.expert_padding),
            np.where(is_chosen, self.others, other.others),
            np.where(is_chosen, self.elements, other.elements),
            {
                kind: np.where(is_chosen, number, other.numbers[kind])
                for kind, number in self.numbers.items()
            },
        )

    def memory(
        self,
        shapes: Shapes,
        terms: Mapping[str, Array],
        of_others: Array,
        gathered: Array,
        gradient_bytes: float,
    ) -> dict[str, Array]:
        """Return those terms of a rank's memory that are not as with AdamW.

        The iteration and the gather run when no activations are there.

        Parameters
        ----------
        terms
            Bytes by term with AdamW.
        of_others
            Bytes of the states of what AdamW updates.
        gathered
            Bytes of the buffers into which updated weights are gathered before they are copied.
        gradient_bytes
            Bytes of an element of the sums of gradients.
        """
        padding = self.padding + self.expert_padding
        matrix_bytes = FP32_BYTES * (1.0 + has_master_copy(shapes.job))
        in_step = np.maximum(self._workspace_bytes(shapes), gathered) - terms["activations"]
        return {
            "weights": terms["weights"] + padding * shapes.element_bytes,
            "gradients": terms["gradients"] + padding * gradient_bytes,
            "optimizer_states": of_others + self.elements * matrix_bytes,
            "working_set": np.maximum(terms["working_set"], in_step),
        }

    def _workspace_bytes(self, shapes: Shapes) -> Array:
        """Return the most that the iteration holds beside a matrix's states, shape (C,).

        The iterate and the next one are in bf16, and so are two of the smaller products; before and
        after these the iterate is in fp32, too. A matrix that was gathered is there twice, in fp32.
        """
        most = np.zeros(len(shapes.table))
        for kind, number in self.numbers.items():
            n_split = kind.n_split(shapes)
            gathered = 2.0 * FP32_BYTES * _is_gathered(shapes.job, n_split)
            for _, n_out in kind.parts:
                side, other = kind.iterate(n_out, n_split, shapes.job.muon_mode)
                of_ends = (FP32_BYTES + _BF16_BYTES) * side * other
                of_steps = 2.0 * _BF16_BYTES * side * (other + side)
                nbytes = gathered * side * other + np.maximum(of_ends, of_steps)
                most = np.maximum(most, np.where(number > 0.0, nbytes, 0.0))
        return most


def _is_gathered(job: Job, n_split: Array) -> np.ndarray:
    """Return whether ranks gather a whole matrix, if it is split over so many, shape (C,)."""
    return (n_split > 1.0) & (job.muon_mode == DUPLICATED)


def broken_muon_rules(
    options: Megatron3D, model: Model, job: Job, placements: Placements
) -> dict[str, np.ndarray]:
    """Return, for each of Megatron-Core's rules of Muon, the placements that break it, shape (P,).

    training/arguments.py asserts it without Megatron-FSDP, and core/optimizer/__init__.py that
    AdamW updates nothing of experts that are spread over ranks. Weights in a low format, and
    pipelines that are fed from both ends, are not modelled.
    """
    every = np.ones(len(placements), dtype=bool)
    rules = {
        "Muon has no sharded gradients": every & options.shards_gradients,
        "Muon is modelled without --low-weights": every & options.stores_low_weights(job),
        "Muon is modelled without DualPipe": every & (options.schedule == DUALPIPE),
    }
    if model.experts is not None and model.experts.bias and options.distributed_optimizer:
        rules["Muon updates no biases of experts on several ranks"] = placements.size(EXPERT) > 1
    return {reason: is_broken for reason, is_broken in rules.items() if is_broken.any()}


class _Ranks(NamedTuple):
    """The numbers of ranks on which it depends what a rank owns, for one candidate.

    Attributes
    ----------
    tensor, expert_tensor
        Ranks that split a matrix, and one of an expert.
    replicas, expert_replicas
        Ranks that share the matrices, and those of the same experts.
    expert_split
        Ranks over which the experts of a layer are spread.
    n_chunks
        Parts of a rank's layers whose matrices are shared by themselves.
    """

    tensor: float
    expert_tensor: float
    replicas: float
    expert_replicas: float
    expert_split: float
    n_chunks: float


def owned_matrices(
    shapes: Shapes, options: Megatron3D, layers: Sequence[int], first: bool, last: bool
) -> Owned:
    """Return what a rank of a stage with some layers has of their matrices.

    Each virtual stage of a rank has buffers of its own, and the layers are taken to be cut evenly.
    All else is taken to be shared evenly, although whole tensors are dealt where matrices are.
    """
    table = shapes.table
    layers = shapes.backward_layers(layers)
    is_shared = options.distributed_optimizer
    n_ranks = {
        "tensor": table.size("tensor"),
        "expert_tensor": shapes.expert_tensor,
        "replicas": table.size(options.replicas) if is_shared else 1,
        "expert_replicas": table.size(EXPERT_REPLICAS) if is_shared and options.has_experts else 1,
        "expert_split": shapes.expert_split,
        "n_chunks": 1 if options.deals_matrices(shapes.job) else table.n_virtual,
    }
    sizes = np.stack(np.broadcast_arrays(*n_ranks.values(), np.ones(len(table)))[:-1])
    rows, row_of = distinct(*sizes)
    ranks = [
        _Ranks(**dict(zip(n_ranks, sizes[:, row].tolist(), strict=True))) for row in rows.tolist()
    ]
    of_rows = [_owned_by_rank(shapes, options, layers, (first, last), each) for each in ranks]
    padding, expert_padding, stored, elements, numbers = (
        np.array(values)[row_of] for values in zip(*of_rows, strict=True)
    )
    trained = np.sum(trained_parameters(shapes, layers, first, last), axis=0)
    of_kinds = dict(zip(Matrices.of(shapes.model).all, numbers.T, strict=True))
    return Owned(padding, expert_padding, trained - stored, elements, of_kinds)


class _OwnedByRank(NamedTuple):
    """What the ranks of one candidate have of the matrices, as `Owned` describes it.

    Attributes
    ----------
    stored
        Elements of all matrices.
    numbers
        Numbers of the matrices of each kind, in the order of `Matrices.all`.
    """

    padding: float
    expert_padding: float
    stored: float
    elements: float
    numbers: tuple[int, ...]


def _owned_by_rank(
    shapes: Shapes,
    options: Megatron3D,
    layers: Sequence[int],
    ends: tuple[bool, bool],
    ranks: _Ranks,
) -> _OwnedByRank:
    """Return what the ranks of one candidate have of the matrices of a stage.

    Only the buffers of the first virtual stage of the first stage are cut into buckets
    (training/training.py, disable_bucketing).
    """
    job = shapes.job
    kinds = Matrices.of(shapes.model)
    dense_pieces = pieces_of(kinds.dense, ranks.tensor, job.muon_mode)
    expert_pieces = pieces_of(kinds.experts, ranks.expert_tensor, job.muon_mode)
    n_local = round(shapes.model.n_experts / ranks.expert_split)
    chunks = np.array_split(np.asarray(layers, dtype=int), int(ranks.n_chunks))
    of_dense: list[Shares] = []
    of_experts: list[Shares] = []
    for number, chunk in enumerate(chunks):
        is_first, is_last = ends[0] and number == 0, ends[1] and number == len(chunks) - 1
        dense, experts = kinds.orders(shapes.model, chunk.tolist(), n_local)
        of_modules = kinds.places_of(kinds.module * (is_last * job.mtp_modules))
        of_positions = kinds.places_of(kinds.positions * (is_first and job.trains_embedding))
        dense = (*of_modules, *dense, *of_positions)
        shared_by = partial(_shares, options, job, is_first)
        of_dense.append(shared_by(dense_pieces, dense, int(ranks.replicas)))
        of_experts.append(shared_by(expert_pieces, experts, int(ranks.expert_replicas)))
    everything = of_dense + of_experts
    return _OwnedByRank(
        padding=sum(each.padding for each in of_dense),
        expert_padding=sum(each.padding for each in of_experts),
        stored=sum(each.stored_elements for each in everything),
        elements=sum(each.owned_elements for each in everything),
        numbers=tuple(
            sum(of_chunks)
            for group in (of_dense, of_experts)
            for of_chunks in zip(*(each.numbers for each in group), strict=True)
        ),
    )


def _shares(
    options: Megatron3D,
    job: Job,
    is_first: bool,
    pieces: tuple[Piece, ...],
    order: tuple[int, ...],
    n_replicas: int,
) -> Shares:
    """Return how replicas share the matrices of a virtual stage, which may be the first one."""
    if options.deals_matrices(job):
        return dealt(pieces, order, n_replicas)
    return shared(pieces, order, n_replicas, _least_elements(options, job, is_first, n_replicas))


def _least_elements(options: Megatron3D, job: Job, is_first: bool, n_replicas: float) -> float:
    """Return the least number of elements of a bucket; infinite where there is one."""
    if not (is_first and options.overlaps_reduction(job)):
        return np.inf
    program = options.engine.megatron
    return max(program.bucket_elements, program.bucket_elements_per_replica * n_replicas)


def update_matrices(host: HostProgram, shapes: Shapes, owned: Owned, gradient_bytes: float) -> None:
    """Update the matrices of the rank that has most to compute, while all others wait for it.

    What the host issues for one matrix before, within and after the iteration counts as one
    operation each. How long it needs for that is not known.
    """
    nothing = np.zeros(len(shapes.table))
    local = {
        kind: number * (kind.linear.parameters / kind.n_split(shapes))
        for kind, number in owned.numbers.items()
    }
    elements = sum(local.values(), nothing)
    n_matrices = _at_least_one(sum(owned.numbers.values(), nothing))
    if gradient_bytes < FP32_BYTES:
        nbytes = elements * (gradient_bytes + FP32_BYTES)
        host.memory_bound("muon.gradient", nbytes, "cast", n_matrices)
    host.memory_bound("muon.moment", elements * _BEFORE_BYTES, "add", n_matrices)
    for kind, number in owned.numbers.items():
        if len(kind.parts) > 1:
            name, nbytes = f"muon.{kind.linear.name}.split", _SPLIT_BYTES * local[kind]
            host.memory_bound(name, nbytes, "copy", _at_least_one(number))
        n_split = kind.n_split(shapes)
        for part, n_out in kind.parts:
            name, iterate = f"muon.{part}", kind.iterate(n_out, n_split, shapes.job.muon_mode)
            _gather(host, name, number * _is_gathered(shapes.job, n_split), iterate)
            is_summed = (n_split > 1.0) & (shapes.job.muon_mode == DISTRIBUTED)
            _orthogonalize(host, name, number, iterate, is_summed)
    host.memory_bound("muon.update", elements * _AFTER_BYTES, "add", n_matrices)
    if has_master_copy(shapes.job):
        nbytes = elements * (FP32_BYTES + shapes.element_bytes)
        host.memory_bound("muon.weights", nbytes, "copy")


def _at_least_one(number: Array) -> Array:
    """Return at least one launch, so that bytes can be divided by it; without bytes it is free."""
    return np.maximum(number, 1.0)


def _gather(host: HostProgram, name: str, number: Array, iterate: Iterate) -> None:
    """Gather the moments of so many matrices over the tensor group, one matrix after another."""
    if not number.any():
        return
    nbytes = number * FP32_BYTES * iterate.side * iterate.other
    host.run(names.all_gather(name), "all_gather", nbytes, "tensor", _at_least_one(number))
    joined_bytes = _JOIN_BYTES / FP32_BYTES * nbytes
    host.memory_bound(names.join(name), joined_bytes, "copy", _at_least_one(number))


def _orthogonalize(
    host: HostProgram, name: str, number: Array, iterate: Iterate, is_summed: np.ndarray
) -> None:
    """Make so many matrices nearly orthogonal, one after another; sum products of their parts."""
    side, other = iterate
    nbytes = number * (_NORMALIZE_BYTES * side * other)
    host.memory_bound(f"{name}.normalize", nbytes, "copy", _at_least_one(number))
    n_times = NEWTON_SCHULZ_STEPS * number
    host.launch(RepeatedGemm(f"{name}.gram", side, side, other, "NT", n_times=n_times))
    if is_summed.any():
        gram_bytes = n_times * is_summed * (_BF16_BYTES * side**2)
        n_calls = _at_least_one(n_times)
        host.run(names.all_reduce(name), "all_reduce", gram_bytes, "tensor", n_calls)
    host.launch(RepeatedGemm(f"{name}.square", side, side, side, "NN", n_times=n_times))
    host.launch(RepeatedGemm(f"{name}.step", side, other, side, "NN", n_times=n_times))
    sum_bytes = n_times * (_SUM_BYTES * side * (side + other))
    host.memory_bound(f"{name}.sums", sum_bytes, "copy", _at_least_one(number))
