"""Predict the training step of one configuration: the heart of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from axonn_tune.cost import paper
from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import KernelPrices, Links
from axonn_tune.errors import InputError
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array
from axonn_tune.spec.recomputation import broken_module_rules
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluation, Evaluator, play_together
from axonn_tune.step.memory import host_memory_bytes, memory_bytes
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.spread import deviations, spread
from axonn_tune.units import counted


def predict(
    scenario: Scenario, configuration: Configuration, with_interval: bool = False
) -> Prediction:
    """Predict one configuration, whether it fits in memory or not.

    An interval takes about ten times as long. The prediction then also states the probability of
    being the fastest, which is 1 without other candidates.

    Raises
    ------
    InputError
        The configuration breaks a rule of the algorithm; the message says which.
    """
    reasons = broken_by(scenario, configuration)
    if reasons:
        raise InputError(f"{configuration} is not allowed: {'; '.join(reasons)}")
    return predict_each(scenario, [configuration], with_interval)[0]


def predict_each(
    scenario: Scenario, configurations: Sequence[Configuration], with_interval: bool = False
) -> list[Prediction]:
    """Predict several configurations that keep the rules, all at once; see `predict`."""
    table = CandidateTable.of(configurations, scenario.strategy.axes)
    links = placement_links(scenario.machine, table.placements, scenario.sent_once)
    prices = KernelPrices.of(scenario)
    found: dict[int, Prediction] = {}
    for rows in table.alike():
        part = _predictions(scenario, table.take(rows), links, prices, with_interval)
        found |= zip(rows.tolist(), part, strict=True)
    return [found[row] for row in range(len(table))]


def predict_on(
    scenario: Scenario, configuration: Configuration, machines: Sequence[Machine]
) -> list[Prediction]:
    """Predict a configuration that keeps the rules on machines whose links form the same levels.

    Its plan is made once, and is played on all of them at once.
    """
    table = CandidateTable.of([configuration], scenario.strategy.axes)
    evaluator = Evaluator.of(scenario, table)
    on_each = [evaluator.on(machine) for machine in machines]
    return [
        _priced(there, Evaluation(*step.times()))[0]
        for there, step in zip(on_each, play_together(on_each), strict=True)
    ]


def _predictions(
    scenario: Scenario,
    table: CandidateTable,
    links: Links,
    prices: KernelPrices,
    with_interval: bool,
) -> list[Prediction]:
    """Return the predictions of candidates that are alike."""
    evaluator = Evaluator.of(scenario, table, links, prices)
    predictions = _priced(evaluator, evaluator.evaluate())
    if not with_interval:
        return predictions
    spreads = spread(scenario, *deviations(scenario, table)).tolist()
    return [
        replace(prediction, spread_fraction=fraction, p_best=1.0)
        for prediction, fraction in zip(predictions, spreads, strict=True)
    ]


def _priced(evaluator: Evaluator, times: Evaluation) -> list[Prediction]:
    """Return the predictions of candidates that are alike, with the time of AxoNN's equations."""
    scenario, table = evaluator.scenario, evaluator.candidates
    paper_seconds = None
    if table.placements.axes.is_grid:
        paper_seconds = paper.communication_seconds(
            scenario.model, scenario.job, table.placements, evaluator.links
        )[table.placement]
    return predictions_of(scenario, table, times, paper_seconds, evaluator)


def predictions_of(
    scenario: Scenario,
    table: CandidateTable,
    times: Evaluation,
    paper_seconds: Array | None,
    evaluator: Evaluator | None = None,
) -> list[Prediction]:
    """Return the predictions of candidates that are alike and whose times are known.

    `paper_seconds` is their communication time by AxoNN's own equations, None if they have none.
    The evaluator of the table may be known already.
    """
    runs_ahead = _runs_ahead(scenario, table, evaluator)
    total_bytes, terms_bytes = memory_bytes(scenario, table, runs_ahead=runs_ahead)
    host_bytes = host_memory_bytes(scenario, table)
    n_microsteps = table.n_microsteps(scenario.job.global_batch)
    return [
        Prediction(
            scenario=scenario,
            configuration=table.configuration(row),
            n_microsteps=int(n_microsteps[row]),
            step_seconds=float(times.step_seconds[row]),
            exposed_communication_seconds=float(times.exposed_communication_seconds[row]),
            bubble_seconds=float(times.bubble_seconds[row]),
            memory_terms_bytes={term: float(nbytes[row]) for term, nbytes in terms_bytes.items()},
            memory_bytes=float(total_bytes[row]),
            host_memory_bytes=float(host_bytes[row]),
            runs_ahead=bool(runs_ahead[row]),
            paper_communication_seconds=_entry(paper_seconds, row),
        )
        for row in range(len(table))
    ]


def peak_bytes(scenario: Scenario, table: CandidateTable) -> Array:
    """Return the peak memory of candidates that are alike as their predictions state it."""
    total_bytes, _ = memory_bytes(scenario, table, runs_ahead=_runs_ahead(scenario, table))
    return total_bytes


def _runs_ahead(
    scenario: Scenario, table: CandidateTable, evaluator: Evaluator | None = None
) -> np.ndarray:
    """Return where the host of a stage runs ahead, if what the allocator holds depends on it."""
    engine = scenario.strategy.engine
    may_wait = table.is_pipelined or engine.waits_without_stages
    if engine.memory.held_back_tensors is None or not may_wait:
        return np.zeros(len(table), dtype=bool)
    return (evaluator or Evaluator.of(scenario, table)).runs_ahead()


def _entry(column: Array | None, row: int) -> float | None:
    """Return an entry of a column that may not be known."""
    return None if column is None else float(column[row])


def first_stage_bytes(prediction: Prediction) -> float:
    """Return the peak memory that the allocator of a rank in the first stage holds."""
    if prediction.layout.n_stages == 1:
        return prediction.allocator_bytes
    scenario = prediction.scenario
    table = candidate_table(scenario, prediction.configuration)
    runs_ahead = np.array([prediction.runs_ahead])
    total, terms = memory_bytes(scenario, table, in_first_stage=True, runs_ahead=runs_ahead)
    return float(total[0] - terms["reserved"][0])


def candidate_table(scenario: Scenario, configuration: Configuration) -> CandidateTable:
    """Return the table that holds one configuration of a scenario."""
    return CandidateTable.single(configuration, scenario.strategy.axes)


def broken_by(scenario: Scenario, configuration: Configuration) -> list[str]:
    """Return every reason why a configuration is not allowed; the list is empty if it is."""
    layout = configuration.layout
    job = scenario.job
    if layout.n_ranks != job.n_gpus:
        return [f"it has {counted(layout.n_ranks, 'rank')}, not {job.n_gpus}"]
    table = candidate_table(scenario, configuration)
    broken = scenario.rejections(table.placements)
    reasons = [reason for reason, mask in broken.items() if mask.all()]
    if reasons:
        return reasons
    if table.n_microsteps(job.global_batch)[0] % 1:
        micro_batch = configuration.micro_batch
        return [f"micro-batch {micro_batch} does not divide the share of the batch"]
    if not scenario.strategy.admits(scenario.model, job, table).all():
        return [
            f"it cannot be cut into {configuration.n_virtual} virtual stages, or its "
            "schedule needs more micro-batches"
        ]
    modules = scenario.strategy.recomputed_modules
    return broken_module_rules(scenario.model, modules, configuration.recompute)
