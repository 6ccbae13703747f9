"""Published runs of which some are learned from and the others predicted."""

from dataclasses import replace
from functools import cache

import numpy as np

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.learning.learn import Trial, learn
from axonn_tune.reproduce.results import predict_run
from axonn_tune.reproduce.runs import Loaders
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.spread import NORMAL_90, deviations, spread

# Held-out runs of which an interval is made in each draw.
N_INTERVALS = 24


@cache
def published_trials(table, rows_of, engine=None):
    """Trials of a published table by group; `engine` takes the place of the one that is known."""
    loaders = Loaders(load_model, load_machine, lambda name: load_engine(engine or name))
    groups = {}
    for number, run in enumerate(rows_of(load_published(table), loaders), start=1):
        trial = Trial(f"row {number}", predict_run(run), run.published["step_seconds"])
        groups.setdefault(run.group, []).append(trial)
    return groups


def machine_of(trial):
    return trial.prediction.scenario.machine


def errors_on(machine, trials):
    """Predicted over measured steps, minus one."""
    return np.array([t.seconds_on(machine) / t.measured_seconds - 1.0 for t in trials])


def is_within(machine, trial):
    """Whether the measured step is inside the interval of its prediction."""
    scenario = replace(trial.prediction.scenario, machine=machine)
    table = candidate_table(scenario, trial.prediction.configuration)
    width = NORMAL_90 * spread(scenario, *deviations(scenario, table))[0]
    return abs(np.log(trial.seconds_on(machine) / trial.measured_seconds)) <= width


def lessons(trials, n_runs, n_draws, others_of=None, seed=0):
    """Mean errors before and after, and the share inside the interval, one row for each draw.

    `others_of` returns what is predicted; without it, all runs that are not learned from.
    """
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(n_draws):
        order = random.permutation(len(trials))
        chosen = [trials[i] for i in order[:n_runs]]
        names = {trial.name for trial in chosen}
        pool = trials if others_of is None else others_of
        others = [trial for trial in pool if trial.name not in names]
        before = machine_of(trials[0])
        after = learn(before, chosen)
        judged = [others[i] for i in random.permutation(len(others))[:N_INTERVALS]]
        rows.append(
            (
                np.abs(errors_on(before, others)).mean(),
                np.abs(errors_on(after, others)).mean(),
                np.mean([is_within(after, trial) for trial in judged]),
            )
        )
    return np.array(rows)
