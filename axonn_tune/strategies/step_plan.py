"""The plan of a step: the phases of each of its passes, for candidates that one plan describes.

These may differ in the number of layers of a stage, and in how many of them are recomputed, and so
in how often a phase is repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from axonn_tune.spec.candidates import Ints, distinct
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.plan import (
    Collective,
    Operation,
    Part,
    Phase,
    Pipeline,
    Stage,
    StepPlan,
)
from axonn_tune.spec.recomputation import recompute_text
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.strategies.pipeline import stages_of
from axonn_tune.strategies.shapes import Shapes
from axonn_tune.strategies.transformer import Transformer

# The identity of a phase's operations, and how many earlier phases have the same ones.
_PhaseKey: TypeAlias = tuple[int, int]


def plan_key(
    shapes: Shapes, joins_stages: bool = False, joins_recomputations: bool = False
) -> Hashable:
    """Return a key that is equal for tables whose candidates one plan can describe.

    Such candidates recompute the same modules. See `Strategy.plan_key`.

    Parameters
    ----------
    joins_stages : bool
        Whether one end of the step is valid for several numbers of stages and virtual stages.
    joins_recomputations : bool
        Whether candidates that recompute every layer, those that recompute selectively and all
        others have one plan. If not, candidates of one of these kinds have a plan of their own.
    """
    table = shapes.table
    recompute = "" if joins_recomputations else shapes.recompute
    lengths = () if joins_stages else (table.n_stages, table.common_n_virtual)
    return recompute, shapes.recomputed_modules, table.is_pipelined, lengths


def step_plan(
    transformer: Transformer,
    synchronising: Transformer | None = None,
    schedule: str = ONE_F_ONE_B,
    aligns_gathers: bool = True,
    sends_beside: np.ndarray | bool = False,
    syncs_at_end: np.ndarray | bool = False,
    at_end: Transformer | None = None,
    beside: Transformer | None = None,
    alone: Transformer | None = None,
) -> StepPlan:
    """Return the plan of a step, through a pipeline if there are stages.

    `synchronising` emits the micro-step that differs from all others, if there is one.
    `aligns_gathers`, `sends_beside` and `syncs_at_end` are those of `Pipeline`; `at_end` emits the
    end of the step of candidates with `syncs_at_end`. `beside` emits a micro-step beside which a
    part of another virtual stage's collectives runs, as many parts as a rank of such a candidate
    runs micro-batches of one stage before it turns to the next. `alone` emits passes beside which
    no other micro-batch runs, where the usual ones run beside one, and so does `synchronising`:
    the first forward and the last backward pass are among them.
    """
    table = transformer.shapes.table
    n_microsteps = table.n_microsteps(transformer.shapes.job.global_batch)
    step_end = _step_end(transformer)
    if not table.is_pipelined:
        lone = synchronising or alone
        sync_microstep = _microstep("sync_microstep", lone) if lone else None
        microstep = _microstep("microstep", transformer)
        return StepPlan(table, step_end, n_microsteps, microstep, sync_microstep)
    if at_end is not None:
        step_end = _chosen(np.asarray(syncs_at_end), _step_end(at_end), step_end)
    pipeline = replace(
        _pipeline(transformer, synchronising or alone or transformer, beside, alone),
        schedule=schedule,
        aligns_gathers=aligns_gathers,
        sends_beside=sends_beside,
        syncs_at_end=syncs_at_end,
        n_beside=np.where(syncs_at_end, (table.n_virtual - 1.0) * table.stages, 0.0),
    )
    return StepPlan(table, step_end, n_microsteps, pipeline=pipeline)


def _microstep(name: str, transformer: Transformer) -> Part:
    """Return what a rank that has all layers does for one micro-batch."""
    table = transformer.shapes.table
    first, kinds = distinct(table.recompute)
    recomputes = [recompute_text(code) for code in table.recompute[first].tolist()]
    return Part(name, _merged([transformer.microstep(each) for each in recomputes], kinds))


def _step_end(transformer: Transformer) -> Part:
    """Return the part that follows all micro-steps."""
    return Part("step_end", transformer.step_end())


def _chosen(is_longer: np.ndarray, longer: Part, shorter: Part) -> Part:
    """Return the longer or the shorter of two ends of a step for each candidate.

    Both have one phase, and the longer one has all operations of the shorter one. Operations that
    only the longer one has get no bytes where the shorter one is chosen, and other names than
    operations of the micro-steps, since operations of one name have one price.
    """
    (phase,), (other,) = longer.phases, shorter.phases
    known = {operation.name: operation for operation in other.operations}
    names = {
        op.name: op.name if op.name in known else f"{op.name}_at_end" for op in phase.operations
    }

    def chosen(operation: Operation) -> Operation:
        other = known.get(operation.name)
        sizes: dict[str, Any] = {}
        for name, size in vars(operation).items():
            if isinstance(size, np.ndarray | float):
                nothing = 0.0 if name in ("nbytes", "n_calls") else size
                of_shorter = nothing if other is None else getattr(other, name)
                sizes[name] = np.where(is_longer, size, of_shorter)
        waits_for = tuple(names.get(name, name) for name in operation.waits_for)
        return replace(operation, name=names[operation.name], waits_for=waits_for, **sizes)

    return Part(longer.name, (replace(phase, operations=tuple(map(chosen, phase.operations))),))


def _pipeline(
    transformer: Transformer,
    synchronising: Transformer,
    beside: Transformer | None,
    alone: Transformer | None,
) -> Pipeline:
    """Return the stages into which layers are cut, and the transfer between them.

    The candidates may differ in how many layers a stage has, and recomputes.
    """
    shapes = transformer.shapes
    table = shapes.table
    first_rows, kinds = distinct(table.stages * table.n_virtual, table.recompute)
    cuts = [table.take(first_rows[number : number + 1]) for number in range(first_rows.size)]
    layers_of_cuts, (places, *_) = zip(*(stages_of(shapes, cut) for cut in cuts), strict=True)

    def stage(name: str, emitter: Transformer, place: int) -> Stage:
        forward, backward = [], []
        for cut, layers in zip(cuts, layers_of_cuts, strict=True):
            of_stage = layers[place], place == 0, place == 2, cut.common_recompute
            forward.append(emitter.forward_pass(*of_stage))
            backward.append(emitter.backward_pass(*of_stage))
        return Stage(
            Part(f"{name}.forward", _merged(forward, kinds), place == 2),
            Part(f"{name}.backward", _merged(backward, kinds), place == 2),
        )

    stage_names = ["first", "middle", "last"]
    stage_names += [f"middle{place - 1}" for place in range(3, len(layers_of_cuts[0]))]

    def stages(emitter: Transformer, suffix: str = "") -> list[Stage]:
        return [stage(f"{each}{suffix}", emitter, n) for n, each in enumerate(stage_names)]

    first, middle, last, *others = stages(transformer)
    transfer_bytes = transformer.communication.transfer_bytes
    return Pipeline(
        first=first,
        middle=middle,
        last=last,
        sync=stage("sync", synchronising, 0),
        beside=None if beside is None else stage("beside", beside, 0),
        transfer=Collective("pipeline.send_recv", "send_recv", transfer_bytes, PIPELINE),
        handover_seconds=transformer.communication.handover_seconds,
        others=tuple(others),
        places=places,
        alone=() if alone is None else tuple(stages(alone, ".alone")),
    )


def _merged(alternatives: Sequence[tuple[Phase, ...]], kinds: Ints) -> tuple[Phase, ...]:
    """Return the phases of all candidates, each with its number of repeats for each of them.

    Their order agrees with that of the phases of each kind of candidate.

    Parameters
    ----------
    alternatives
        The phases of each of several kinds of candidates. Phases with the same operations share
        them, whatever their names, and become one phase.
    kinds : array of int, shape (C,)
        The kind of each candidate.
    """
    known: dict[_PhaseKey, Phase] = {}
    followers: TopologicalSorter[_PhaseKey] = TopologicalSorter()
    repeats = []
    for phases in alternatives:
        seen: Counter[int] = Counter()
        keys = []
        for phase in phases:
            keys.append((id(phase.operations), seen[id(phase.operations)]))
            seen[id(phase.operations)] += 1
        known |= zip(keys, phases, strict=True)
        for key in keys:
            followers.add(key)
        for earlier, later in pairwise(keys):
            followers.add(later, earlier)
        repeats.append({key: phase.common_repeats for key, phase in zip(keys, phases, strict=True)})
    merged = []
    for key in followers.static_order():
        of_kinds = np.array([counts.get(key, 0) for counts in repeats])
        is_common = (of_kinds == of_kinds[0]).all()
        merged.append(known[key] if is_common else replace(known[key], repeats=of_kinds[kinds]))
    return tuple(merged)
