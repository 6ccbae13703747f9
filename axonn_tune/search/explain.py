"""Where the time of one configuration goes, operation by operation, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.links import AxisLinks, placement_links
from axonn_tune.cost.pricing import (
    CollectivePrices,
    compute_seconds,
    gap_seconds,
    issue_seconds,
    lanes,
)
from axonn_tune.search.evaluate import Evaluator, interference
from axonn_tune.search.prediction import Prediction
from axonn_tune.search.problem import Search
from axonn_tune.search.resources import resources
from axonn_tune.simulate.timeline import Event, timeline
from axonn_tune.spec.grid import CandidateTable
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.measurement import Operation as MeasuredOperation
from axonn_tune.spec.plan import (
    COMPUTE,
    Attention,
    Collective,
    Gemm,
    MemoryBound,
    Operation,
    Phase,
)

IMPROVEMENT = 1.1  # what a sensitivity gives to a resource: 10 % more of it


@dataclass(frozen=True)
class OperationCost:
    """One operation of the plan, summed over a training step."""

    name: str
    kind: str
    shape: str  # m x n x k of a product, the parts of attention; empty for others
    nbytes: float  # full buffer of a collective, traffic of a memory-bound kernel; 0 for others
    n_calls: int
    seconds_per_call: float
    total_seconds: float
    exposed_seconds: float
    rate_per_s: float  # FLOP/s of a product; bytes/s that a rank's ring or a kernel moves
    bound_by: str  # link level, or the resource of a kernel
    axis: str

    @property
    def hidden_seconds(self) -> float:
        """Time of a collective beside computation."""
        return self.total_seconds - self.exposed_seconds if self.axis else 0.0


@dataclass(frozen=True)
class Sensitivity:
    """What 10 % more of one resource saves."""

    resource: str
    saved_seconds: float


@dataclass(frozen=True)
class Explanation:
    """A prediction taken apart; in a pipeline, the work of a rank of the last stage.

    host_seconds: what the host takes between kernels, in no operation. groups: over which
    collectives run.
    """

    prediction: Prediction
    operations: tuple[OperationCost, ...]
    sensitivities: tuple[Sensitivity, ...]
    host_seconds: float
    groups: tuple[str, ...]

    @property
    def exposed_seconds_by_axis(self) -> dict[str, float]:
        """Exposed communication of each axis, or product of axes, in a step."""
        return {
            axis: sum(op.exposed_seconds for op in self.operations if op.axis == axis)
            for axis in self.groups
        }


def explain(search: Search, prediction: Prediction) -> Explanation:
    """Play the configuration operation by operation and try each resource 10 % better."""
    played = _play(search, prediction)
    gap = search.machine.kernels.gap_seconds.value
    operations = _merged(
        _operation_cost(*cost, played.links, search.machine, played.table)
        for part in [*played.parts, *played.transfers]
        for cost in _sum_by_name(part.events, part.repeats, gap)
    )
    host = sum(part.repeats * (part.seconds - _end(part.events)) for part in played.parts)
    n_kernels = sum(op.n_calls for op in operations if not op.axis)
    sensitivities = _sensitivities(search, prediction)
    groups = search.strategy.axes.groups
    return Explanation(prediction, operations, sensitivities, n_kernels * gap + host, groups)


def _merged(costs: Iterable[OperationCost]) -> tuple[OperationCost, ...]:
    """One of each name: a synchronising micro-step has the operations of the others too."""
    by_name: dict[str, OperationCost] = {}
    for cost in costs:
        known = by_name.get(cost.name)
        if known is not None:
            n_calls = known.n_calls + cost.n_calls
            total = known.total_seconds + cost.total_seconds
            cost = replace(
                known,
                n_calls=n_calls,
                total_seconds=total,
                seconds_per_call=total / n_calls,
                exposed_seconds=known.exposed_seconds + cost.exposed_seconds,
            )
        by_name[cost.name] = cost
    return tuple(by_name.values())


def predicted_operations(search: Search, prediction: Prediction) -> list[MeasuredOperation]:
    """The predicted step in the form in which the runtime records one."""
    parts = _play(search, prediction).parts
    gap = search.machine.kernels.gap_seconds.value
    operations, origin = [], 0.0
    for part in (each for each in parts for _ in range(each.repeats)):
        events = part.events
        operations += [
            _as_measured(event, origin, gap) for event in events if _is_launched(event.operation)
        ]
        origin += part.seconds
    return operations


@dataclass(frozen=True)
class _Part:
    """Phases that are played together, so many times; the host may need longer than they."""

    events: list[Event]
    repeats: int
    seconds: float


@dataclass(frozen=True)
class _Played:
    """A step's parts; the transfers of a pipeline, which no part holds; links, the candidate."""

    parts: list[_Part]
    transfers: list[_Part]
    links: Mapping[str, AxisLinks]
    table: CandidateTable


def _end(events: list[Event]) -> float:
    return max((event.end_seconds for event in events), default=0.0)


def _as_measured(event: Event, origin: float, gap: float) -> MeasuredOperation:
    op, flops = event.operation, 0.0
    if isinstance(op, Collective):
        stream, kind, nbytes = op.axis, op.kind, _number(op.nbytes)
    elif isinstance(op, MemoryBound):
        stream, kind, nbytes = COMPUTE, "memory_bound", _number(op.nbytes)
    else:
        kind = "gemm" if isinstance(op, Gemm) else "attention"
        stream, nbytes, flops = COMPUTE, 0.0, _number(op.flops)
    end = event.end_seconds - (gap if stream == COMPUTE else 0.0)
    start = origin + event.start_seconds
    return MeasuredOperation(op.name, stream, kind, nbytes, flops, start, origin + end)


def _single(search: Search, prediction: Prediction) -> CandidateTable:
    axes = search.strategy.axes
    return CandidateTable.single(prediction.grid, prediction.order, prediction.micro_batch, axes)


def _play(search: Search, prediction: Prediction) -> _Played:
    """Play each part of a step, operation by operation."""
    machine = search.machine
    table = _single(search, prediction)
    plan = search.strategy.plan(search.model, search.job, prediction.variant, table)
    links = placement_links(machine, table.placements)
    collective = CollectivePrices(links, table)
    axis_lanes = {group: int(lane) for group, lane in zip(links, lanes(links)[:, 0], strict=True)}
    known: dict[int, float] = {}

    def seconds_of(operation: Operation) -> float:
        if id(operation) not in known:
            if isinstance(operation, Collective):
                seconds = collective(operation)
            else:
                seconds = compute_seconds(operation, machine, search.job)
                seconds = seconds + gap_seconds(seconds, machine)
            known[id(operation)] = float(np.ravel(seconds)[0])
        return known[id(operation)]

    def played(phases: tuple[Phase, ...], repeats: int) -> _Part:
        least = float(collective.busiest_link_seconds(phases)[0])
        events = timeline(phases, seconds_of, axis_lanes, interference(machine), least)
        host = float(issue_seconds(phases, table, machine)[0])
        return _Part(events, repeats, max(host, _end(events)))

    n_sync = int(bool(plan.sync_microstep))
    parts = [
        played(plan.microstep, prediction.n_microsteps - n_sync),
        played(plan.sync_microstep, n_sync),
        played(plan.step_end, 1),
    ]
    transfers = []
    if plan.pipeline is not None:
        transfer, n_passes = plan.pipeline.transfer, 2 * plan.pipeline.n_virtual
        seconds = seconds_of(transfer)
        event = Event("transfer", transfer, axis_lanes[transfer.axis], 0.0, seconds)
        transfers.append(_Part([event], n_passes * prediction.n_microsteps, seconds))
    return _Played([part for part in parts if part.repeats], transfers, links, table)


def _sum_by_name(
    events: list[Event], repeats: int, gap: float
) -> Iterator[tuple[Operation, int, float, float, float]]:
    """Operation, calls, seconds of one call, seconds and exposed seconds of a step, by name.

    `gap`: seconds of the host that the events of kernels include, and their sums do not.
    """
    groups: dict[str, list[Event]] = {}
    for event in events:
        if _is_launched(event.operation):
            groups.setdefault(event.operation.name, []).append(event)
    for group in groups.values():
        is_kernel = not isinstance(group[0].operation, Collective)
        total = sum(event.seconds for event in group) - is_kernel * len(group) * gap
        exposed = sum(event.exposed_seconds for event in group)
        n_calls = len(group) * repeats
        yield group[0].operation, n_calls, total / len(group), total * repeats, exposed * repeats


def _is_launched(operation: Operation) -> bool:
    return not isinstance(operation, MemoryBound) or _number(operation.nbytes) > 0


def _number(size: object) -> float:
    return float(np.ravel(np.asarray(size, dtype=np.float64))[0])


def _operation_cost(
    operation: Operation,
    n_issued: int,
    per_issue: float,
    total: float,
    exposed: float,
    links: Mapping[str, AxisLinks],
    machine: Machine,
    table: CandidateTable,
) -> OperationCost:
    axis, shape, nbytes, bound_by, n_calls = "", "", 0.0, "compute", n_issued
    if isinstance(operation, Collective):
        kind, axis, nbytes = operation.kind, operation.axis, _number(operation.nbytes)
        n_calls = int(n_issued * _number(operation.n_calls))
        of_kind = links[axis].kinds[kind]
        level = int(of_kind.bounding_level[0])
        bound_by = machine.links[level].name if level >= 0 else ""
        rate = float(of_kind.bandwidth_bytes_per_s[0])
        if of_kind.curve[0] >= 0:
            rate = float(moved_fraction(kind, table.size(axis)[0])) * nbytes / per_issue
    elif isinstance(operation, MemoryBound):
        kind, bound_by, nbytes = "memory-bound", "memory", _number(operation.nbytes)
        rate = nbytes / per_issue
    else:
        kind, shape = _kind_and_shape(operation)
        rate = _number(operation.flops) / per_issue
    return OperationCost(
        name=operation.name,
        kind=kind,
        shape=shape,
        nbytes=nbytes,
        n_calls=n_calls,
        seconds_per_call=per_issue * n_issued / n_calls,
        total_seconds=total,
        exposed_seconds=exposed,
        rate_per_s=rate,
        bound_by=bound_by,
        axis=axis,
    )


def _kind_and_shape(operation: Gemm | Attention) -> tuple[str, str]:
    if isinstance(operation, Gemm):
        sizes = (operation.m, operation.n, operation.k)
        return f"GEMM {operation.mode}", " x ".join(f"{_number(size):.0f}" for size in sizes)
    sequences, heads = _number(operation.n_sequences), _number(operation.n_heads)
    each = f"{operation.seq_len} x {operation.head_dim}"
    return "attention", f"{sequences:.0f} x {heads:.0f} heads x {each}"


def _sensitivities(search: Search, prediction: Prediction) -> tuple[Sensitivity, ...]:
    """Seconds saved by 10 % more of each resource (10 % less of a nuisance), largest first."""
    table = _single(search, prediction)

    def step_seconds(changed: Machine) -> float:
        evaluator = Evaluator(replace(search, machine=changed), prediction.variant, table)
        return float(evaluator.evaluate().step_seconds[0])

    base = step_seconds(search.machine)
    savings = [
        Sensitivity(resource.name, base - step_seconds(resource.improved(IMPROVEMENT)))
        for resource in resources(search.machine)
    ]
    return tuple(sorted(savings, key=lambda s: -s.saved_seconds))
