"""Published runs of which some are learned from and the others predicted."""

from dataclasses import replace
from functools import cache

import numpy as np
from scipy.stats import norm

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.learning.choose import LIKENESS_DOUBLINGS, _doublings, next_layouts
from axonn_tune.learning.fit import fitted
from axonn_tune.learning.learn import LEAST_GAIN, Trial, _linearised, learn, stated_spreads
from axonn_tune.reproduce import fsdp
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.reproduce.runs import Loaders
from axonn_tune.spec.normal import NORMAL_90
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.spread import MODEL_ERROR, deviations, spread, student_95

# Held-out runs of which an interval is made in each draw, at most.
N_INTERVALS = 24


@cache
def published_trials(table, rows_of, engine=None, wanted=None):
    """Trials of a published table by group, of all runs or of those that are wanted.

    `engine` takes the place of the one that is known.
    """
    loaders = Loaders(load_model, load_machine, lambda name: load_engine(engine or name))
    groups = {}
    numbered = [
        (number, run)
        for number, run in enumerate(rows_of(load_published(table), loaders), start=1)
        if wanted is None or wanted(run)
    ]
    predictions = predict_runs([run for _, run in numbered])
    for (number, run), prediction in zip(numbered, predictions, strict=True):
        trial = Trial(f"row {number}", prediction, run.published["step_seconds"])
        groups.setdefault(run.group, []).append(trial)
    return groups


def machine_of(trial):
    return trial.prediction.scenario.machine


def llm_foundry_trials():
    """Runs of an engine of 2023 that are predicted as FSDP2 of today, by machine."""
    machines = {}
    for trials in published_trials("llm_foundry", fsdp.llm_foundry, "fsdp2-eager").values():
        for trial in trials:
            machines.setdefault(machine_of(trial).name, []).append(trial)
    return machines


def stated_errors(trials):
    """Predicted over measured steps, minus one, on the machine that shall learn."""
    return np.array([t.prediction.step_seconds / t.measured_seconds - 1.0 for t in trials])


def errors_on(machine, trials):
    """The same on another machine."""
    return np.array([t.seconds_on(machine) / t.measured_seconds - 1.0 for t in trials])


def is_within(machine, trial):
    """Whether the measured step is inside the interval of its prediction."""
    scenario = replace(trial.prediction.scenario, machine=machine)
    table = candidate_table(scenario, trial.prediction.configuration)
    width = NORMAL_90 * spread(scenario, *deviations(scenario, table))[0]
    return abs(np.log(trial.seconds_on(machine) / trial.measured_seconds)) <= width


def lessons(trials, n_runs, n_draws, others_of=None, seed=0, most_others=None):
    """Mean errors before and after, and the share inside the interval, one row for each draw.

    `others_of` is what is predicted; without it, all runs that are not learned from. Of more than
    `most_others` of them a random choice is predicted.
    """
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(n_draws):
        order = random.permutation(len(trials))
        chosen = [trials[i] for i in order[:n_runs]]
        names = {trial.name for trial in chosen}
        pool = trials if others_of is None else others_of
        others = [trial for trial in pool if trial.name not in names]
        others = [others[i] for i in random.permutation(len(others))[:most_others]]
        after = learn(machine_of(trials[0]), chosen)
        rows.append(
            (
                np.abs(stated_errors(others)).mean(),
                np.abs(errors_on(after, others)).mean(),
                np.mean([is_within(after, trial) for trial in others[:N_INTERVALS]]),
            )
        )
    return np.array(rows)


def linear_lessons(trials, n_runs, n_draws, learned_of=None, others_of=None, seed=0):
    """The same as `lessons` for many draws: steps are linear in the logarithms of the factors.

    Each row ends with the median regret of the jobs, before and after. The trials share one machine
    and one engine. `learned_of` and `others_of` hold the numbers of the trials that are learned
    from and of those that are predicted; without them, all are.
    """
    machine = machine_of(trials[0])
    spreads = stated_spreads(machine, trials[0].prediction.scenario.strategy.engine)
    predicted, slopes = _linearised(machine, trials, np.ones(spreads.size, dtype=bool), iter)
    measured = np.log([trial.measured_seconds for trial in trials])
    errors = measured - predicted
    number_of = {trial.name: number for number, trial in enumerate(trials)}
    jobs = [[number_of[trial.name] for trial in job] for job in jobs_of({"": trials}).values()]
    stated_regret = median_regret(jobs, predicted, measured)
    random = np.random.default_rng(seed)
    everything = np.arange(len(trials))
    known = everything if learned_of is None else np.array(learned_of)
    pool = everything if others_of is None else np.array(others_of)
    rows = []
    for _ in range(n_draws):
        chosen = random.permutation(known)[:n_runs]
        others = np.setdiff1d(pool, chosen)
        fit = fitted(slopes[chosen], errors[chosen], spreads)
        is_told = np.sqrt(np.diag(fit.covariance)) < (1.0 - LEAST_GAIN) * spreads
        fit = fitted(slopes[chosen] * is_told, errors[chosen], spreads)
        own = slopes[others]
        left = errors[others] - own @ fit.log_factors
        of_numbers = np.sqrt(((own @ fit.covariance) * own).sum(axis=1) + MODEL_ERROR**2)
        of_scatter = fit.scatter * student_95(fit.freedom) / NORMAL_90
        rows.append(
            (
                np.abs(np.expm1(-errors[others])).mean(),
                np.abs(np.expm1(-left)).mean(),
                (np.abs(left) <= NORMAL_90 * np.maximum(of_numbers, of_scatter)).mean(),
                stated_regret,
                median_regret(jobs, predicted + slopes @ fit.log_factors, measured),
            )
        )
    return np.array(rows)


def jobs_of(groups):
    """Trials by what was trained on how many GPUs; the layouts of a job are alternatives."""
    jobs = {}
    for trial in (trial for trials in groups.values() for trial in trials):
        scenario = trial.prediction.scenario
        key = (scenario.model.name, scenario.job.n_gpus, scenario.job.global_batch)
        jobs.setdefault(key, []).append(trial)
    return jobs


def median_regret(jobs, log_predicted, log_measured):
    """How much slower than the fastest the layout is that is predicted to be the fastest.

    It is the median over the jobs that have a choice; each job is a list of numbers of trials.
    """
    return np.median(
        [
            np.expm1(log_measured[job][log_predicted[job].argmin()] - log_measured[job].min())
            for job in jobs
            if len(job) > 1
        ]
    )


def n_until_best(ordered, trials):
    """Number of trials of an order until one is within 1 % of the best of all."""
    best = min(trial.measured_seconds for trial in trials)
    return next(n for n, t in enumerate(ordered, start=1) if t.measured_seconds <= 1.01 * best)


def n_random(trials):
    """The expected number in random order: with m good ones of n it is (n + 1) / (m + 1)."""
    best = min(trial.measured_seconds for trial in trials)
    n_good = sum(trial.measured_seconds <= 1.01 * best for trial in trials)
    return (len(trials) + 1) / (n_good + 1)


def proposed_order(trials, n_candidates=12):
    """The trials in the order of rounds of `learn` and of one proposal each, until the best."""
    before = machine_of(trials[0])
    best = min(trial.measured_seconds for trial in trials)
    tried, left = [], list(trials)
    while not tried or tried[-1].measured_seconds > 1.01 * best:
        machine = learn(before, tried) if tried else before
        fastest = sorted(left, key=lambda trial: trial.seconds_on(machine))[:n_candidates]
        candidates = [on_machine(trial, machine) for trial in fastest]
        seconds = [trial.measured_seconds for trial in tried]
        known = [on_machine(trial, machine) for trial in tried]
        (proposal,) = next_layouts(candidates, known, seconds, 1)
        chosen = fastest[[c is proposal.prediction for c in candidates].index(True)]
        tried.append(chosen)
        left.remove(chosen)
    return tried


def on_machine(trial, machine):
    """The prediction of a trial on another machine."""
    scenario = replace(trial.prediction.scenario, machine=machine)
    return replace(trial.prediction, scenario=scenario, step_seconds=trial.seconds_on(machine))


def order_without_model(trials, seed=0):
    """Bayesian optimisation that knows sizes alone: a random start, then expected improvement."""
    logs = np.log([trial.measured_seconds for trial in trials])
    distance = _doublings([trial.prediction for trial in trials])
    alike = np.exp(-distance / LIKENESS_DOUBLINGS)
    random = np.random.default_rng(seed)
    tried = [int(random.integers(len(trials)))]
    while logs[tried[-1]] > logs.min() + np.log(1.01):
        known = logs[tried]
        middle, width = known.mean(), max(known.std(), 0.3)
        inverse = np.linalg.inv(alike[np.ix_(tried, tried)] + 1e-3 * np.eye(len(tried)))
        pull = alike[:, tried] @ inverse
        mean = middle + pull @ (known - middle)
        deviation = width * np.sqrt(np.maximum(1.0 - (pull * alike[:, tried]).sum(axis=1), 1e-9))
        z = (known.min() - mean) / deviation
        gain = deviation * (z * norm.cdf(z) + norm.pdf(z))
        gain[tried] = -1.0
        tried.append(int(gain.argmax()))
    return [trials[i] for i in tried]
