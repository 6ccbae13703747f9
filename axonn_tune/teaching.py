"""What a table of a user's own runs tells of a machine."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.api import DEFAULT_MACHINE
from axonn_tune.errors import InputError
from axonn_tune.io.files import FileName
from axonn_tune.io.presets import load_machine
from axonn_tune.learning.learn import Trial, learn
from axonn_tune.reproduce.score import JudgedRun
from axonn_tune.scoring import judged_runs
from axonn_tune.search.rank import Each
from axonn_tune.spec.machine import Machine

PROFILE_HEADER = "Learned by axonn-tune learn; see `learned` at the end."


def learn_from(table: FileName, machine: str | None = None, each: Each = iter) -> Machine:
    """Return the machine of a table's runs with what these tell of it.

    Parameters
    ----------
    table : path
        A table of runs, as `scoring.score` reads it.
    machine : str or None
        The machine of the rows that name none.

    Raises
    ------
    AxonnTuneError
        The table is wrong, or its runs are of several machines or engines.
    """
    given = load_machine(DEFAULT_MACHINE if machine is None else machine)
    judged = judged_runs(table, given, each)
    return learn(machine_of(judged), trials(judged), each)


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
            f"row {number}: {each.run.subject}", each.prediction, each.run.published["step_seconds"]
        )
        for number, each in enumerate(judged, start=1)
        if not each.ran_out
    ]
