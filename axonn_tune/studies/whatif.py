"""How the best configuration changes with the machine."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.search.rank import Each, best_of, rank_candidates
from axonn_tune.search.search import Search
from axonn_tune.spec.machine import Machine
from axonn_tune.step.predict import predict
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.parameters import Parameter, parameters


@dataclass(frozen=True)
class WhatIf:
    """What a changed machine does.

    before
        The best configuration on the machine as it is.
    after
        The best configuration on the changed machine.
    kept
        The configuration of `before` on the changed machine.
    """

    before: Prediction
    after: Prediction
    kept: Prediction


@dataclass(frozen=True)
class Influence:
    """The best step with less and with more of one number; None where nothing fits."""

    parameter: Parameter
    less: Prediction | None
    more: Prediction | None

    def moves(self, base: Prediction) -> float:
        """Return the larger of both relative changes of the step; infinite where nothing fits."""
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
    changed = search.on(machine)
    kept = predict(changed.scenario, before.configuration, with_interval=True)
    return WhatIf(before, best(changed), kept)


def influences(search: Search, factor: float, each: Each = iter) -> list[Influence]:
    """Search again with each number of the machine divided and multiplied by `factor`.

    The number that moves the best step most comes first; numbers that are zero are left out.
    """
    base = best(search)
    scenario = search.scenario
    known = [p for p in parameters(scenario.machine, scenario.job.dtype) if p.value]

    def best_with(parameter: Parameter, value: float) -> Prediction | None:
        return best_of(search.on(parameter.changed(value)), with_interval=False).prediction

    found = [
        Influence(
            parameter,
            less=best_with(parameter, parameter.value / factor),
            more=best_with(parameter, parameter.value * factor),
        )
        for parameter in each(known)
    ]
    return sorted(found, key=lambda influence: -influence.moves(base))


def best(search: Search) -> Prediction:
    """Return the fastest configuration that fits.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits.
    """
    return rank_candidates(search).top(1)[0]
