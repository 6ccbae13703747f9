"""The score of a table of runs: the errors of their steps, and what was predicted of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tune.reproduce.results import predict_run
from axonn_tune.reproduce.runs import Run
from axonn_tune.reproduce.steps import TimedRun, time_runs
from axonn_tune.search.rank import Each
from axonn_tune.units import gib


@dataclass(frozen=True)
class MemoryVerdicts:
    """What was predicted of the memory of runs that ran, and of runs that ran out of it.

    n_right_ok, n_wrong_oom
        Numbers of runs that ran: those that fit, and those that were predicted not to.
    n_right_oom, n_wrong_ok
        Numbers of runs that ran out of memory: those that do not fit, and those that were predicted
        to.
    errors
        Predicted over measured memory, minus one, of the runs that state it.
    """

    n_right_ok: int
    n_wrong_oom: int
    n_right_oom: int
    n_wrong_ok: int
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    """The predicted steps of a table's runs beside the measured ones, and what fits in memory."""

    timed: tuple[TimedRun, ...]
    memory: MemoryVerdicts


def score_runs(runs: Sequence[Run], ran_out: Sequence[bool], each: Each = iter) -> Score:
    """Predict runs; those that ran out of memory have no step.

    Parameters
    ----------
    ran_out : sequence of bool
        Whether each run ran out of memory.
    """
    ran = [run for run, is_oom in zip(runs, ran_out, strict=True) if not is_oom]
    timed = tuple(time_runs(ran, each)) if ran else ()
    return Score(timed, _memory(runs, ran_out))


def _memory(runs: Sequence[Run], ran_out: Sequence[bool]) -> MemoryVerdicts:
    """Return what was predicted of the memory of all runs."""
    counts = {(is_oom, fits): 0 for is_oom in (False, True) for fits in (False, True)}
    errors = []
    for run, is_oom in zip(runs, ran_out, strict=True):
        prediction = predict_run(run)
        assert prediction is not None, "searches of measured runs include what does not fit"
        counts[is_oom, prediction.fits] += 1
        if "memory_gib" in run.published:
            errors.append(gib(prediction.memory_bytes) / run.published["memory_gib"] - 1.0)
    return MemoryVerdicts(
        n_right_ok=counts[False, True],
        n_wrong_oom=counts[False, False],
        n_right_oom=counts[True, False],
        n_wrong_ok=counts[True, True],
        errors=tuple(errors),
    )
