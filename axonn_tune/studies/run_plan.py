"""The plan of a training run: on given GPUs, by a deadline, or within a budget of node-hours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.no_fit import LARGEST_GPU_COUNT
from axonn_tune.search.rank import Detail, Each
from axonn_tune.search.search import Search
from axonn_tune.spec.scenario import Scenario
from axonn_tune.studies.limits import Limits
from axonn_tune.studies.training_run import TrainingRun, causal_flops, training_run
from axonn_tune.units import DAY_SECONDS

# Number of tokens per parameter of a dense model that makes best use of a compute budget (Hoffmann
# et al., arXiv 2203.15556, table 3: 8.0B tokens for 400M parameters to 216T for 10T).
CHINCHILLA_TOKENS_PER_PARAMETER = 20.0
MOST_TOKENS = 1e18  # far more text than exists
# Number of GPU counts that are tried from one power of two to the next.
COUNTS_PER_DOUBLING = 2


@dataclass(frozen=True)
class RunPlan:
    """The runs that were looked at, of which the last is the plan.

    asked_tokens
        The tokens that were to be trained; None for as many as the budget buys.
    finds_gpus
        Whether the number of GPUs was found, and not named.
    """

    runs: Sequence[TrainingRun]
    limits: Limits
    asked_tokens: float | None
    finds_gpus: bool

    @property
    def best(self) -> TrainingRun:
        """The run that is the plan."""
        return self.runs[-1]

    @property
    def is_bought(self) -> bool:
        """Whether the runs are over what the budget buys, and not over the tokens asked for."""
        return self.best.tokens != self.asked_tokens


def plan_run(
    search: Search,
    tokens: float | None,
    limits: Limits,
    on_its_gpus: bool,
    each: Each = iter,
    detail: Detail = "chance",
) -> RunPlan:
    """Return the run on the search's GPUs, or on the number of GPUs that suits the limits best.

    Parameters
    ----------
    tokens : float or None
        Tokens of the run; None takes as many as the budget buys, or without a budget 20 for each
        parameter (Chinchilla).
    on_its_gpus : bool
        Whether the search's number of GPUs is kept. Otherwise the limits determine it; see
        `meet_deadline` and `spend_budget`.
    detail
        What the predictions have to state, at least the interval.

    Raises
    ------
    InputError
        A number is impossible, no count of GPUs meets the deadline, the budget buys nothing, or
        failures are so frequent that the run never ends.
    NoCandidateError
        Nothing is legal, or fits.
    """
    if tokens is None and not limits.has_budget:
        if not search.scenario.job.trains_all_weights:
            raise InputError(
                "give --tokens: the default of 20 for each parameter is of training all weights, "
                "and this job trains a part of them"
            )
        tokens = CHINCHILLA_TOKENS_PER_PARAMETER * search.scenario.model.parameters
    if tokens is not None and not 0 < tokens <= MOST_TOKENS:
        raise InputError(f"--tokens is {tokens:g}; allowed: above zero, at most {MOST_TOKENS:g}")
    if on_its_gpus:
        return RunPlan([_on_its_gpus(search, tokens, limits, detail)], limits, tokens, False)
    if limits.has_budget:
        return RunPlan(spend_budget(search, tokens, limits, each, detail), limits, tokens, True)
    if tokens is None or limits.deadline_seconds is None:
        raise InputError(
            "give --gpus, or a limit that determines their number: --deadline, such as 30d, "
            "--node-hours or --gpu-hours"
        )
    runs = meet_deadline(search, tokens, limits.deadline_seconds, each, detail)
    return RunPlan(runs, limits, tokens, True)


def _on_its_gpus(
    search: Search, tokens: float | None, limits: Limits, detail: Detail
) -> TrainingRun:
    """Return the run on the search's GPUs, over the tokens or what the limits let it train."""
    run = training_run(search, MOST_TOKENS if tokens is None else tokens, detail)
    if math.isinf(run.wall_seconds):
        raise _never_ends(run)
    if tokens is not None:
        return run
    bought = _over_what_limits_buy([run], limits)
    if not bought:
        raise _too_little(limits)
    return bought[0]


def meet_deadline(
    search: Search,
    tokens: float,
    deadline_seconds: float,
    each: Each = iter,
    detail: Detail = "chance",
) -> list[TrainingRun]:
    """Return runs on growing GPU counts, the last one the first that ends by the deadline.

    The counts of nodes are powers of two and the numbers halfway between them. They begin with the
    count that would suffice at the GPUs' peak, and end with all that the machine has.

    Raises
    ------
    InputError
        No count meets the deadline; the message says how near the fastest comes.
    """
    runs: list[TrainingRun] = []
    counts = _counts_by(search, tokens, deadline_seconds)
    for n_gpus in each(counts):
        try:
            runs.append(training_run(search.on_gpus(n_gpus), tokens, detail))
        except NoCandidateError:
            continue
        if runs[-1].wall_seconds <= deadline_seconds:
            return runs
    if not runs:
        raise _nothing_fits(search, counts)
    best = min(runs, key=lambda run: run.wall_seconds)
    if math.isinf(best.wall_seconds):
        raise _never_ends(best)
    raise InputError(
        f"no count of GPUs ({_span(counts)}) meets --deadline: {best.scenario.job.n_gpus} come "
        f"nearest with {best.wall_seconds / DAY_SECONDS:.3g} days; {_hint(search, counts)}"
    )


def spend_budget(
    search: Search,
    tokens: float | None,
    limits: Limits,
    each: Each = iter,
    detail: Detail = "chance",
) -> list[TrainingRun]:
    """Return runs on falling GPU counts, the last one the best use of a budget.

    Of the counts that train the tokens within the limits, the best is the one that ends soonest, or
    with a deadline the cheapest: who names a deadline has said how soon is soon enough. Where no
    count does, all runs are over the tokens that the limits let them train, and the best trains
    most. The counts are those of `meet_deadline`, from all that the machine has, or on which the
    budget lasts an hour, down to a node. A count is left out if it could not be better even at the
    peak of its GPUs.

    Raises
    ------
    InputError
        Nothing fits, or the limits end before the first step.
    """
    counts = _counts_within(search, limits)
    wanted = math.inf if tokens is None else tokens
    runs: list[TrainingRun] = []
    for n_gpus in each(counts):
        most = max((_merit(run, limits) for run in runs), default=(False, 0.0))
        here = search.on_gpus(n_gpus)
        if _merit_at_peak(here, wanted, limits) < most:
            break
        try:
            runs.append(training_run(here, wanted, detail))
        except NoCandidateError:
            continue
    if not runs:
        raise _nothing_fits(search, counts, ", on which the budget lasts an hour")
    best = max(runs, key=lambda run: _merit(run, limits))
    if best.tokens == tokens and _is_within(best, limits):
        return runs[: runs.index(best) + 1]
    bought = _over_what_limits_buy(runs, limits)
    if not bought:
        fewest = runs[-1]
        is_endless = math.isinf(fewest.over(fewest.scenario.job.tokens).wall_seconds)
        raise _never_ends(fewest) if is_endless else _too_little(limits)
    most_tokens = max(bought, key=lambda run: run.tokens)
    return bought[: bought.index(most_tokens) + 1]


def _is_within(run: TrainingRun, limits: Limits) -> bool:
    return run.wall_seconds <= limits.seconds(run.scenario)


def _merit(run: TrainingRun, limits: Limits) -> tuple[bool, float]:
    """Return a key by which runs compare: in time and at what cost, or else how much is trained."""
    if math.isfinite(run.tokens) and _is_within(run, limits):
        return True, -_cost(run.wall_seconds, run.scenario, limits)
    return False, run.tokens_within(limits.seconds(run.scenario))


def _cost(wall_seconds: float, scenario: Scenario, limits: Limits) -> float:
    """Return what is to be small among the runs within the limits: time, or nodes times time."""
    return wall_seconds * (1 if limits.deadline_seconds is None else scenario.n_nodes)


def _merit_at_peak(search: Search, tokens: float, limits: Limits) -> tuple[bool, float]:
    """Return the merit of a run without failures whose GPUs compute at their peak."""
    scenario = search.scenario
    flops_per_s = _peak_flops_per_s(search) * scenario.job.n_gpus
    seconds_per_token = causal_flops(scenario, 1.0) / flops_per_s
    within = limits.seconds(scenario) / seconds_per_token
    if within < tokens:
        return False, within
    return True, -_cost(tokens * seconds_per_token, scenario, limits)


def _over_what_limits_buy(runs: Sequence[TrainingRun], limits: Limits) -> list[TrainingRun]:
    """Return the runs over the tokens that they train within the limits, without empty ones."""
    bought = [run.over(run.tokens_within(limits.seconds(run.scenario))) for run in runs]
    return [run for run in bought if run.tokens > 0]


def _too_little(limits: Limits) -> InputError:
    """Return the error that the limits end before the first step."""
    given = "--gpu-hours" if limits.node_hours is None else "--node-hours"
    if limits.deadline_seconds is not None:
        given += " and --deadline"
    return InputError(f"{given} end before the first step; allowed: larger ones")


def _never_ends(run: TrainingRun) -> InputError:
    """Return the error that failures leave a run no time to make progress."""
    failures = run.failures
    return InputError(
        f"a job on {run.scenario.job.n_gpus} GPUs fails every {failures.mtbf_seconds:.3g} s "
        f"and takes {failures.checkpoint_seconds:.3g} s to write a checkpoint and "
        f"{failures.restart_seconds:.3g} s to go on, so that it never ends; allowed: fewer "
        "--gpus, a longer --gpu-mtbf, a shorter --restart, a faster --storage"
    )


def _nothing_fits(search: Search, counts: Sequence[int], which: str = "") -> InputError:
    model = search.scenario.model
    return InputError(f"{model.name} has no layout that fits on {_span(counts)} GPUs{which}")


def _hint(search: Search, counts: Sequence[int]) -> str:
    """Return what else may let a run meet its deadline."""
    machine = search.scenario.machine
    nodes = machine.facility.n_nodes
    if nodes is not None and counts[-1] >= int(nodes.value) * machine.ranks_per_node:
        return f"machine '{machine.name}' has no more"
    return "a larger global batch may let more GPUs help"


def _span(counts: Sequence[int]) -> str:
    """Return the smallest and the largest count as text."""
    return str(counts[0]) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _counts_by(search: Search, tokens: float, deadline_seconds: float) -> list[int]:
    """Return the numbers of GPUs that are tried for a deadline, the smallest first."""
    peak = _peak_flops_per_s(search)
    most = _most_gpus(search)
    needed = causal_flops(search.scenario, tokens) / (peak * deadline_seconds)
    least = max(needed, search.scenario.machine.ranks_per_node)
    if least > most:
        raise InputError(
            f"--deadline: the run takes {least:.0f} GPUs even at their peak, and there are {most}; "
            "allowed: a later deadline"
        )
    return _counts(search, least, min(most, 64 * least), most)


def _counts_within(search: Search, limits: Limits) -> list[int]:
    """Return the numbers of GPUs that are tried for a budget, the largest first."""
    of_node = search.scenario.machine.ranks_per_node
    for_an_hour = math.floor(limits.budget_gpu_hours(of_node))
    most = max(min(_most_gpus(search), for_an_hour), of_node)
    return _counts(search, of_node, most, most)[::-1]


def _counts(search: Search, least: float, last: float, most: int) -> list[int]:
    """Return the counts in whole nodes from the least to the power of two after the last."""
    of_node = search.scenario.machine.ranks_per_node
    exponents = range(
        COUNTS_PER_DOUBLING * math.floor(math.log2(least / of_node)),
        COUNTS_PER_DOUBLING * math.ceil(math.log2(last / of_node)) + 1,
    )
    counts = []
    for exponent in exponents:
        whole, part = divmod(exponent, COUNTS_PER_DOUBLING)
        n_nodes, rest = divmod(2**whole * (COUNTS_PER_DOUBLING + part), COUNTS_PER_DOUBLING)
        count = n_nodes * of_node
        if not rest and least <= count <= most:
            counts.append(count)
    return counts


def _most_gpus(search: Search) -> int:
    """Return the number of GPUs of the machine, or of the largest search where it is unknown."""
    machine = search.scenario.machine
    if machine.facility.n_nodes is None:
        return LARGEST_GPU_COUNT
    return min(LARGEST_GPU_COUNT, int(machine.facility.n_nodes.value) * machine.ranks_per_node)


def _peak_flops_per_s(search: Search) -> float:
    """Return the peak of one GPU in the format of the job's products."""
    scenario = search.scenario
    return scenario.machine.peak_flops_per_s(scenario.job.product_format)
