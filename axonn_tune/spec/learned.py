"""The record of what a profile has learned from training steps that somebody measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_between, require_positive
from axonn_tune.spec.plan import Array


@dataclass(frozen=True)
class LearnedFactor:
    """How much more of a resource the runs show than the profile stated before.

    key
        Name of the resource, one of those of `spec.learnable`.
    factor
        Ratio of the learned to the stated amount of the resource; a nuisance is divided by it.
    stated_spread, spread
        Standard deviations of the logarithm of the factor, before and after the runs.
    """

    key: str
    factor: float
    stated_spread: float
    spread: float

    def __post_init__(self) -> None:
        for name in ("factor", "stated_spread", "spread"):
            require_positive(f"learned factor '{self.key}'", name, getattr(self, name))

    @property
    def gain_fraction(self) -> float:
        """The part of the stated spread that the runs have removed."""
        return 1.0 - self.spread / self.stated_spread


@dataclass(frozen=True)
class LearnedRun:
    """A run that was learned from, or a part of its step that a trace shows separately.

    name
        Text that names the run, its row in the table, its model and its layout; or the part.
    measured_seconds
        Time of its step, or of the part in a step.
    stated_seconds, learned_seconds
        Its prediction before and after.
    is_set_aside
        Whether it was left out because all others contradict it.
    """

    name: str
    measured_seconds: float
    stated_seconds: float
    learned_seconds: float
    is_set_aside: bool = False

    @property
    def stated_error(self) -> float:
        """The predicted over the measured time, minus one, before learning."""
        return self.stated_seconds / self.measured_seconds - 1.0

    @property
    def learned_error(self) -> float:
        """The predicted over the measured time, minus one, after learning."""
        return self.learned_seconds / self.measured_seconds - 1.0


@dataclass(frozen=True)
class Learned:
    """What a profile has learned, from which runs, and how sure it is.

    engine
        Title of the engine that carried out the runs.
    base
        Name of the profile before.
    scatter_fraction
        Standard deviation of the logarithm of measured over predicted steps that remains.
    factors
        Factors of all resources, in the order of `spec.learnable.learnable`.
    covariance
        Covariance of the logarithms of the factors, one row for each.
    runs
        The runs.
    traced
        The parts of those runs' steps of which there are traces.
    scatter_freedom
        Degrees of freedom of the estimate of the scatter; infinite where it counts as exact.
    """

    engine: str
    base: str
    scatter_fraction: float
    factors: tuple[LearnedFactor, ...]
    covariance: tuple[tuple[float, ...], ...]
    runs: tuple[LearnedRun, ...]
    traced: tuple[LearnedRun, ...] = ()
    scatter_freedom: float = math.inf

    def __post_init__(self) -> None:
        require_positive("learned", "scatter_fraction", self.scatter_fraction)
        require_between("learned", "scatter_freedom", self.scatter_freedom, 1.0, math.inf)
        n_factors = len(self.factors)
        if [len(row) for row in self.covariance] != [n_factors] * n_factors:
            raise InputError(f"learned: covariance is not {n_factors} rows of {n_factors} numbers")
        smallest = np.linalg.eigvalsh(np.array(self.covariance)).min(initial=1.0)
        if not smallest > 0.0:
            raise InputError("learned: covariance has no square root; allowed: what `learn` wrote")

    @property
    def root(self) -> Array:
        """A square root R of the covariance, R^T R, shape (factors, factors).

        Each row holds the changes of all logarithms for one standard deviation of one independent
        cause.
        """
        return np.linalg.cholesky(np.array(self.covariance)).T
