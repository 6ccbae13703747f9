"""Learn from measured steps: a machine becomes one that predicts them, as far as they tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.errors import InputError
from axonn_tune.learning.fit import Fit, fitted
from axonn_tune.search.rank import Each
from axonn_tune.spec.learnable import improved, largest_log_factors, learnable
from axonn_tune.spec.learned import Learned, LearnedFactor, LearnedRun
from axonn_tune.spec.machine import Machine, Quantity
from axonn_tune.spec.plan import Array
from axonn_tune.spec.provenance import restated
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.spread import spread_of

# Least standard deviation of the logarithm of a factor of kernels and host, by convention: those of
# an engine differ from those of a benchmark, and one host from another.
LEAST_SPREAD = {"attention": 0.2, "memory_kernels": 0.2, "host": 0.15}
# A resource of which runs remove less of the stated spread than this is one that they do not tell.
LEAST_GAIN = 0.05
# Times that the step times are linearised, the last at the factors that were found before.
_N_LINEARISATIONS = 2
# Change of the logarithm of a factor with which slopes are found.
_LOG_STEP = 0.1


@dataclass(frozen=True)
class Trial:
    """A run with its measured step, and its prediction on the machine that shall learn."""

    name: str
    prediction: Prediction
    measured_seconds: float

    @cached_property
    def evaluator(self) -> Evaluator:
        """What predicts the run on other machines without planning it anew."""
        scenario = self.prediction.scenario
        return Evaluator.of(scenario, candidate_table(scenario, self.prediction.configuration))

    def seconds_on(self, machine: Machine) -> float:
        """Return the predicted step on another machine."""
        return float(self.evaluator.on(machine).evaluate().step_seconds[0])


def learn(machine: Machine, trials: Sequence[Trial], each: Each = iter) -> Machine:
    """Return the machine with what the trials tell of it, and the record of it in `learned`.

    Parameters
    ----------
    trials : sequence of Trial
        Runs of one engine on this machine.

    Raises
    ------
    InputError
        The machine has learned before, there are no trials, or they are of several engines.
    """
    engine = _engine_of(machine, trials)
    fit = _fit(machine, trials, each)
    resources = learnable(machine)
    stated = stated_spreads(machine)
    factors = tuple(
        LearnedFactor(resource.key, math.exp(log), float(before), math.sqrt(variance))
        for resource, log, before, variance in zip(
            resources, fit.log_factors, stated, np.diag(fit.covariance), strict=True
        )
    )
    learnt = _with_factors(machine, factors, f"{len(trials)} runs of {engine}")
    runs = tuple(
        LearnedRun(
            trial.name,
            trial.measured_seconds,
            trial.prediction.step_seconds,
            trial.seconds_on(learnt),
            bool(is_set_aside),
        )
        for trial, is_set_aside in zip(trials, fit.is_set_aside, strict=True)
    )
    covariance = tuple(tuple(map(float, row)) for row in fit.covariance)
    record = Learned(engine, machine.name, fit.scatter, factors, covariance, runs)
    return replace(learnt, learned=record)


def stated_spreads(machine: Machine) -> Array:
    """Return the standard deviation of the logarithm of each learnable factor, shape (F,)."""
    return np.array(
        [
            max(spread_of(resource.quantity), LEAST_SPREAD.get(resource.key, 0.0))
            for resource in learnable(machine)
        ]
    )


def _engine_of(machine: Machine, trials: Sequence[Trial]) -> str:
    """Return the title of the engine of all trials."""
    if machine.learned is not None:
        raise InputError(
            f"machine '{machine.name}' has learned from {len(machine.learned.runs)} runs; allowed: "
            f"the profile before ({machine.learned.base}), with a table of all runs"
        )
    if not trials:
        raise InputError("there are no runs to learn from; allowed: runs with status ok")
    titles = {trial.prediction.scenario.strategy.engine.title for trial in trials}
    if len(titles) > 1:
        raise InputError(
            f"the runs are of engines {', '.join(sorted(titles))}; allowed: runs of one engine, "
            "since kernels and host times are an engine's"
        )
    return titles.pop()


def _fit(machine: Machine, trials: Sequence[Trial], each: Each) -> Fit:
    """Return the fit of the factors, linearised where it leads to."""
    spreads = stated_spreads(machine)
    largest = np.array(largest_log_factors(machine))
    measured = np.log([trial.measured_seconds for trial in trials])
    log_factors = np.zeros(spreads.size)
    for _ in range(_N_LINEARISATIONS):
        here = improved(machine, log_factors)
        predicted, slopes = _linearised(here, trials, each)
        errors = measured - predicted + slopes @ log_factors
        fit = _of_what_is_told(slopes, errors, spreads)
        log_factors = np.minimum(fit.log_factors, largest)
    return replace(fit, log_factors=log_factors)


def _of_what_is_told(slopes: Array, errors: Array, spreads: Array) -> Fit:
    """Return the fit in which factors of which the runs tell nothing stay as they were."""
    fit = fitted(slopes, errors, spreads)
    is_told = np.sqrt(np.diag(fit.covariance)) < (1.0 - LEAST_GAIN) * spreads
    return fitted(slopes * is_told, errors, spreads)


def _linearised(machine: Machine, trials: Sequence[Trial], each: Each) -> tuple[Array, Array]:
    """Return the logarithms of the predicted steps, and their slopes by the factors, (N, F)."""
    resources = learnable(machine)
    up = [resource.improved(math.exp(_LOG_STEP)) for resource in resources]
    down = [resource.improved(math.exp(-_LOG_STEP)) for resource in resources]
    predicted, slopes = [], []
    for trial in each(trials):
        predicted.append(trial.seconds_on(machine))
        ratios = [
            trial.seconds_on(more) / trial.seconds_on(less)
            for more, less in zip(up, down, strict=True)
        ]
        slopes.append(np.log(ratios) / (2.0 * _LOG_STEP))
    return np.log(predicted), np.array(slopes)


def _with_factors(machine: Machine, factors: Sequence[LearnedFactor], runs: str) -> Machine:
    """Return the machine with what was learned in place of what was stated, and its provenance."""
    for index, factor in enumerate(factors):
        if factor.gain_fraction < LEAST_GAIN:
            continue

        def learnt(old: Quantity, new: Quantity, spread: float = factor.spread) -> Quantity:
            before = f"before {old.value:.4g}, {old.origin}: {old.source}"
            return Quantity(new.value, "fitted", f"learned from {runs}; {before}", spread)

        after = learnable(machine)[index].improved(factor.factor)
        machine = restated(machine, after, learnt)
    return machine
