"""A whole training run: days, node-hours, energy and money, with failures and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.no_fit import LARGEST_GPU_COUNT
from axonn_tune.search.rank import Each, rank_best
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import require_positive
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import DAY_SECONDS, HOUR_SECONDS

# Weights, master weights and the two moments of Adam: 13.8 TB of a model of 1008B parameters
# (Narayanan et al., SC21, sections 5.1 and 5.10).
CHECKPOINT_BYTES_PER_PARAMETER = 13.8e12 / 1008e9
# Number of tokens per parameter that makes best use of a compute budget (Hoffmann et al.,
# arXiv 2203.15556, table 3: 8.0B tokens for 400M parameters to 216T for 10T).
CHINCHILLA_TOKENS_PER_PARAMETER = 20.0
MOST_TOKENS = 1e18  # far more text than exists
# Number of GPU counts that are tried from one power of two to the next.
COUNTS_PER_DOUBLING = 2


@dataclass(frozen=True)
class Failures:
    """The interruptions of a job.

    mtbf_seconds
        Mean time between two interruptions.
    checkpoint_seconds
        Time to write a checkpoint.
    restart_seconds
        Time from an interruption until the job goes on.
    """

    mtbf_seconds: float
    checkpoint_seconds: float
    restart_seconds: float

    @property
    def interval_seconds(self) -> float:
        """The best time between the end of a checkpoint and the start of the next.

        Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        FGCS 22 (2006), eq. 37.
        """
        delta = self.checkpoint_seconds
        mtbf = self.mtbf_seconds
        if delta >= 2.0 * mtbf:
            return mtbf
        share = delta / (2.0 * mtbf)
        return math.sqrt(2.0 * delta * mtbf) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - delta

    def wall_seconds(self, work_seconds: float) -> float:
        """Return the expected time of work with checkpoints and random failures (Daly, eq. 20)."""
        interval = min(self.interval_seconds, work_seconds)
        mtbf = self.mtbf_seconds
        cycle = (interval + self.checkpoint_seconds) / mtbf
        if cycle + self.restart_seconds / mtbf > math.log(1e6):
            return math.inf
        return (
            mtbf
            * math.exp(self.restart_seconds / mtbf)
            * math.expm1(cycle)
            * work_seconds
            / interval
        )


@dataclass(frozen=True)
class TrainingRun:
    """A run over a number of tokens on the best configuration of one GPU count."""

    search: Search
    best: Prediction
    tokens: float
    failures: Failures

    @property
    def scenario(self) -> Scenario:
        """The model, job, machine and strategy of the run."""
        return self.best.scenario

    @property
    def n_steps(self) -> int:
        """The number of optimizer steps."""
        return math.ceil(self.tokens / self.scenario.job.tokens)

    @property
    def work_seconds(self) -> float:
        """The time of all steps, without failures and checkpoints."""
        return self.n_steps * self.best.step_seconds

    @property
    def wall_seconds(self) -> float:
        """The expected time from the first to the last step."""
        return self.failures.wall_seconds(self.work_seconds)

    @property
    def wall_seconds_range(self) -> tuple[float, float]:
        """The expected time for the ends of the step's 90 % interval."""
        low, high = self.best.step_seconds_interval or (self.best.step_seconds,) * 2
        return (
            self.failures.wall_seconds(self.n_steps * low),
            self.failures.wall_seconds(self.n_steps * high),
        )

    @property
    def useful_fraction(self) -> float:
        """The share of the time in which the run makes progress that is kept."""
        return self.work_seconds / self.wall_seconds

    @property
    def n_interruptions(self) -> float:
        """The expected number of failures."""
        return self.wall_seconds / self.failures.mtbf_seconds

    @property
    def node_hours(self) -> float:
        """The number of nodes times the hours."""
        return self.scenario.n_nodes * self.wall_seconds / HOUR_SECONDS

    @property
    def gpu_hours(self) -> float:
        """The number of GPUs times the hours."""
        return self.scenario.job.n_gpus * self.wall_seconds / HOUR_SECONDS

    @property
    def energy_joules(self) -> float | None:
        """The energy of the nodes, without cooling; None if the profile lacks their power."""
        power = self.scenario.machine.facility.node_power_watts
        return None if power is None else power.value * self.scenario.n_nodes * self.wall_seconds

    @property
    def cost(self) -> float | None:
        """The cost in the facility's currency; None if the profile lacks the price."""
        price = self.scenario.machine.facility.node_hour_price
        return None if price is None else price.value * self.node_hours

    @property
    def model_flops(self) -> float:
        """The FLOPs of the whole run, without recomputation."""
        return _model_flops(self.scenario, self.tokens)


def _model_flops(scenario: Scenario, n_tokens: float) -> float:
    """Return the FLOPs of training on some tokens, without recomputation."""
    job = scenario.job
    return scenario.model.model_flops(
        n_tokens, job.sample_len, job.adapters, job.mtp_modules, job.frozen
    )


def checkpoint_bytes(model: Model, job: Job) -> float:
    """Return the size of one checkpoint, which holds what is trained."""
    trained = model.trained_parameters(job.adapters, job.frozen)
    trained += job.mtp_modules * model.mtp_parameters
    return CHECKPOINT_BYTES_PER_PARAMETER * trained


def planned_runs(
    search: Search,
    tokens: float | None = None,
    deadline_seconds: float | None = None,
    each: Each = iter,
) -> list[TrainingRun]:
    """Return the run on the search's GPUs, or with a deadline the runs of `meet_deadline`.

    Parameters
    ----------
    tokens : float or None
        Tokens of the run; None takes 20 for each parameter (Chinchilla).

    Raises
    ------
    InputError
        A number is impossible, no count of GPUs meets the deadline, or failures are so frequent
        that the run never ends.
    NoCandidateError
        Nothing is legal, or fits.
    """
    if tokens is None:
        tokens = CHINCHILLA_TOKENS_PER_PARAMETER * search.scenario.model.parameters
    if not 0 < tokens <= MOST_TOKENS:
        raise InputError(f"--tokens is {tokens:g}; allowed: above zero, at most {MOST_TOKENS:g}")
    if deadline_seconds is not None:
        require_positive("plan", "deadline_seconds", deadline_seconds)
        return meet_deadline(search, tokens, deadline_seconds, each)
    run = training_run(search, tokens)
    if math.isinf(run.wall_seconds):
        failures = run.failures
        raise InputError(
            f"a job on {run.scenario.job.n_gpus} GPUs fails every {failures.mtbf_seconds:.3g} s "
            f"and takes {failures.checkpoint_seconds:.3g} s to write a checkpoint and "
            f"{failures.restart_seconds:.3g} s to go on, so that it never ends; allowed: fewer "
            "--gpus, a longer --gpu-mtbf, a shorter --restart, a faster --storage"
        )
    return [run]


def training_run(search: Search, tokens: float) -> TrainingRun:
    """Return the run on the search's GPUs, with its best configuration.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits.
    """
    scenario = search.scenario
    facility = scenario.machine.facility
    written_bytes = checkpoint_bytes(scenario.model, scenario.job)
    checkpoint_seconds = written_bytes / facility.checkpoint_bytes_per_s.value
    failures = Failures(
        mtbf_seconds=facility.gpu_mtbf_seconds.value / scenario.job.n_gpus,
        checkpoint_seconds=checkpoint_seconds,
        restart_seconds=facility.restart_seconds.value + checkpoint_seconds,
    )
    ranking = rank_best(search, 1)
    return TrainingRun(ranking.search, ranking.top(1)[0], tokens, failures)


def meet_deadline(
    search: Search, tokens: float, deadline_seconds: float, each: Each = iter
) -> list[TrainingRun]:
    """Return runs on growing GPU counts, the last one the first that ends by the deadline.

    The counts are powers of two and the numbers halfway between them, in whole nodes. They begin
    with the count that would suffice at the GPUs' peak, and end with all that the machine has.

    Raises
    ------
    InputError
        No count meets the deadline; the message says how near the fastest comes.
    """
    runs: list[TrainingRun] = []
    counts = _counts(search, tokens, deadline_seconds)
    for n_gpus in each(counts):
        try:
            runs.append(training_run(search.on_gpus(n_gpus), tokens))
        except NoCandidateError:
            continue
        if runs[-1].wall_seconds <= deadline_seconds:
            return runs
    if not runs:
        model = search.scenario.model
        raise InputError(f"{model.name} has no layout that fits on {_span(counts)} GPUs")
    best = min(runs, key=lambda run: run.wall_seconds)
    raise InputError(
        f"no count of GPUs meets --deadline, of {_span(counts)}: {best.scenario.job.n_gpus} come "
        f"nearest with {best.wall_seconds / DAY_SECONDS:.3g} days; {_hint(search, counts)}"
    )


def _hint(search: Search, counts: Sequence[int]) -> str:
    """Return what else may let a run meet its deadline."""
    machine = search.scenario.machine
    nodes = machine.facility.n_nodes
    if nodes is not None and counts[-1] >= int(nodes.value) * machine.ranks_per_node:
        return f"machine '{machine.name}' has no more"
    return "a larger global batch may let more GPUs help"


def _span(counts: Sequence[int]) -> str:
    """Return the first and the last count as text."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _counts(search: Search, tokens: float, deadline_seconds: float) -> list[int]:
    """Return the numbers of GPUs that are tried; see `meet_deadline`."""
    scenario = search.scenario
    machine = scenario.machine
    job = scenario.job
    flops = _model_flops(scenario, tokens)
    peak = machine.peak_flops_per_s(job.product_format)
    most = LARGEST_GPU_COUNT
    if machine.facility.n_nodes is not None:
        most = min(most, int(machine.facility.n_nodes.value) * machine.ranks_per_node)
    least = max(flops / (peak * deadline_seconds), machine.ranks_per_node)
    if least > most:
        raise InputError(
            f"--deadline: even at their peak it takes {least:.0f} GPUs, and there are {most}; "
            "allowed: a later one"
        )
    first = COUNTS_PER_DOUBLING * math.floor(math.log2(least))
    last = COUNTS_PER_DOUBLING * math.ceil(math.log2(min(most, 64 * least)))
    counts = []
    for exponent in range(first, last + 1):
        whole, part = divmod(exponent, COUNTS_PER_DOUBLING)
        count = 2**whole * (COUNTS_PER_DOUBLING + part) // COUNTS_PER_DOUBLING
        if least <= count <= most and count % machine.ranks_per_node == 0:
            counts.append(count)
    return counts
