"""The explanation of a prediction: where the time goes, operation by operation, and what helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.simulate.timeline import Sum
from axonn_tune.spec.measurement import HOST
from axonn_tune.spec.plan import (
    HOST_DIRECTIONS,
    Attention,
    Collective,
    Gemm,
    GroupedGemm,
    HostCopy,
    HostKernel,
    HostWork,
    Operation,
    RepeatedGemm,
    Transfer,
    is_launched,
    number,
)
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.player import Player
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction

# Factor by which a sensitivity improves a resource: 10 % more of it.
IMPROVEMENT = 1.1


@dataclass(frozen=True)
class OperationCost:
    """One operation of the plan, summed over a training step.

    name
        Name of the operation.
    kind
        Kind of kernel or collective.
    shape
        Sizes of a product (m x n x k), of the products of several experts, or of attention; empty
        for other operations.
    nbytes
        Full buffer of one call of a collective, bytes of a copy, or traffic of a kernel that memory
        bounds; 0 for others.
    n_calls
        Number of calls in a step.
    seconds_per_call, total_seconds
        Time of a call, and of all calls.
    exposed_seconds
        Time for which the compute stream stands still for a collective. A gather for which a
        micro-batch waits in one stage of a pipeline after another may be exposed for longer than it
        takes.
    rate_per_s
        FLOP/s of a product, or bytes/s that a rank's ring or a kernel moves.
    bound_by
        Link level that bounds a collective, or resource that bounds a kernel; the host where it
        issues the products of experts more slowly than the GPU forms them.
    axis
        Axis of a collective, or direction of a copy between GPU and host; empty for kernels.
    """

    name: str
    kind: str
    shape: str
    nbytes: float
    n_calls: int
    seconds_per_call: float
    total_seconds: float
    exposed_seconds: float
    rate_per_s: float
    bound_by: str
    axis: str

    @property
    def hidden_seconds(self) -> float:
        """The time of a collective during which the rank computes."""
        return max(self.total_seconds - self.exposed_seconds, 0.0) if self.axis else 0.0


@dataclass(frozen=True)
class Sensitivity:
    """The time that 10 % more of one resource saves."""

    resource: str
    saved_seconds: float


@dataclass(frozen=True)
class Explanation:
    """A prediction taken apart; in a pipeline, the work of a rank of the last stage.

    prediction
        The prediction.
    operations
        Operations of the step.
    sensitivities
        Time that more of each resource saves, the largest first.
    host_seconds
        Time that the host takes between kernels, which is in no operation.
    stage_seconds, busiest_stage_seconds
        Time of all passes of a micro-batch on this rank, and on a rank of the stage that takes
        longest; both are 0 without a pipeline.
    groups
        Groups over which collectives run, and directions of copies between GPU and host.
    """

    prediction: Prediction
    operations: tuple[OperationCost, ...]
    sensitivities: tuple[Sensitivity, ...]
    host_seconds: float
    groups: tuple[str, ...]
    stage_seconds: float = 0.0
    busiest_stage_seconds: float = 0.0

    @property
    def exposed_seconds_by_axis(self) -> dict[str, float]:
        """The exposed communication of each axis, or product of axes, in a step."""
        return {
            axis: sum(op.exposed_seconds for op in self.operations if op.axis == axis)
            for axis in self.groups
        }


def explain(prediction: Prediction, with_sensitivities: bool = True) -> Explanation:
    """Play the configuration operation by operation and try each resource 10 % better."""
    player = Player(prediction)
    of_stages = player.stage_seconds()
    return replace(
        explain_played(player),
        sensitivities=_sensitivities(prediction) if with_sensitivities else (),
        stage_seconds=of_stages[-1],
        busiest_stage_seconds=max(of_stages),
    )


def explain_played(player: Player) -> Explanation:
    """Return where the time of a configuration goes, without sensitivities."""
    prediction = player.prediction
    scenario = prediction.scenario
    parts = player.summed_parts()
    gap = scenario.machine.kernels.gap_seconds.value
    operations = _merged(
        _operation_cost(of_operation, part.repeats, gap, player)
        for part in parts
        for of_operation in part.sums.values()
        if is_launched(of_operation.operation, player.row)
    )
    host = sum(part.repeats * part.host_seconds for part in parts)
    n_kernels = sum(op.n_calls for op in operations if not op.axis and op.kind != HOST)
    groups = scenario.strategy.axes.groups
    if scenario.job.uses_host:
        groups = (*groups, *HOST_DIRECTIONS)
    return Explanation(prediction, operations, (), n_kernels * gap + host, groups)


def _merged(costs: Iterable[OperationCost]) -> tuple[OperationCost, ...]:
    """Return one cost for each name, the sum of all costs of that name.

    A synchronising micro-step has the operations of the other micro-steps too.
    """
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


def _operation_cost(of_part: Sum, repeats: float, gap: float, player: Player) -> OperationCost:
    """Return the cost of an operation from its events in a part of the step.

    The events of kernels include the `gap` of the host, the cost does not.
    """
    operation = of_part.operation
    host_gap = 0.0 if isinstance(operation, Transfer | HostWork | HostKernel) else gap
    seconds = of_part.seconds - of_part.count * host_gap
    per_issue = seconds / of_part.count
    n_issued = of_part.count * repeats
    work = _work_of(operation, per_issue, player)
    n_calls = max(round(n_issued * work.calls_per_issue), 1)
    return OperationCost(
        name=operation.name,
        kind=work.kind,
        shape=work.shape,
        nbytes=work.nbytes,
        n_calls=n_calls,
        seconds_per_call=per_issue * n_issued / n_calls,
        total_seconds=seconds * repeats,
        exposed_seconds=of_part.exposed_seconds * repeats,
        rate_per_s=work.rate_per_s,
        bound_by=work.bound_by,
        axis=work.axis,
    )


class _Work(NamedTuple):
    """What an operation does each time that it is issued; fields are those of `OperationCost`.

    calls_per_issue
        Number of calls each time that it is issued.
    """

    kind: str
    bound_by: str
    rate_per_s: float
    shape: str = ""
    nbytes: float = 0.0
    axis: str = ""
    calls_per_issue: float = 1.0


def _work_of(operation: Operation, seconds: float, player: Player) -> _Work:
    """Return what an operation that takes `seconds` does."""
    row = player.row
    if isinstance(operation, Collective):
        return _work_of_collective(operation, seconds, player)
    if isinstance(operation, HostWork):
        return _Work(HOST, "host", 0.0)
    if isinstance(operation, Gemm | Attention):
        kind, shape = _kind_and_shape(operation, row)
        is_issued_late = isinstance(operation, Gemm) and player.waits_for_issues(operation)
        bound_by = "host" if is_issued_late else "compute"
        return _Work(kind, bound_by, number(operation.flops, row) / seconds, shape)
    nbytes = number(operation.nbytes, row)
    rate = _rate_per_s(nbytes, seconds)
    if isinstance(operation, HostCopy):
        return _Work("copy", "host link", rate, nbytes=nbytes, axis=operation.direction)
    if isinstance(operation, HostKernel):
        return _Work(HOST, "host memory", rate, nbytes=nbytes)
    return _Work("memory-bound", "memory", rate, nbytes=nbytes)


def _work_of_collective(operation: Collective, seconds: float, player: Player) -> _Work:
    """Return what a collective that takes `seconds` does.

    Its rate is that of its ring, or what it moves in its time where that was measured as a whole.
    """
    row = player.row
    kind, axis = operation.kind, operation.axis
    nbytes = number(operation.nbytes, row)
    links = player.links[axis].kinds[kind]
    level = int(links.bounding_level[row])
    bound_by = player.prediction.scenario.machine.links[level].name if level >= 0 else ""
    rate = float(links.bandwidth_bytes_per_s[row])
    if links.curve[row] >= 0 or links.ring.curve[row] >= 0:
        moved_bytes = float(moved_fraction(kind, player.table.size(axis)[row])) * nbytes
        rate = _rate_per_s(moved_bytes, seconds)
    n_calls = number(operation.n_calls, row)
    call_bytes = nbytes / max(n_calls, 1.0)
    return _Work(kind, bound_by, rate, nbytes=call_bytes, axis=axis, calls_per_issue=n_calls)


def _rate_per_s(nbytes: float, seconds: float) -> float:
    """Return bytes per second; 0 without time, for a fast host or a message without a call."""
    return nbytes / seconds if seconds else 0.0


def _kind_and_shape(operation: Gemm | Attention, row: int) -> tuple[str, str]:
    """Return the kind and the sizes of a product or of attention, as text."""
    if isinstance(operation, Gemm):
        sizes = (operation.m, operation.n, operation.k)
        shape = " x ".join(f"{number(size, row):.0f}" for size in sizes)
        if isinstance(operation, GroupedGemm):
            shape = f"{number(operation.n_groups, row):.0f} of {shape}"
        elif isinstance(operation, RepeatedGemm):
            shape = f"{number(operation.n_times, row):.0f} times {shape}"
        return f"GEMM {operation.mode}", shape
    n_sequences = number(operation.n_sequences, row)
    n_heads = number(operation.n_heads, row)
    head = f"{number(operation.seq_len, row):.0f} x {operation.head_dim}"
    n_launches = number(operation.n_launches, row)
    times = f"{n_launches:.0f} times " if n_launches != 1 else ""
    return "attention", f"{times}{n_sequences:g} x {n_heads:g} heads x {head}"


def _sensitivities(prediction: Prediction) -> tuple[Sensitivity, ...]:
    """Return the time that 10 % more of each resource (less of a nuisance) saves, largest first."""
    scenario = prediction.scenario
    evaluator = Evaluator.of(scenario, candidate_table(scenario, prediction.configuration))
    resources = scenario.resources
    improved = [resource.improved(IMPROVEMENT) for resource in resources]
    base, *seconds = evaluator.seconds_on([scenario.machine, *improved])[:, 0].tolist()
    savings = [
        Sensitivity(resource.name, base - better)
        for resource, better in zip(resources, seconds, strict=True)
    ]
    return tuple(sorted(savings, key=lambda s: -s.saved_seconds))
