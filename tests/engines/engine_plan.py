"""What a plan lets a rank do within the linear layers, and what an engine makes of it."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from engines.events import Event

from axonn_tune.spec import names
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.plan import Collective, Gemm
from axonn_tune.strategies.axonn.axonn4d import AXONN
from axonn_tune.strategies.axonn.memory import GRADIENT_BYTES


@dataclass(frozen=True)
class EngineFacts:
    """How an engine carries out the plan of its strategy.

    late_gathers
        Beginnings of the names of weights that are gathered when they are used, and not ahead.
    overlaps_backward
        Whether anything that the plan starts early is started early in the backward pass, too.
    scatters_awaited_at_end
        Whether nothing waits for a scatter that is under way before the end of the backward pass.
    weight_gradient_first
        Whether a layer forms dW before dI where the scatter of dW is under way next to
        computation and dI need not be summed.
    gathered_bytes, gradient_bytes
        Bytes of each element of a weight that is gathered, and of a gradient that is summed over
        data.
    biases_summed_over_z
        Whether the gradients of biases are summed over Z, as those of norms are.
    """

    late_gathers: tuple[str, ...]
    overlaps_backward: bool
    scatters_awaited_at_end: bool
    weight_gradient_first: bool
    gathered_bytes: float
    gradient_bytes: float
    biases_summed_over_z: bool


class Planned(NamedTuple):
    """An event with the layer to which it belongs, such as ``backward.up``, and its operation."""

    layer: str
    operation: str
    event: Event


def planned_events(spec, job, configuration):
    """The events of one micro-step within the linear layers of all blocks, by the plan."""
    plan = AXONN.plan(spec, job, CandidateTable.single(configuration))
    layers = {linear.name for linear in spec.block_linears}
    events, under_way = [], {}
    for operation in operations_of(plan.microstep):
        if not isinstance(operation, Collective):
            for name in operation.waits_for:
                if name in under_way:
                    events.append(under_way.pop(name))
        layer = operation.name.rpartition(".")[0]
        if layer.rpartition(".")[2] not in layers:
            continue
        if isinstance(operation, Gemm):
            event = Event("multiply", "gemm", "compute", number(operation.flops))
            events.append(Planned(layer, operation.name, event))
        elif isinstance(operation, Collective) and configuration.layout.size(operation.axis) > 1:
            about = (operation.kind, operation.axis, number(operation.nbytes))
            events.append(Planned(layer, operation.name, Event("start", *about)))
            under_way[operation.name] = Planned(layer, operation.name, Event("await", *about))
    return events + list(under_way.values())


def operations_of(part):
    for phase in part.phases:
        for _ in range(phase.repeats):
            yield from phase.operations


def number(size):
    return float(np.ravel(size)[0])


def engine_events(spec, job, configuration, facts):
    """The events that an engine makes of a plan's, in order."""
    events = planned_events(spec, job, configuration)
    if not facts.overlaps_backward:
        in_turn = replace(job, overlap=Overlap(False, False, False))
        events = [e for e in events if is_forward(e)]
        events += [e for e in planned_events(spec, in_turn, configuration) if not is_forward(e)]
    events = gathered_late(events, facts.late_gathers)
    if facts.scatters_awaited_at_end:
        events = with_scatters_awaited_at_end(events)
    if facts.weight_gradient_first:
        events = with_weight_gradient_first(events)
    scale = facts.gathered_bytes / job.element_bytes
    return [
        e.event._replace(amount=scale * e.event.amount) if is_gather(e) else e.event for e in events
    ]


def is_forward(planned):
    return planned.layer.startswith(names.FORWARD)


def is_gather(planned):
    return planned.event.kind == "all_gather"


def starts_gather(planned):
    return is_gather(planned) and planned.event.action == "start"


def gathered_late(events, late_gathers):
    """Move the start of each late gather to where the plan takes the weight.

    There the plan starts the gather of the weight that follows, before it waits for this one.
    """
    result, held = [], {}
    for event in events:
        if is_gather(event) and event.layer.startswith(late_gathers):
            if starts_gather(event):
                held[event.layer] = event
                continue
            place = len(result)
            while place and starts_gather(result[place - 1]):
                place -= 1
            result.insert(place, held.pop(event.layer))
        result.append(event)
    return result


def with_scatters_awaited_at_end(events):
    """Move every wait for a scatter behind the last event of the backward pass."""
    waits = [e for e in events if e.event.kind == "reduce_scatter" and e.event.action == "await"]
    return [e for e in events if e not in waits] + waits


def with_weight_gradient_first(events):
    """Let dW and the start of its scatter precede dI where no sum of dI stands between them."""
    result = list(events)
    for place, event in enumerate(events):
        if event.operation.endswith(".gemm_input"):
            following = place + 1
            while following < len(result) and is_weight_gradient(result[following], event.layer):
                result[following - 1], result[following] = result[following], event
                following += 1
    return result


def is_weight_gradient(planned, layer):
    is_product = planned.operation == f"{layer}.gemm_weight"
    return is_product or (planned.layer == layer and planned.event.kind == "reduce_scatter")


def engine_reductions(spec, job, configuration, facts):
    """Calls and bytes by axis, where an engine sums each parameter's gradient on its own."""
    summed_over_z = spec
    if not facts.biases_summed_over_z:
        summed_over_z = replace(spec, bias=False, qkv_bias=False, proj_bias=False)
    n_vectors = 2 + sum(linear.bias for linear in summed_over_z.block_linears)
    n_parameters = 2 + sum(1 + linear.bias for linear in spec.block_linears)
    scale = facts.gradient_bytes / GRADIENT_BYTES
    over_z = planned_reduction(names.GRADIENT_VECTORS, summed_over_z, job, configuration)
    over_data = planned_reduction(names.GRADIENT_ALL_REDUCE, spec, job, configuration)
    return {
        "z": (spec.n_layers * n_vectors, scale * over_z),
        "data": (spec.n_layers * n_parameters, scale * over_data),
    }


def planned_reduction(name, spec, job, configuration):
    """Bytes of one reduction that are due to blocks: what as many blocks again would add to it."""

    def nbytes(n_layers):
        model = replace(spec, n_layers=n_layers)
        plan = AXONN.plan(model, job, CandidateTable.single(configuration))
        (reduction,) = (o for o in operations_of(plan.step_end) if o.name == name)
        return number(reduction.nbytes)

    return nbytes(2 * spec.n_layers) - nbytes(spec.n_layers)
