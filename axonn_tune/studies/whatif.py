"""How the best configuration changes with the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from axonn_tune.search.best import best_of
from axonn_tune.search.each import Each
from axonn_tune.search.rank import run
from axonn_tune.search.search import Search
from axonn_tune.spec.machine import Machine
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.parameters import Parameter, parameters


@dataclass(frozen=True)
class WhatIf:
    """The best on the machine as it is, on the changed one, and the former there.

    kept : the configuration that was the best, on the changed machine
    """

    before: Prediction
    after: Prediction
    kept: Prediction


@dataclass(frozen=True)
class Influence:
    """What less and more of one number does to the best step; None where nothing fits."""

    parameter: Parameter
    less: Prediction | None
    more: Prediction | None

    def moves(self, base: Prediction) -> float:
        """The larger of both changes of the step, relative; infinite where nothing fits."""
        changes = [
            float("inf") if p is None else abs(p.step_seconds / base.step_seconds - 1.0)
            for p in (self.less, self.more)
        ]
        return max(changes)


def what_if(search: Search, machine: Machine) -> WhatIf:
    """Search on both machines.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits, on one of them.
    """
    before = best(search)
    changed = replace(search, machine=machine)
    return WhatIf(before, best(changed), same_configuration(changed, before))


def influences(search: Search, factor: float, each: Each = iter) -> list[Influence]:
    """Search again with each number of the machine divided and multiplied by `factor`.

    The one that moves the best step most comes first; numbers that are zero are left out.
    """
    base = best(search)
    known = [p for p in parameters(search.machine, search.job.dtype) if p.value]
    found = [
        Influence(
            parameter,
            *(
                best_of(replace(search, machine=parameter.changed(value)), False).best
                for value in (parameter.value / factor, parameter.value * factor)
            ),
        )
        for parameter in each(known)
    ]
    return sorted(found, key=lambda influence: -influence.moves(base))


def best(search: Search) -> Prediction:
    """The fastest configuration that fits."""
    return run(search).top(1)[0]


def same_configuration(search: Search, wanted: Prediction) -> Prediction:
    """That configuration alone, whether it fits or not."""
    layout = search.of_layout(wanted.grid)
    constraints = replace(
        layout.constraints, orders=(wanted.order,), micro_batch=wanted.micro_batch
    )
    ranking = run(
        replace(
            layout,
            constraints=constraints,
            recomputes=(wanted.recompute,),
            every_configuration=True,
        )
    )
    return next(row for row in ranking.top() if row.variant == wanted.variant)
