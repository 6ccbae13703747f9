"""A rehearsed step held against its step plan and the memory model, line by line."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.engine import HELD_BACK, WORKSPACES
from axonn_tune.spec.groups import AxisGroups
from axonn_tune.spec.plan import (
    Attention,
    Collective,
    Gemm,
    MemoryBound,
    Operation,
    number,
)
from axonn_tune.spec.rehearsal import (
    ACTIVATIONS,
    GATHERED_WEIGHTS,
    HOLDERS,
    FusedAttention,
    Message,
    OtherKernel,
    Product,
    Rehearsal,
)
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction
from axonn_tune.validation.rehearsed_stage import (
    axes_of_rank,
    first_rank,
    issued_by_stage,
    stage_terms_bytes,
)

# Messages up to this size carry norms and losses; programs form these in many ways.
SMALL_BYTES = 4096
# Buckets of one reduction differ by an element or two, and shards may be padded.
SAME_BYTES = 1e-3
# Terms of the memory model that activations hold, besides the term of that name.
_ALSO_ACTIVATIONS = ("working_set",)
# Terms that are added to what tensors hold: by the profile of a machine, the allocator and cuBLAS.
NOT_OF_TENSORS = ("fragmentation", "reserved", HELD_BACK, WORKSPACES)


@dataclass(frozen=True)
class Subject:
    """What a line is about: operations of one kind and size.

    kind
        ``product``, ``attention``, ``attention backward``, or the kind of a collective.
    sizes
        Sizes of a product (the larger side, the smaller side, the inner size, and their number),
        or of attention (sequences, heads, sequence length, head size); empty for a collective.
        A product and its transpose are one, since a library forms either by exchanging factors.
    nbytes
        Bytes of a collective's call.
    group
        The axis of a collective; for a group that is none, its ranks.
    """

    kind: str
    sizes: tuple[int, ...]
    nbytes: int = 0
    group: str = ""

    @property
    def is_judged(self) -> bool:
        """Whether a difference counts."""
        return not self.group or self.nbytes > SMALL_BYTES


@dataclass(frozen=True)
class Line:
    """How often operations of one kind and size are issued in the step.

    names
        Their names in the step plan; empty for what is not planned.
    planned, rehearsed
        Numbers of calls.
    """

    subject: Subject
    names: tuple[str, ...]
    planned: int
    rehearsed: int

    @property
    def differs(self) -> bool:
        """Whether the program does something else than the plan says."""
        return self.subject.is_judged and self.planned != self.rehearsed


@dataclass(frozen=True)
class MemoryLine:
    """What holds memory at the peak, by the memory model and as rehearsed."""

    holder: str
    planned_bytes: float
    rehearsed_bytes: float


@dataclass(frozen=True)
class RehearsedStep:
    """A rehearsed step against its prediction.

    prediction
        The prediction of the step that was rehearsed.
    n_microsteps
        Number of micro-steps of the whole step, of which the rehearsed one may have had fewer.
    lines
        Products, attention and collectives.
    memory
        What holds memory.
    stage
        The stage of the pipeline of which a rank was rehearsed, counted from 0.
    planned_kernel_bytes, rehearsed_kernel_bytes
        Bytes that all other kernels move.
    """

    prediction: Prediction
    rehearsal: Rehearsal
    n_microsteps: int
    lines: tuple[Line, ...]
    memory: tuple[MemoryLine, ...]
    planned_kernel_bytes: float
    rehearsed_kernel_bytes: float
    stage: int = 0

    @property
    def rank(self) -> int:
        """The rank that was rehearsed: the first one of its stage."""
        return first_rank(self.prediction.layout, self.stage)

    @property
    def differing(self) -> list[Line]:
        """The lines that differ."""
        return [line for line in self.lines if line.differs]

    @property
    def planned_peak_bytes(self) -> float:
        """The most that tensors hold by the memory model."""
        return sum(line.planned_bytes for line in self.memory)

    @property
    def memory_error(self) -> float:
        """The error of the memory model, as a fraction of the rehearsed peak."""
        return self.planned_peak_bytes / self.rehearsal.peak_bytes - 1.0


def compare(
    prediction: Prediction, rehearsal: Rehearsal, n_microsteps: int, stage: int = 0
) -> RehearsedStep:
    """Hold a rehearsed step against its prediction; see `RehearsedStep`.

    Parameters
    ----------
    stage
        The stage of the pipeline of which the first rank was rehearsed.
    """
    table = candidate_table(prediction.scenario, prediction.configuration)
    plan = prediction.scenario.plan(table)
    planned: dict[Subject, int] = defaultdict(int)
    names: dict[Subject, dict[str, None]] = defaultdict(dict)
    kernel_bytes = 0.0
    rank = first_rank(prediction.layout, stage)
    groups = axes_of_rank(table.placements, rank)
    for operation, count in issued_by_stage(plan, prediction.layout, stage):
        if isinstance(operation, MemoryBound):
            kernel_bytes += count * number(operation.nbytes)
        for subject, n_calls in _planned(operation, table.placements, groups, rank):
            planned[subject] += round(count * n_calls)
            names[subject][operation.name] = None
    done = _rehearsed(rehearsal, groups, planned)
    return RehearsedStep(
        prediction,
        rehearsal,
        n_microsteps,
        tuple(
            Line(subject, tuple(names[subject]), planned.get(subject, 0), done.get(subject, 0))
            for subject in dict.fromkeys([*planned, *done])
        ),
        _memory(stage_terms_bytes(prediction, table, stage), rehearsal),
        kernel_bytes,
        float(
            sum(
                operation.nbytes * count
                for operation, count in rehearsal.counts.items()
                if isinstance(operation, OtherKernel)
            )
        ),
        stage,
    )


def _planned(
    operation: Operation, placements: Placements, groups: Mapping[tuple[int, ...], str], rank: int
) -> Iterator[tuple[Subject, float]]:
    """Yield what an operation of the plan consists of, with the number of calls.

    Axes whose groups have the same ranks have the same name, that of `groups`.
    """
    if isinstance(operation, Gemm):
        sizes = [round(number(size)) for size in (operation.m, operation.n, operation.k)]
        yield _product(*sizes), number(operation.n_products)
    elif isinstance(operation, Attention):
        yield from _planned_attention(operation)
    elif isinstance(operation, Collective):
        nbytes = number(operation.nbytes)
        of_axis = AxisGroups.of(placements, operation.axis)
        ranks = tuple(of_axis.ranks(of_axis.group_of(rank)))
        if nbytes and len(ranks) > 1:
            n_calls = number(operation.n_calls)
            subject = Subject(operation.kind, (), round(nbytes / n_calls), groups[ranks])
            yield subject, n_calls


def _planned_attention(operation: Attention) -> Iterator[tuple[Subject, float]]:
    """Yield a fused kernel, or the products of unfused attention, two forward and four backward."""
    sequences, heads = round(number(operation.n_sequences)), round(number(operation.n_heads))
    s, d = round(number(operation.seq_len)), operation.head_dim
    if operation.fused:
        n_calls = number(operation.n_launches)
        if n_calls:
            yield _attention(sequences, heads, s, d, operation.backward), n_calls
        return
    n_of_scores, n_of_values = (1.0, 3.0) if operation.backward else (1.0, 1.0)
    yield _product(s, s, d, sequences * heads), n_of_scores
    yield _product(s, d, s, sequences * heads), n_of_values


def _product(m: int, n: int, k: int, batch: int = 1) -> Subject:
    return Subject("product", (max(m, n), min(m, n), k, batch))


def _attention(sequences: int, heads: int, seq_len: int, head_dim: int, backward: bool) -> Subject:
    kind = "attention backward" if backward else "attention"
    return Subject(kind, (sequences, heads, seq_len, head_dim))


def _rehearsed(
    rehearsal: Rehearsal, groups: Mapping[tuple[int, ...], str], planned: Mapping[Subject, int]
) -> dict[Subject, int]:
    """Count what the program did; a message of nearly a planned size counts as the planned one."""
    done: dict[Subject, int] = defaultdict(int)
    for operation, count in rehearsal.counts.items():
        if isinstance(operation, Product):
            sizes = operation.m, operation.n, operation.k, operation.batch
            done[_product(*sizes)] += count
        elif isinstance(operation, FusedAttention):
            o = operation
            subject = _attention(o.n_sequences, o.n_heads, o.seq_len, o.head_dim, o.backward)
            done[subject] += count
        elif isinstance(operation, Message):
            group = groups.get(operation.ranks, operation.ranks_text)
            done[_nearest(Subject(operation.kind, (), operation.nbytes, group), planned)] += count
    return done


def _nearest(subject: Subject, planned: Mapping[Subject, int]) -> Subject:
    """Return the planned message of the same kind, group and nearly the same size, or this one."""
    for other in planned:
        if (other.kind, other.group) == (subject.kind, subject.group) and math.isclose(
            other.nbytes, subject.nbytes, rel_tol=SAME_BYTES
        ):
            return other
    return subject


def _memory(planned_bytes: Mapping[str, float], rehearsal: Rehearsal) -> tuple[MemoryLine, ...]:
    """Return the planned and the rehearsed bytes by what holds them.

    The working set of the memory model counts as activations. So does what is gathered where no
    weights are: these are tokens.
    """
    by_holder: dict[str, float] = defaultdict(float)
    for term, nbytes in planned_bytes.items():
        if term not in NOT_OF_TENSORS:
            by_holder[ACTIVATIONS if term in _ALSO_ACTIVATIONS else term] += nbytes
    held_bytes = defaultdict(float, rehearsal.held_bytes)
    if GATHERED_WEIGHTS not in by_holder:
        held_bytes[ACTIVATIONS] += held_bytes.pop(GATHERED_WEIGHTS, 0.0)
    return tuple(
        MemoryLine(holder, by_holder.get(holder, 0.0), held_bytes[holder])
        for holder in dict.fromkeys([*HOLDERS, *by_holder])
    )
