"""A traced step beside its prediction: operations that match, and those that one side lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.spec.layout import EXPERT, EXPERT_REPLICAS
from axonn_tune.spec.traced import (
    ATTENTION,
    ATTENTION_BACKWARD,
    MEMORY_BOUND,
    OPTIMIZER,
    PRODUCT,
    Trace,
    TracedOperation,
)
from axonn_tune.step.explain import Explanation, OperationCost
from axonn_tune.step.predict import candidate_table
from axonn_tune.units import format_quantity

# Collectives match if the sizes of their buffers differ by at most this fraction.
_SAME_SIZE = 0.05
# Words of the descriptions of process groups, by axis: torch's meshes, and Megatron-Core's groups.
_WORDS = {
    "shard": ("fsdp", "shard"),
    "replica": ("replicate",),
    "tensor": ("tensor_model", "mesh_tp"),
    "context": ("context_parallel", "mesh_cp"),
    "data": ("data_parallel", "mesh_dp"),
    "pipeline": ("pipeline_model", "mesh_pp"),
    EXPERT: ("expert_model", "mesh_ep"),
    EXPERT_REPLICAS: ("expert_data_parallel",),
}


@dataclass(frozen=True)
class MeasuredLine:
    """Sets predicted operations of one step beside the traced ones that are the same work.

    kind
        Kind of kernel or collective.
    predicted_names, traced_names
        What a plan and what a trace call them; one of the two may be empty.
    size
        Sizes of a product, or ranks and bytes of a collective.
    predicted_calls, traced_calls
        Number of calls in a step.
    predicted_seconds, traced_seconds
        Their time in a step.
    shortest_traced_seconds
        Time of the shortest traced call; 0 if there is none.
    is_of_one_size
        Whether all calls have the sizes that `size` says.
    """

    kind: str
    size: str
    predicted_names: tuple[str, ...]
    traced_names: tuple[str, ...]
    predicted_calls: float
    traced_calls: float
    predicted_seconds: float
    traced_seconds: float
    shortest_traced_seconds: float
    is_of_one_size: bool

    @property
    def is_on_both_sides(self) -> bool:
        """Whether the work is in the plan and in the trace."""
        return bool(self.predicted_names and self.traced_names)


def beside_trace(explanation: Explanation, trace: Trace) -> tuple[MeasuredLine, ...]:
    """Return all work of a prediction and of a trace, the longest first.

    Products match by their sizes, whichever operand is transposed; traced products of unknown sizes
    match the products that are left. Attention, the optimizer and all other kernels are added up.
    Collectives match by kind, number of ranks and bytes; those that are left, by kind and number of
    ranks.
    """
    compute = [op for op in explanation.operations if not op.axis and op.kind != "host"]
    traced = list(trace.operations)
    lines = [
        *_products(
            [op for op in compute if op.kind.startswith("GEMM")],
            [op for op in traced if op.kind == PRODUCT],
            trace.n_steps,
        ),
        *_kernels([op for op in compute if not op.kind.startswith("GEMM")], traced, trace.n_steps),
        *_collectives(explanation, [op for op in traced if op.is_collective], trace.n_steps),
    ]
    return tuple(sorted(lines, key=lambda line: -max(line.predicted_seconds, line.traced_seconds)))


def _line(
    kind: str,
    size: str,
    predicted: Sequence[OperationCost],
    traced: Sequence[TracedOperation],
    n_steps: int,
    is_of_one_size: bool = True,
) -> MeasuredLine:
    return MeasuredLine(
        kind=kind,
        size=size,
        predicted_names=tuple(op.name for op in predicted),
        traced_names=tuple(dict.fromkeys(op.name for op in traced)),
        predicted_calls=sum(op.n_calls for op in predicted),
        traced_calls=len(traced) / n_steps,
        predicted_seconds=sum(op.total_seconds for op in predicted),
        traced_seconds=sum(op.seconds for op in traced) / n_steps,
        shortest_traced_seconds=min((op.seconds for op in traced), default=0.0),
        is_of_one_size=is_of_one_size,
    )


def _products(
    predicted: Iterable[OperationCost], traced: Iterable[TracedOperation], n_steps: int
) -> list[MeasuredLine]:
    """Return a line for each size of a product, and one for those of unknown sizes."""
    planned: dict[tuple[int, ...], list[OperationCost]] = defaultdict(list)
    ran: dict[tuple[int, ...], list[TracedOperation]] = defaultdict(list)
    for op in predicted:
        planned[_product_key(op.shape)].append(op)
    for product in traced:
        ran[_key(product.shape)].append(product)
    unknown = ran.pop((), [])
    grouped = planned.pop((), [])
    if unknown:
        for key in [key for key in planned if key not in ran]:
            grouped += planned.pop(key)
    lines = [
        _line(PRODUCT, " x ".join(map(str, key)), planned.get(key, []), ran.get(key, []), n_steps)
        for key in {**planned, **ran}
    ]
    if unknown or grouped:
        lines.append(_line(PRODUCT, "of sizes not traced", grouped, unknown, n_steps, False))
    return lines


def _product_key(shape: str) -> tuple[int, ...]:
    """Return the key of a planned product's sizes; grouped products have none."""
    sizes = shape.split(" x ")
    return _key(tuple(map(int, sizes))) if all(size.isdecimal() for size in sizes) else ()


def _key(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of a product with the smaller one of m and n first, and k last."""
    return (*sorted(shape[:2]), *shape[2:])


def _kernels(
    predicted: Iterable[OperationCost], traced: Sequence[TracedOperation], n_steps: int
) -> list[MeasuredLine]:
    """Return a line for each kind of kernel that is no product."""
    planned: dict[str, list[OperationCost]] = defaultdict(list)
    for op in predicted:
        planned[_kernel_kind(op)].append(op)
    kinds = (ATTENTION, ATTENTION_BACKWARD, OPTIMIZER, MEMORY_BOUND)
    lines = [
        _line(kind, "", planned[kind], [op for op in traced if op.kind == kind], n_steps, False)
        for kind in kinds
    ]
    return [line for line in lines if line.predicted_names or line.traced_names]


def _kernel_kind(op: OperationCost) -> str:
    if op.kind == "attention":
        return ATTENTION_BACKWARD if op.name.startswith("backward") else ATTENTION
    return OPTIMIZER if op.name.startswith("optimizer.") else MEMORY_BOUND


def _collectives(
    explanation: Explanation, traced: Iterable[TracedOperation], n_steps: int
) -> list[MeasuredLine]:
    """Return a line for each kind, group and size of a collective, and for what is left."""
    prediction = explanation.prediction
    table = candidate_table(prediction.scenario, prediction.configuration)
    planned: dict[tuple[str, str], list[OperationCost]] = defaultdict(list)
    for op in explanation.operations:
        if op.axis and op.kind != "copy":
            planned[op.kind, op.axis].append(op)
    n_ranks = {axis: int(table.size(axis)[0]) for _, axis in planned}
    ran: dict[tuple[str, str], list[TracedOperation]] = defaultdict(list)
    for collective in traced:
        ran[collective.kind, _group_of(collective, planned, n_ranks)].append(collective)
    return [
        line
        for kind, group in {**planned, **ran}
        for line in _of_group(
            kind,
            f"{group} ({n_ranks[group]})" if group in n_ranks else group,
            planned.get((kind, group), []),
            ran.get((kind, group), []),
            n_steps,
        )
    ]


def _group_of(
    collective: TracedOperation,
    planned: Mapping[tuple[str, str], Sequence[OperationCost]],
    n_ranks: Mapping[str, int],
) -> str:
    """Return the axis of the plan along which a collective ran, or what the trace says of it.

    Several axes may have that size. The description of the group chooses among them, or else the
    nearest number of bytes.
    """
    described = _described_axes(collective.group)
    distances = {
        axis: min(abs(op.nbytes - collective.nbytes) for op in operations)
        for (kind, axis), operations in planned.items()
        if kind == collective.kind
        and (n_ranks[axis] == collective.n_ranks or kind == "send_recv")
        and (not described or described & set(axis.split("*")))
    }
    if not distances:
        size = f" of {collective.n_ranks}" if collective.n_ranks else ""
        return f"{collective.group or 'a group'}{size}"
    return min(distances, key=lambda axis: distances[axis])


def _described_axes(group: str) -> set[str]:
    """Return the axes that the description of a process group may mean; none if it says nothing."""
    lowered = group.lower()
    return {axis for axis, words in _WORDS.items() if any(word in lowered for word in words)}


def _of_group(
    kind: str,
    group: str,
    predicted: Sequence[OperationCost],
    traced: Sequence[TracedOperation],
    n_steps: int,
) -> list[MeasuredLine]:
    """Return a line for each size that both sides have, and one for all other sizes."""
    sizes = sorted({op.nbytes for op in predicted})
    ran: dict[float, list[TracedOperation]] = {size: [] for size in sizes}
    others: list[TracedOperation] = []
    for op in traced:
        same = [size for size in sizes if abs(size - op.nbytes) <= _SAME_SIZE * size]
        nearest = min(same, key=lambda size: abs(size - op.nbytes), default=None)
        (others if nearest is None else ran[nearest]).append(op)
    lines = [
        _line(
            kind,
            f"{group}, {format_quantity(size, 'size_bytes')}",
            [op for op in predicted if op.nbytes == size],
            ran[size],
            n_steps,
        )
        for size in sizes
        if ran[size]
    ]
    left = [op for op in predicted if not ran[op.nbytes]]
    if left or others:
        lines.append(_line(kind, f"{group}, other sizes", left, others, n_steps, False))
    return lines
