"""The effect of a changed machine on the best configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.errors import InputError
from axonn_tune.search.rank import Detail, Each, Ranking, best_of, rank_candidates
from axonn_tune.search.search import Search
from axonn_tune.spec.machine import Machine, MemoryReserve
from axonn_tune.spec.quantity import Quantity
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.predict import predict, predict_on
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
    base
        The best prediction on the machine as it is.
    less, more
        The best prediction with less and with more of it; None where nothing fits.
    """

    parameter: Parameter
    base: Prediction
    less: Prediction | None
    more: Prediction | None

    @property
    def moves(self) -> float:
        """The larger of both relative changes of the step; infinite where nothing fits."""
        changes = [
            float("inf")
            if prediction is None
            else abs(prediction.step_seconds / self.base.step_seconds - 1.0)
            for prediction in (self.less, self.more)
        ]
        return max(changes)


def what_if(search: Search, machine: Machine, detail: Detail = "chance") -> WhatIf:
    """Search on the machine of the search and on the changed machine, in as much detail as wanted.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits, on one of the machines.
    """
    before = best(search, detail)
    changed = search.on(machine)
    kept = predict(changed.scenario, before.configuration, with_interval=True)
    return WhatIf(before, best(changed, detail), kept)


def influences(search: Search, factor: float, each: Each = iter) -> list[Influence]:
    """Return the best with each number of the machine divided and multiplied by `factor`.

    The number that moves the best step most comes first; numbers that are zero are left out.

    Raises
    ------
    InputError
        The factor is not above 1.
    NoCandidateError
        Nothing is legal, or fits, on the machine as it is.
    """
    if not 1.0 < factor < math.inf:
        raise InputError(f"whatif: by is {factor}; allowed: above 1")
    ranking = rank_candidates(replace(search, every_configuration=True))
    base = ranking.prediction(0)
    scenario = base.scenario
    numbers = [
        parameter
        for parameter in parameters(scenario.machine, scenario.job.dtype)
        if parameter.value
    ]
    less = [parameter.changed(parameter.value / factor) for parameter in numbers]
    more = [parameter.changed(parameter.value * factor) for parameter in numbers]
    found = _best_on_each(ranking, [*less, *more], factor, each)
    results = [
        Influence(parameter, base, *best_with)
        for parameter, *best_with in zip(
            numbers, found[: len(less)], found[len(less) :], strict=True
        )
    ]
    return sorted(results, key=lambda influence: -influence.moves)


def _best_on_each(
    ranking: Ranking, machines: Sequence[Machine], factor: float, each: Each
) -> list[Prediction | None]:
    """Return the best configuration on each of several machines, or None where nothing fits.

    On machines with as much memory the same candidates fit, and only contenders are played.

    Parameters
    ----------
    ranking : Ranking
        Every configuration that fits on the machine of the search.
    factor : float
        Largest factor by which a number of a machine differs.
    """
    search = ranking.search
    memory = _memory_of(search.scenario.machine)
    alike = [i for i, machine in enumerate(machines) if _memory_of(machine) == memory]
    fastest = _fastest_on_each(ranking, [machines[i] for i in alike], factor)
    found: dict[int, Prediction | None] = dict(zip(alike, fastest, strict=True))
    for i in each([i for i in range(len(machines)) if i not in found]):
        found[i] = best_of(search.on(machines[i]), detail="time").prediction
    return [found[i] for i in range(len(machines))]


def _memory_of(machine: Machine) -> tuple[Quantity, MemoryReserve]:
    """Return the numbers of a machine that say what fits."""
    return machine.gpu.memory_bytes, machine.memory_reserve


def _fastest_on_each(
    ranking: Ranking, machines: Sequence[Machine], factor: float
) -> list[Prediction]:
    """Return the fastest candidate of a ranking on each of several machines.

    Where a number changes by a factor, no time changes by more. A candidate that takes more than
    `factor` times the best time can therefore not become the best; the square leaves room for
    prices between measured points, which may change a little more than the points.
    """
    contenders = ranking.step_seconds <= ranking.step_seconds[0] * factor**2
    table = ranking.table.take(contenders)
    scenario = ranking.search.scenario
    seconds = np.zeros((len(machines), len(table)))
    for rows in scenario.planned_rows(table):
        evaluator = Evaluator.of(scenario, table.take(rows).compact())
        seconds[:, rows] = evaluator.seconds_on(machines)
    fastest = seconds.argmin(axis=1)
    found: dict[int, Prediction] = {}
    for row in set(fastest.tolist()):
        won = np.flatnonzero(fastest == row).tolist()
        on_each = predict_on(scenario, table.configuration(row), [machines[i] for i in won])
        found |= zip(won, on_each, strict=True)
    return [found[i] for i in range(len(machines))]


def best(search: Search, detail: Detail = "chance") -> Prediction:
    """Return the fastest configuration that fits.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits.
    """
    return best_of(search, detail).known()
