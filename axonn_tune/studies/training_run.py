"""A whole training run: days, node-hours, energy and money, failures and checkpoints included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.each import Each
from axonn_tune.search.rank import LARGEST_GPU_COUNT, run
from axonn_tune.search.search import Search
from axonn_tune.spec.model import Model
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.failures import Failures
from axonn_tune.units import DAY_SECONDS

# Weights, master weights and the two moments of Adam: 13.8 TB of a model of 1008B parameters
# (Narayanan et al., SC21, sections 5.1 and 5.10).
CHECKPOINT_BYTES_PER_PARAMETER = 13.8e12 / 1008e9
# Tokens for each parameter that make best use of a compute budget (Hoffmann et al.,
# arXiv 2203.15556, table 3: 8.0B tokens for 400M parameters to 216T for 10T).
CHINCHILLA_TOKENS_PER_PARAMETER = 20.0
# Steps between two powers of two at which GPU counts are tried.
COUNTS_PER_DOUBLING = 2


@dataclass(frozen=True)
class TrainingRun:
    """A run over so many tokens on the best configuration of one GPU count."""

    search: Search
    best: Prediction
    tokens: float
    failures: Failures

    @property
    def n_steps(self) -> int:
        """Optimizer steps."""
        return math.ceil(self.tokens / self.search.job.tokens)

    @property
    def work_seconds(self) -> float:
        """All steps, without failures and checkpoints."""
        return self.n_steps * self.best.step_seconds

    @property
    def wall_seconds(self) -> float:
        """Expected time from the first to the last step."""
        return self.failures.wall_seconds(self.work_seconds)

    @property
    def wall_seconds_range(self) -> tuple[float, float]:
        """With the ends of the step's 90 % interval."""
        low, high = self.best.step_seconds_interval or (self.best.step_seconds,) * 2
        return (
            self.failures.wall_seconds(self.n_steps * low),
            self.failures.wall_seconds(self.n_steps * high),
        )

    @property
    def useful_fraction(self) -> float:
        """Share of the time in which the run makes progress that is kept."""
        return self.work_seconds / self.wall_seconds

    @property
    def n_interruptions(self) -> float:
        """Expected failures."""
        return self.wall_seconds / self.failures.mtbf_seconds

    @property
    def node_hours(self) -> float:
        """Nodes times hours."""
        return self.search.n_nodes * self.wall_seconds / 3600.0

    @property
    def gpu_hours(self) -> float:
        """GPUs times hours."""
        return self.search.job.n_gpus * self.wall_seconds / 3600.0

    @property
    def energy_joules(self) -> float | None:
        """Of the nodes, without cooling; None where the profile does not say their power."""
        power = self.search.machine.facility.node_power_watts
        return None if power is None else power.value * self.search.n_nodes * self.wall_seconds

    @property
    def cost(self) -> float | None:
        """In the facility's currency; None where the profile does not say the price."""
        price = self.search.machine.facility.node_hour_price
        return None if price is None else price.value * self.node_hours

    @property
    def model_flops(self) -> float:
        """Of the whole run, without recomputation."""
        return self.search.model.model_flops(self.tokens, self.search.job.seq_len)


def checkpoint_bytes(model: Model) -> float:
    """Size of one checkpoint."""
    return CHECKPOINT_BYTES_PER_PARAMETER * model.parameters


def training_run(search: Search, tokens: float) -> TrainingRun:
    """The run on the search's GPUs, with its best configuration.

    Raises
    ------
    NoCandidateError
        Nothing is legal, or fits.
    """
    facility, job = search.machine.facility, search.job
    checkpoint = checkpoint_bytes(search.model) / facility.checkpoint_bytes_per_s.value
    failures = Failures(
        mtbf_seconds=facility.gpu_mtbf_seconds.value / job.n_gpus,
        checkpoint_seconds=checkpoint,
        restart_seconds=facility.restart_seconds.value + checkpoint,
    )
    return TrainingRun(search, run(search).top(1)[0], tokens, failures)


def meet_deadline(
    search: Search, tokens: float, deadline_seconds: float, each: Each = iter
) -> list[TrainingRun]:
    """Runs on growing GPU counts, the last one the first that ends by the deadline.

    Counts are whole nodes, powers of two and what lies halfway between, from the count that
    would do at the GPUs' peak to all that the machine has.

    Raises
    ------
    InputError
        No count meets the deadline; the message says how near the fastest comes.
    """
    runs: list[TrainingRun] = []
    counts = _counts(search, tokens, deadline_seconds)
    for n_gpus in each(counts):
        try:
            job = replace(search.job, n_gpus=n_gpus)
            runs.append(training_run(replace(search, job=job), tokens))
        except NoCandidateError:
            continue
        if runs[-1].wall_seconds <= deadline_seconds:
            return runs
    if not runs:
        raise InputError(f"{search.model.name} has no layout that fits on {_span(counts)} GPUs")
    best = min(runs, key=lambda each: each.wall_seconds)
    raise InputError(
        f"no count of {_span(counts)} GPUs, the fewest that could at their peak and more, meets "
        f"--deadline: {best.search.job.n_gpus} come nearest with "
        f"{best.wall_seconds / DAY_SECONDS:.3g} days; a larger global batch may let more GPUs help"
    )


def _span(counts: Sequence[int]) -> str:
    return f"{counts[0]} to {counts[-1]}"


def _counts(search: Search, tokens: float, deadline_seconds: float) -> list[int]:
    per_node = search.machine.ranks_per_node
    flops = search.model.model_flops(tokens, search.job.seq_len)
    peak = search.machine.peak_flops_per_s(search.job.dtype)
    most = LARGEST_GPU_COUNT
    if search.machine.facility.n_nodes is not None:
        most = min(most, int(search.machine.facility.n_nodes.value) * per_node)
    least = max(flops / (peak * deadline_seconds), per_node)
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
        if least <= count <= most and count % per_node == 0:
            counts.append(count)
    return counts
