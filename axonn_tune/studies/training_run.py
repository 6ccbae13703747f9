"""A whole training run: days, node-hours, energy and money, with failures and checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from axonn_tune.search.rank import Detail, best_of
from axonn_tune.search.search import Search
from axonn_tune.spec.job import ADEMAMIX, MOMENT_BYTES, MUON, Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import HOUR_SECONDS

# Weights, master weights and the two moments of Adam: 13.8 TB of a model of 1008B parameters
# (Narayanan et al., SC21, sections 5.1 and 5.10). Megatron-Core writes moments of any type in fp32
# (NVIDIA/Megatron-LM at d98e8a64, distrib_optimizer.py, _get_main_param_and_optimizer_states).
# AdEMAMix has three moments (swiss-ai/Megatron-LM at 81d44dbe, ademamix.py), Muon one of its
# matrices (NVIDIA-NeMo/Emerging-Optimizers at fd772926, orthogonalized_optimizer.py).
CHECKPOINT_BYTES_PER_PARAMETER = 13.8e12 / 1008e9
# A run that needs more than this many times its mean time between interruptions never ends.
_HOPELESS = math.log(1e6)


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
        if cycle + self.restart_seconds / mtbf > _HOPELESS:
            return math.inf
        return (
            mtbf
            * math.exp(self.restart_seconds / mtbf)
            * math.expm1(cycle)
            * work_seconds
            / interval
        )

    def work_seconds(self, wall_seconds: float) -> float:
        """Return the work that a time is expected to hold, the inverse of `wall_seconds`."""
        interval, mtbf = self.interval_seconds, self.mtbf_seconds
        if self.restart_seconds / mtbf > _HOPELESS:
            return 0.0
        restarts = mtbf * math.exp(self.restart_seconds / mtbf)
        cycle = (interval + self.checkpoint_seconds) / mtbf
        if cycle + self.restart_seconds / mtbf <= _HOPELESS:
            work = wall_seconds * interval / (restarts * math.expm1(cycle))
            if work >= interval:
                return work
        # Work that is shorter than an interval has one checkpoint, at its end.
        return max(mtbf * math.log1p(wall_seconds / restarts) - self.checkpoint_seconds, 0.0)


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
        return model_flops(self.scenario, self.tokens)

    def chance_within(self, seconds: float) -> float | None:
        """Return the probability that the run ends within a time.

        The step time is uncertain, as its interval is; failures take their expected time. None
        where the uncertainty of the step is not known.
        """
        spread = self.best.spread_fraction
        if spread is None:
            return None
        work = self.failures.work_seconds(seconds)
        if work <= 0.0:
            return 0.0
        deviations = math.log(work / self.work_seconds) / spread
        return 0.5 * math.erfc(-deviations / math.sqrt(2.0))

    def tokens_within(self, seconds: float) -> float:
        """Return the tokens of the whole steps that a time is expected to hold."""
        return self._tokens_within(seconds, self.best.step_seconds)

    def tokens_within_range(self, seconds: float) -> tuple[float, float]:
        """Return the same for the ends of the step's 90 % interval, the fewest tokens first."""
        low, high = self.best.step_seconds_interval or (self.best.step_seconds,) * 2
        return self._tokens_within(seconds, high), self._tokens_within(seconds, low)

    def _tokens_within(self, seconds: float, step_seconds: float) -> float:
        n_steps = math.floor(self.failures.work_seconds(seconds) / step_seconds)
        return n_steps * self.scenario.job.tokens

    def over(self, tokens: float) -> TrainingRun:
        """Return the run over another number of tokens."""
        return replace(self, tokens=tokens)


def model_flops(scenario: Scenario, n_tokens: float) -> float:
    """Return the FLOPs of training on some tokens, without recomputation."""
    job = scenario.job
    return scenario.model.model_flops(
        n_tokens, job.sample_len, job.adapters, job.mtp_modules, job.frozen
    )


def causal_flops(scenario: Scenario, n_tokens: float) -> float:
    """Return `model_flops` with only the half of each score matrix that causal attention forms."""
    return scenario.causal_flops * (n_tokens / scenario.job.tokens)


def checkpoint_bytes(model: Model, job: Job) -> float:
    """Return the size of one checkpoint, which holds what is trained."""
    trained = model.trained_parameters(job.adapters, job.frozen)
    trained += job.mtp_modules * model.mtp_parameters
    n_bytes = CHECKPOINT_BYTES_PER_PARAMETER * trained
    if job.optimizer == ADEMAMIX:
        n_bytes += MOMENT_BYTES["fp32"] * trained
    if job.optimizer == MUON:
        n_bytes -= MOMENT_BYTES["fp32"] * muon_elements(model, job)
    return n_bytes


def muon_elements(model: Model, job: Job) -> float:
    """Return the number of elements of the matrices that Muon updates.

    These are the trained ones of layers, of modules of multi-token prediction and of positions.
    """
    elements = float(model.position_parameters) * job.trains_embedding
    of_module = model.mtp_projection.parameters + model.matrix_parameters_of(model.blocks[-1])
    elements += job.mtp_modules * of_module
    for block, count in model.counts(range(job.frozen.n_layers, model.n_layers)).items():
        elements += count * model.matrix_parameters_of(block)
    return elements


def training_run(search: Search, tokens: float, detail: Detail = "chance") -> TrainingRun:
    """Return the run on the search's GPUs, with its best configuration in as much detail as wanted.

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
    best = best_of(search, detail)
    return TrainingRun(best.search, best.known(), tokens, failures)
