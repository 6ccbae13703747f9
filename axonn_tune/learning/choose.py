"""Choose the layouts to try next: those whose measurement is expected to save most time.

The logarithms of the steps of all layouts of a job are jointly normal. What a machine's numbers
leave open moves layouts together, and what the model leaves out is alike where layouts are alike.
The runs so far settle a part of both. What they leave open is drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.spread import MODEL_ERROR, deviations

# Layouts that differ by so many doublings of sizes share e^-1 of what the model leaves out.
LIKENESS_DOUBLINGS = 3.0
# A run further from what is expected of it, in standard deviations, tells no more of its like.
LARGEST_SURPRISE = 1.5
N_DRAWS = 2048


@dataclass(frozen=True)
class Proposal:
    """A layout to try.

    prediction
        What is predicted of it.
    expected_seconds
        Expected step, which the runs of layouts that are like it have moved.
    p_best
        Probability that it is faster than all other candidates and all runs.
    gain_fraction
        Expected reduction of the best measured step by trying it after the proposals before it;
        None of the first try of all.
    """

    prediction: Prediction
    expected_seconds: float
    p_best: float
    gain_fraction: float | None


@dataclass(frozen=True)
class Proposals:
    """Names the layouts to try next.

    machine
        The machine as the runs describe it.
    n_runs
        Number of runs of this job, also those out of memory.
    best_measured_seconds
        Fastest measured step of this job; None if there is none.
    proposals
        The layouts, the first to be tried first.
    """

    machine: Machine
    n_runs: int
    best_measured_seconds: float | None
    proposals: tuple[Proposal, ...]


def next_layouts(
    candidates: Sequence[Prediction],
    tried: Sequence[Prediction],
    measured_seconds: Sequence[float],
    budget: int,
) -> list[Proposal]:
    """Return the layouts to try next, the first to be tried first.

    Each is the one that reduces the best measured step most for each GPU-hour that it takes. Where
    nothing is measured, the first is the one that is expected to be the fastest.

    Parameters
    ----------
    candidates : sequence of Prediction
        Layouts of one job that were not tried.
    tried, measured_seconds
        Layouts of the same job that were, as they are predicted, and their measured steps.
    budget : int
        Number of layouts wanted.
    """
    mean, covariance = _given_runs(candidates, tried, np.log(measured_seconds))
    random = np.random.default_rng(0)
    root = np.linalg.cholesky(covariance)
    # Half of the draws mirror the others, so that their mean is the expected one.
    half = random.standard_normal((N_DRAWS // 2, len(candidates))) @ root.T
    drawn = np.exp(mean + np.concatenate([half, -half]))
    best = np.full(len(drawn), min(measured_seconds, default=np.inf))
    is_best = drawn <= np.minimum(drawn.min(axis=1), best)[:, None]
    proposals: list[Proposal] = []
    left = list(range(len(candidates)))
    while left and len(proposals) < budget:
        chosen, gain = _most_useful(drawn, best, left)
        left.remove(chosen)
        best = np.minimum(best, drawn[:, chosen])
        proposals.append(
            Proposal(
                candidates[chosen],
                float(np.exp(mean[chosen])),
                float(is_best[:, chosen].mean()),
                gain,
            )
        )
    return proposals


def _most_useful(drawn: Array, best: Array, left: Sequence[int]) -> tuple[int, float | None]:
    """Return the candidate that is expected to save most for its cost, and what it saves."""
    if np.isinf(best).all():
        return left[int(np.argmin(np.log(drawn[:, left]).mean(axis=0)))], None
    saved = np.maximum(1.0 - drawn[:, left] / best[:, None], 0.0).mean(axis=0)
    per_cost = saved / drawn[:, left].mean(axis=0)
    chosen = int(np.argmax(per_cost))
    return left[chosen], float(saved[chosen])


def _given_runs(
    candidates: Sequence[Prediction], tried: Sequence[Prediction], log_measured: Array
) -> tuple[Array, Array]:
    """Return the expected logarithms of the candidates' steps, and their covariance."""
    mean, covariance = _joint([*candidates, *tried])
    n = len(candidates)
    if not tried:
        return mean, covariance
    pull = np.linalg.solve(covariance[n:, n:], covariance[n:, :n]).T
    usual = LARGEST_SURPRISE * np.sqrt(np.diag(covariance[n:, n:]))
    moved = mean[:n] + pull @ np.clip(log_measured - mean[n:], -usual, usual)
    return moved, covariance[:n, :n] - pull @ covariance[n:, :n]


def _joint(predictions: Sequence[Prediction]) -> tuple[Array, Array]:
    """Return the expected logarithms of all steps, and their covariance before any run."""
    mean = np.log([each.step_seconds for each in predictions])
    parts = [
        deviations(each.scenario, candidate_table(each.scenario, each.configuration))
        for each in predictions
    ]
    effects = np.concatenate([effect for effect, _ in parts], axis=1)
    own = np.concatenate([error for _, error in parts])
    alike = np.exp(-_doublings(predictions) / LIKENESS_DOUBLINGS)
    noise = MODEL_ERROR**2 * np.eye(len(predictions))
    return mean, effects.T @ effects + alike * np.outer(own, own) + noise


def _doublings(predictions: Sequence[Prediction]) -> Array:
    """Return by how many doublings of sizes each layout differs from each other, (N, N).

    Other recomputation, rank order or virtual stages count as a doubling each.
    """
    axes = sorted({axis for each in predictions for axis in each.layout.sizes})
    sizes = np.array(
        [
            [each.configuration.micro_batch, *(each.layout.sizes.get(axis, 1) for axis in axes)]
            for each in predictions
        ],
        dtype=np.float64,
    )
    kinds = np.array(
        [
            [each.configuration.recompute, each.configuration.order, each.configuration.n_virtual]
            for each in predictions
        ]
    )
    logs = np.log2(sizes)
    differ = (kinds[:, None] != kinds[None]).sum(axis=-1)
    return np.asarray(np.abs(logs[:, None] - logs[None]).sum(axis=-1) + differ)
