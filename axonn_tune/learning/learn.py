"""Learn from measured steps: a machine becomes one that predicts them, as far as they tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.errors import InputError
from axonn_tune.learning.fit import EXPECTED_SCATTER, Fit, fitted
from axonn_tune.learning.parts import PartSeconds, parts_of
from axonn_tune.search.rank import Each
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.learnable import improved, largest_log_factors, learnable
from axonn_tune.spec.learned import Learned, LearnedFactor, LearnedRun
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array
from axonn_tune.spec.provenance import restated
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.traced import Trace
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.spread import UNSTATED_SPREAD, spread_of
from axonn_tune.units import counted

# Least standard deviation of the logarithm of a factor of kernels and host, by convention: those of
# an engine differ from those of a benchmark, and one host from another.
LEAST_SPREAD = {"attention": 0.2, "memory_kernels": 0.2, "host": 0.15}
# The same where an engine does not say how fast its attention is: it may be an older one.
UNKNOWN_ATTENTION_SPREAD = 0.4
# A resource of which runs remove less of the stated spread than this is one that they do not tell.
LEAST_GAIN = 0.05
# How many times less than a step a part of a traced step scatters: as measured numbers do.
_CERTAINTY_OF_PARTS = EXPECTED_SCATTER / UNSTATED_SPREAD["measured"]
# Times that the step times are linearised, the last at the factors that were found before.
_N_LINEARISATIONS = 2
# Change of the logarithm of a factor with which slopes are found.
_LOG_STEP = 0.1


@dataclass(frozen=True)
class Trial:
    """A run with its measured step, and its prediction on the machine that shall learn.

    The trace of one rank, if there is one, tells parts of the step apart.
    """

    name: str
    prediction: Prediction
    measured_seconds: float
    trace: Trace | None = None

    @cached_property
    def evaluator(self) -> Evaluator:
        """What predicts the run on other machines without planning it anew."""
        scenario = self.prediction.scenario
        return Evaluator.of(scenario, candidate_table(scenario, self.prediction.configuration))

    def seconds_on(self, machine: Machine) -> float:
        """Return the predicted step on another machine."""
        return float(self.evaluator.on(machine).evaluate().step_seconds[0])

    def parts_on(self, machine: Machine) -> dict[str, PartSeconds]:
        """Return the traced parts of the step beside their predictions on another machine."""
        if self.trace is None:
            return {}
        scenario = replace(self.prediction.scenario, machine=machine)
        predicted = replace(self.prediction, scenario=scenario)
        return parts_of(explain(predicted, with_sensitivities=False), self.trace)

    @cached_property
    def observed(self) -> dict[str, float]:
        """The measured time of the step and of its traced parts, by name."""
        parts = self.parts_on(self.prediction.scenario.machine)
        traced = {f"{self.name}: {name}": part.traced_seconds for name, part in parts.items()}
        return {self.name: self.measured_seconds, **traced}

    def all_seconds_on(self, machine: Machine) -> Array:
        """Return the predicted step and its traced parts on another machine."""
        parts = self.parts_on(machine).values()
        return np.array([self.seconds_on(machine), *(part.predicted_seconds for part in parts)])


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
    stated = stated_spreads(machine, engine)
    fit = _fit(machine, trials, stated, each)
    resources = learnable(machine)
    factors = tuple(
        LearnedFactor(resource.key, math.exp(log), float(before), math.sqrt(variance))
        for resource, log, before, variance in zip(
            resources, fit.log_factors, stated, np.diag(fit.covariance), strict=True
        )
    )
    learnt = _with_factors(machine, factors, f"{counted(len(trials), 'run')} of {engine.title}")
    observed = [item for trial in trials for item in trial.observed.items()]
    told = [
        LearnedRun(name, measured, float(before), float(after), bool(is_set_aside))
        for (name, measured), before, after, is_set_aside in zip(
            observed,
            _all_seconds_on(machine, trials),
            _all_seconds_on(learnt, trials),
            fit.is_set_aside,
            strict=True,
        )
    ]
    names = {trial.name for trial in trials}
    runs = tuple(run for run in told if run.name in names)
    traced = tuple(run for run in told if run.name not in names)
    covariance = tuple(tuple(map(float, row)) for row in fit.covariance)
    record = Learned(
        engine.title,
        machine.name,
        fit.scatter,
        factors,
        covariance,
        runs,
        traced,
        fit.freedom,
    )
    return replace(learnt, learned=record)


def stated_spreads(machine: Machine, engine: Engine) -> Array:
    """Return the standard deviation of the logarithm of each learnable factor, shape (F,)."""
    least = dict(LEAST_SPREAD)
    if engine.attention_rate is None:
        least["attention"] = UNKNOWN_ATTENTION_SPREAD
    stated = {resource.key: resource.quantity for resource in learnable(machine)}
    if engine.issue_seconds is None:
        # Such an engine's steps rest on the time that was found on this machine.
        stated["host"] = machine.kernels.issue_seconds
    return np.array([max(spread_of(stated[key]), least.get(key, 0.0)) for key in stated])


def _engine_of(machine: Machine, trials: Sequence[Trial]) -> Engine:
    """Return the engine of all trials."""
    if machine.learned is not None:
        raise InputError(
            f"machine '{machine.name}' has already learned from "
            f"{counted(len(machine.learned.runs), 'run')}; allowed: the profile before "
            f"({machine.learned.base}), with a table of all runs"
        )
    if not trials:
        raise InputError("there are no runs to learn from; allowed: runs with status ok")
    engines = [trial.prediction.scenario.strategy.engine for trial in trials]
    titles = {engine.title for engine in engines}
    if len(titles) > 1:
        raise InputError(
            f"the runs are of engines {', '.join(sorted(titles))}; allowed: runs of one engine, "
            "since kernels and host times are an engine's"
        )
    return engines[0]


def _fit(machine: Machine, trials: Sequence[Trial], spreads: Array, each: Each) -> Fit:
    """Return the fit of the factors; each round linearises where the one before it has led."""
    largest = np.array(largest_log_factors(machine))
    observed = [list(trial.observed.values()) for trial in trials]
    measured = np.log(np.concatenate(observed))
    certainty = np.concatenate([[1.0] + [_CERTAINTY_OF_PARTS] * (len(o) - 1) for o in observed])
    log_factors = np.zeros(spreads.size)
    is_told = np.ones(spreads.size, dtype=bool)
    for _ in range(_N_LINEARISATIONS):
        here = improved(machine, log_factors)
        predicted, slopes = _linearised(here, trials, is_told, each)
        errors = measured - predicted + slopes @ log_factors
        fit = fitted(slopes, errors, spreads, certainty)
        # What the runs do not tell stays as it was.
        is_told = np.sqrt(np.diag(fit.covariance)) < (1.0 - LEAST_GAIN) * spreads
        fit = fitted(slopes * is_told, errors, spreads, certainty)
        log_factors = np.minimum(fit.log_factors, largest)
    return replace(fit, log_factors=log_factors)


def _linearised(
    machine: Machine, trials: Sequence[Trial], is_wanted: np.ndarray, each: Each
) -> tuple[Array, Array]:
    """Return the logarithms of the predicted times, and their slopes by the factors, (N, F).

    The times are those of each trial's step and of its traced parts. The slopes of factors that are
    not wanted are 0.
    """
    worse = {
        index: resource.improved(math.exp(-_LOG_STEP))
        for index, resource in enumerate(learnable(machine))
        if is_wanted[index]
    }
    predicted, slopes = [], []
    for trial in each(trials):
        here = np.log(trial.all_seconds_on(machine))
        slope = np.zeros((here.size, is_wanted.size))
        for index, worse_machine in worse.items():
            slope[:, index] = (here - np.log(trial.all_seconds_on(worse_machine))) / _LOG_STEP
        predicted.append(here)
        slopes.append(slope)
    return np.concatenate(predicted), np.concatenate(slopes)


def _all_seconds_on(machine: Machine, trials: Sequence[Trial]) -> Array:
    """Return the predicted times of all steps and of their traced parts on a machine."""
    return np.concatenate([trial.all_seconds_on(machine) for trial in trials])


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
