"""Where the time of one configuration goes, operation by operation, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.links import AxisLinks
from axonn_tune.simulate.timeline import Event
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Attention, Collective, Gemm, MemoryBound, Operation
from axonn_tune.spec.resources import resources
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.predict import table_of
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import is_launched, number, play_step

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


def explain(prediction: Prediction, with_sensitivities: bool = True) -> Explanation:
    """Play the configuration operation by operation and try each resource 10 % better."""
    scenario, machine = prediction.scenario, prediction.scenario.machine
    played = play_step(prediction)
    gap = machine.kernels.gap_seconds.value
    operations = _merged(
        _operation_cost(*cost, played.links, machine, played.table)
        for part in [*played.parts, *played.transfers]
        for cost in _sum_by_name(part.events, part.repeats, gap)
    )
    host = sum(part.repeats * part.host_seconds for part in played.parts)
    n_kernels = sum(op.n_calls for op in operations if not op.axis)
    sensitivities = _sensitivities(prediction) if with_sensitivities else ()
    groups = scenario.strategy.axes.groups
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


def _sum_by_name(
    events: list[Event], repeats: int, gap: float
) -> Iterator[tuple[Operation, int, float, float, float]]:
    """Operation, calls, seconds of one call, seconds and exposed seconds of a step, by name.

    `gap`: seconds of the host that the events of kernels include, and their sums do not.
    """
    groups: dict[str, list[Event]] = {}
    for event in events:
        if is_launched(event.operation):
            groups.setdefault(event.operation.name, []).append(event)
    for group in groups.values():
        is_kernel = not isinstance(group[0].operation, Collective)
        total = sum(event.seconds for event in group) - is_kernel * len(group) * gap
        exposed = sum(event.exposed_seconds for event in group)
        n_calls = len(group) * repeats
        yield group[0].operation, n_calls, total / len(group), total * repeats, exposed * repeats


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
        kind, axis, nbytes = operation.kind, operation.axis, number(operation.nbytes)
        n_calls = int(n_issued * number(operation.n_calls))
        of_kind = links[axis].kinds[kind]
        level = int(of_kind.bounding_level[0])
        bound_by = machine.links[level].name if level >= 0 else ""
        rate = float(of_kind.bandwidth_bytes_per_s[0])
        if of_kind.curve[0] >= 0:
            rate = float(moved_fraction(kind, table.size(axis)[0])) * nbytes / per_issue
    elif isinstance(operation, MemoryBound):
        kind, bound_by, nbytes = "memory-bound", "memory", number(operation.nbytes)
        rate = nbytes / per_issue
    else:
        kind, shape = _kind_and_shape(operation)
        rate = number(operation.flops) / per_issue
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
        return f"GEMM {operation.mode}", " x ".join(f"{number(size):.0f}" for size in sizes)
    sequences, heads = number(operation.n_sequences), number(operation.n_heads)
    each = f"{operation.seq_len} x {operation.head_dim}"
    return "attention", f"{sequences:.0f} x {heads:.0f} heads x {each}"


def _sensitivities(prediction: Prediction) -> tuple[Sensitivity, ...]:
    """Return seconds saved by 10 % more of each resource (less of a nuisance), largest first."""
    scenario = prediction.scenario
    evaluator = Evaluator.of(scenario, table_of(scenario, prediction.configuration))

    def step_seconds(machine: Machine) -> float:
        return float(evaluator.on(machine).evaluate().step_seconds[0])

    base = step_seconds(scenario.machine)
    savings = [
        Sensitivity(resource.name, base - step_seconds(resource.improved(IMPROVEMENT)))
        for resource in resources(scenario.machine)
    ]
    return tuple(sorted(savings, key=lambda s: -s.saved_seconds))
