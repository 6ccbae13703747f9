"""The effect of a changed machine on the best configuration."""

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
    """The best configurations before and after a change of the machine.

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
    """The effect of one number of the machine on the best step.

    parameter
        The number.
    less, more
        The best prediction with less and with more of it; None where nothing fits.
    """

    parameter: Parameter
    less: Prediction | None
    more: Prediction | None

    def moves(self, base: Prediction) -> float:
        """Return the larger of both relative changes of the step; infinite where nothing fits."""
        changes = [
            float("inf")
            if prediction is None
            else abs(prediction.step_seconds / base.step_seconds - 1.0)
            for prediction in (self.less, self.more)
        ]
        return max(changes)


def what_if(search: Search, machine: Machine) -> WhatIf:
    """Search on the machine of the search and on the changed machine.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits, on one of the machines.
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
    candidates = [
        parameter
        for parameter in parameters(scenario.machine, scenario.job.dtype)
        if parameter.value
    ]

    def best_with(parameter: Parameter, value: float) -> Prediction | None:
        return best_of(search.on(parameter.changed(value)), with_interval=False).prediction

    results = [
        Influence(
            parameter,
            less=best_with(parameter, parameter.value / factor),
            more=best_with(parameter, parameter.value * factor),
        )
        for parameter in each(candidates)
    ]
    return sorted(results, key=lambda influence: -influence.moves(base))


def best(search: Search) -> Prediction:
    """Return the fastest configuration that fits.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits.
    """
    return rank_candidates(search).top(1)[0]
