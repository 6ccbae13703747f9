"""What a table of a user's own runs tells of a machine, and which layouts to try next."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.api.scoring import Say, judged_runs, unsaid
from axonn_tune.errors import InputError
from axonn_tune.io.files import FileName
from axonn_tune.io.kineto import load_trace
from axonn_tune.learning.choose import Proposals, next_layouts
from axonn_tune.learning.learn import Trial, learn
from axonn_tune.learning.watch import Drift, drift
from axonn_tune.reproduce.score import JudgedRun
from axonn_tune.search.rank import Each, rank_candidates
from axonn_tune.search.search import Search
from axonn_tune.spec.machine import Machine
from axonn_tune.step.predict import predict

# Number of the fastest layouts among which those to try are chosen; no other is likely the best.
_N_CANDIDATES = 16
PROFILE_HEADER = "Learned by axonn-tune learn; see `learned` at the end."


def learn_from(
    table: FileName, machine: str | None = None, each: Each = iter, say: Say = unsaid
) -> Machine:
    """Return the machine of a table's runs with what these tell of it.

    Parameters
    ----------
    table : path
        A table of runs, as `scoring.score` reads it.
    machine : str or None
        The machine of the rows that name none.
    say : callable
        What passes a remark on; see `scoring.score`.

    Raises
    ------
    AxonnTuneError
        The table is wrong, or its runs are of several machines or engines.
    """
    judged = judged_runs(table, machine, each, say)
    return learn(machine_of(judged), trials(judged), each)


def watch(
    table: FileName,
    baseline: FileName,
    machine: str | None = None,
    each: Each = iter,
    say: Say = unsaid,
) -> Drift:
    """Return how the runs of a table changed since those of another one.

    Parameters
    ----------
    table, baseline : paths
        Tables of runs, as `scoring.score` reads them.
    machine : str or None
        The machine of the rows that name none.
    say : callable
        What passes a remark on; see `scoring.score`.

    Raises
    ------
    AxonnTuneError
        A table is wrong, or has no run that ran.
    """
    earlier, now = (trials(judged_runs(name, machine, each, say)) for name in (baseline, table))
    for name, runs in ((baseline, earlier), (table, now)):
        if not runs:
            raise InputError(f"{name}: no run ran; allowed: a table with runs of status ok")
    return drift(earlier, now)


def machine_of(judged: Sequence[JudgedRun]) -> Machine:
    """Return the one machine of all runs of a table."""
    machine, *others = (run.prediction.scenario.machine for run in judged)
    for number, other in enumerate(others, start=2):
        if other != machine:
            raise InputError(
                f"row {number} ran on {other.name}, row 1 on {machine.name}; allowed: runs on one "
                "machine"
            )
    return machine


def trials(judged: Sequence[JudgedRun]) -> list[Trial]:
    """Return the runs of a table that ran, named by their rows."""
    return [
        Trial(
            f"row {number}: {each.run.subject}",
            each.prediction,
            each.run.published["step_seconds"],
            load_trace(each.trace) if each.trace else None,
        )
        for number, each in enumerate(judged, start=1)
        if not each.ran_out
    ]


def propose(search: Search, table: FileName | None, budget: int, each: Each = iter) -> Proposals:
    """Return the layouts of a search to try next, given a table of runs if there is one.

    Parameters
    ----------
    search : Search
        The job, and the machine on which the runs ran.
    table : path or None
        A table of runs of the search's engine, of this job or of others.
    budget : int
        Number of layouts wanted.

    Raises
    ------
    AxonnTuneError
        The table is wrong, its runs are of another machine or engine, or all layouts were tried.
    """
    machine = search.scenario.machine
    judged = [] if table is None else judged_runs(table, machine, each)
    _check_alike(search, judged)
    timed = trials(judged)
    learnt = learn(machine, timed, each) if timed else machine
    ranking = rank_candidates(search.on(learnt))
    of_job = [run for run in judged if _is_of_job(run, ranking.search)]
    configurations = {run.prediction.configuration for run in of_job}
    n_rows = min(len(ranking), _N_CANDIDATES + len(configurations))
    candidates = [
        candidate
        for candidate in map(ranking.prediction, range(n_rows))
        if candidate.configuration not in configurations
    ]
    if not candidates:
        raise InputError(f"all {len(ranking)} layouts of this job were tried; allowed: another job")
    measured = [run for run in of_job if not run.ran_out]
    tried = [predict(ranking.search.scenario, run.prediction.configuration) for run in measured]
    seconds = [run.run.published["step_seconds"] for run in measured]
    chosen = next_layouts(candidates, tried, seconds, budget)
    return Proposals(learnt, len(of_job), min(seconds, default=None), tuple(chosen))


def _check_alike(search: Search, judged: Sequence[JudgedRun]) -> None:
    """Refuse runs of another engine or on another machine than those of a search."""
    scenario = search.scenario
    for number, run in enumerate(judged, start=1):
        own = run.prediction.scenario
        if own.strategy.engine.title != scenario.strategy.engine.title:
            raise InputError(
                f"row {number} is of engine {own.strategy.engine.title or 'none'}, the search of "
                f"{scenario.strategy.engine.title or 'none'}; allowed: the same --strategy and "
                "--engine as those of the runs"
            )
        if own.machine != scenario.machine:
            raise InputError(
                f"row {number} ran on {own.machine.name}; allowed: --machine {own.machine.name}"
            )


def _is_of_job(run: JudgedRun, search: Search) -> bool:
    """Return whether a run is of the model and the job of a search."""
    own = run.prediction.scenario
    return own.model == search.scenario.model and own.job == search.scenario.job
