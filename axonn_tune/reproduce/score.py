"""The score of a table of runs: the errors of their steps, and what was predicted of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from axonn_tune.reproduce.results import relative_error
from axonn_tune.reproduce.runs import Run
from axonn_tune.reproduce.steps import TimedRun, beside_baseline
from axonn_tune.step.prediction import Prediction

# What an allocator was measured to hold: of the fullest GPU, or of one in the first stage.
_HELD = ("memory_gib", "allocated_gib", "first_stage_gib")


@dataclass(frozen=True)
class MemoryVerdicts:
    """What was predicted of the memory of runs that ran, and of runs that ran out of it.

    n_right_ok, n_wrong_oom
        Numbers of runs that ran: those that fit, and those that were predicted not to.
    n_right_oom, n_wrong_ok
        Numbers of runs that ran out of memory: those that do not fit, and those that were predicted
        to.
    errors
        Predicted over measured memory, minus one, of the runs that state what the allocator held.
    """

    n_right_ok: int
    n_wrong_oom: int
    n_right_oom: int
    n_wrong_ok: int
    errors: tuple[float, ...]


@dataclass(frozen=True)
class JudgedRun:
    """A run of a table and its prediction.

    ran_out
        Whether the run itself ran out of memory.
    trace
        File with the trace of a rank by torch's profiler; empty if there is none.
    """

    run: Run
    prediction: Prediction
    ran_out: bool = False
    trace: str = ""


@dataclass(frozen=True)
class Score:
    """The predicted steps of a table's runs beside the measured ones, and what fits in memory.

    timed
        Steps of the runs that did not run out of memory.
    memory
        What was predicted of the memory of all runs.
    judged
        All runs in the order of the table.
    """

    timed: tuple[TimedRun, ...]
    memory: MemoryVerdicts
    judged: tuple[JudgedRun, ...] = ()

    def __repr__(self) -> str:
        """Return the numbers of runs and their mean error: a notebook shows this."""
        mean = "None" if self.mean_error is None else f"{self.mean_error:.3f}"
        return (
            f"Score(mean_error={mean}, {len(self.timed)} steps in .timed, "
            f"{len(self.judged)} runs in .judged)"
        )

    @property
    def mean_error(self) -> float | None:
        """The mean of the absolute errors of all timed steps; None if there are none."""
        return fmean(abs(timed.error) for timed in self.timed) if self.timed else None


def score_of(judged: Sequence[JudgedRun]) -> Score:
    """Return the score of some runs; those that ran out of memory have no step."""
    ran = [(each.run, each.prediction) for each in judged if not each.ran_out]
    timed = tuple(beside_baseline(ran)) if ran else ()
    return Score(timed, memory_verdicts(judged), tuple(judged))


def memory_verdicts(judged: Sequence[JudgedRun]) -> MemoryVerdicts:
    """Return what was predicted of the memory of all runs."""
    counts = Counter((each.ran_out, each.prediction.fits) for each in judged)
    return MemoryVerdicts(
        n_right_ok=counts[False, True],
        n_wrong_oom=counts[False, False],
        n_right_oom=counts[True, False],
        n_wrong_ok=counts[True, True],
        errors=tuple(
            relative_error(each.run, metric, each.prediction)
            for each in judged
            for metric in _HELD
            if metric in each.run.published
        ),
    )
