"""Predict the training step of one configuration: the heart of the model."""

from __future__ import annotations

from axonn_tune.cost import paper
from axonn_tune.cost.links import placement_links
from axonn_tune.errors import InputError
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.recomputation import broken_module_rules
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.memory import host_memory_bytes, memory_bytes
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.spread import deviations, spread


def predict(
    scenario: Scenario, configuration: Configuration, with_interval: bool = False
) -> Prediction:
    """Predict one configuration, whether it fits in memory or not.

    An interval takes about ten times as long; with it the chance to be the fastest is stated, too,
    which is 1 without rivals.

    Raises
    ------
    InputError
        The configuration breaks a rule of the algorithm; the message says which.
    """
    reasons = broken_by(scenario, configuration)
    if reasons:
        raise InputError(f"{configuration} is not allowed: {'; '.join(reasons)}")
    table = candidate_table(scenario, configuration)
    links = placement_links(scenario.machine, table.placements)
    times = Evaluator.of(scenario, table, links).evaluate()
    total_bytes, terms_bytes = memory_bytes(scenario, table)
    paper_seconds = None
    if table.placements.axes.is_grid:
        by_placement = paper.communication_seconds(
            scenario.model, scenario.job, table.placements, links
        )
        paper_seconds = float(by_placement[0])
    spread_fraction = None
    if with_interval:
        spread_fraction = float(spread(scenario, *deviations(scenario, table))[0])
    return Prediction(
        scenario=scenario,
        configuration=configuration,
        n_microsteps=int(table.n_microsteps(scenario.job.global_batch)[0]),
        step_seconds=float(times.step_seconds[0]),
        exposed_communication_seconds=float(times.exposed_communication_seconds[0]),
        bubble_seconds=float(times.bubble_seconds[0]),
        memory_terms_bytes={term: float(values[0]) for term, values in terms_bytes.items()},
        memory_bytes=float(total_bytes[0]),
        host_memory_bytes=float(host_memory_bytes(scenario, table)[0]),
        paper_communication_seconds=paper_seconds,
        spread_fraction=spread_fraction,
        p_best=1.0 if with_interval else None,
    )


def candidate_table(scenario: Scenario, configuration: Configuration) -> CandidateTable:
    """Return the table that holds one configuration of a scenario."""
    return CandidateTable.single(configuration, scenario.strategy.axes)


def broken_by(scenario: Scenario, configuration: Configuration) -> list[str]:
    """Return every reason why a configuration is not allowed; the list is empty if it is."""
    layout = configuration.layout
    job = scenario.job
    if layout.n_ranks != job.n_gpus:
        return [f"it has {layout.n_ranks} ranks, not {job.n_gpus}"]
    table = candidate_table(scenario, configuration)
    broken = scenario.strategy.rejections(scenario.model, job, table.placements)
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
