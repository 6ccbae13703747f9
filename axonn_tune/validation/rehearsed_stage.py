"""What a rank of one stage of a pipeline does and holds by the plan; without one, what all do."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from axonn_tune.errors import InputError
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.groups import AxisGroups, axes_by_ranks
from axonn_tune.spec.layout import PIPELINE, Layout
from axonn_tune.spec.plan import Operation, Part, StepPlan
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.megatron.megatron3d import Megatron3D


def first_rank(layout: Layout, stage: int) -> int:
    """Return the first rank of a stage; the pipeline is the slowest axis of the rank number.

    Raises
    ------
    InputError
        The layout has no such stage.
    """
    if not 0 <= stage < layout.n_stages:
        last = layout.n_stages - 1
        allowed = f"0 to {last}" if last else "0, since it has no pipeline"
        raise InputError(f"stage {stage} is not one of layout {layout}; allowed: {allowed}")
    return stage * (layout.n_ranks // layout.n_stages)


def issued_by_stage(plan: StepPlan, layout: Layout, stage: int) -> Iterator[tuple[Operation, int]]:
    """Yield the operations of a rank in a step, and how often it issues each of them."""
    for part, repeats in _parts(plan, layout, stage):
        for phase in part.phases:
            for operation in phase.operations:
                yield operation, repeats * phase.common_repeats
    if plan.pipeline is not None:
        n_neighbours = (stage > 0) + (stage < layout.n_stages - 1)
        yield plan.pipeline.transfer, n_neighbours * int(plan.n_microsteps[0])


def _parts(plan: StepPlan, layout: Layout, stage: int) -> list[tuple[Part, int]]:
    """Return the parts of a step, and how often each is repeated."""
    n_microsteps = int(plan.n_microsteps[0])
    pipeline = plan.pipeline
    if pipeline is not None:
        if pipeline.places:
            here = pipeline.stages[pipeline.places[stage]]
        else:
            ends = {layout.n_stages - 1: pipeline.last, 0: pipeline.first}
            here = ends.get(stage, pipeline.middle)
        return [(plan.step_end, 1), *((part, n_microsteps) for part in here.passes)]
    if plan.sync_microstep is None:
        return [(plan.step_end, 1), (plan.microstep, n_microsteps)]
    return [(plan.step_end, 1), (plan.microstep, n_microsteps - 1), (plan.sync_microstep, 1)]


def axes_of_rank(placements: Placements, rank: int) -> dict[tuple[int, ...], str]:
    """Return the axis by the ranks of its group that a rank is in, and of neighbouring stages."""
    axes = axes_by_ranks(placements, rank)
    if PIPELINE in placements.axes.names:
        groups = AxisGroups.of(placements, PIPELINE)
        for neighbours in pairwise(groups.ranks(groups.group_of(rank))):
            axes.setdefault(neighbours, PIPELINE)
    return axes


def stage_terms_bytes(
    prediction: Prediction, table: CandidateTable, stage: int
) -> dict[str, float]:
    """Return the terms of the memory of a rank in a stage, in bytes.

    A prediction has those of the stage that needs most.
    """
    scenario = prediction.scenario
    terms = dict(prediction.memory_terms_bytes)
    if prediction.layout.n_stages > 1:
        assert isinstance(scenario.strategy, Megatron3D), "no other pipeline is rehearsed"
        here = scenario.strategy.stage_memory(scenario.model, scenario.job_here, table, stage)
        terms |= {term: float(nbytes[0]) for term, nbytes in here.items() if term in terms}
    return terms
