"""A step plan in which each operation is replaced by what a function makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from axonn_tune.spec.plan import Operation, Part, Pipeline, Stage, StepPlan


def rewritten(plan: StepPlan, change: Callable[[Operation], Operation]) -> StepPlan:
    """Return the plan with what `change` makes of each operation.

    The transfer between the stages of a pipeline stays as it is.
    """

    def of_part(part: Part) -> Part:
        phases = (
            replace(phase, operations=tuple(map(change, phase.operations))) for phase in part.phases
        )
        return replace(part, phases=tuple(phases))

    def of_stage(stage: Stage) -> Stage:
        return Stage(of_part(stage.forward), of_part(stage.backward))

    def of_pipeline(pipeline: Pipeline) -> Pipeline:
        return replace(
            pipeline,
            first=of_stage(pipeline.first),
            middle=of_stage(pipeline.middle),
            last=of_stage(pipeline.last),
            sync=of_stage(pipeline.sync),
            beside=pipeline.beside and of_stage(pipeline.beside),
            others=tuple(map(of_stage, pipeline.others)),
            alone=tuple(map(of_stage, pipeline.alone)),
        )

    return replace(
        plan,
        whole_microstep=plan.whole_microstep and of_part(plan.whole_microstep),
        step_end=of_part(plan.step_end),
        sync_microstep=plan.sync_microstep and of_part(plan.sync_microstep),
        pipeline=plan.pipeline and of_pipeline(plan.pipeline),
    )
