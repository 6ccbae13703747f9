"""The figures of docs/learn.md: what runs teach, and trials until the best layout.

Run: python tests/benchmarks/learning_figures.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from lessons import (
    jobs_of,
    linear_lessons,
    llm_foundry_trials,
    n_random,
    n_until_best,
    order_without_model,
    proposed_order,
    published_trials,
)

from axonn_tune.reproduce import megatron, nanotron

N_DRAWS = 60
N_SEEDS = 5  # random starts of the optimisation without a model
# What a draw may be worse by, in points of a percent, and still count as no worse.
HARMLESS = 0.1


def studies():
    """Name, trials, number of runs, and the numbers of trials to learn from and to predict."""
    for name, trials in llm_foundry_trials().items():
        yield f"llm-foundry, {name}", trials, 5, None, None
    groups = published_trials("vtrain_a100_multi", megatron.vtrain)
    yield "vTrain", [trial for trials in groups.values() for trial in trials], 6, None, None
    groups = published_trials("nanotron_h100", nanotron.nanotron)
    trials = [t for name, group in groups.items() if "64 nodes" not in name for t in group]
    near = {
        trial.name
        for job in jobs_of({"": trials}).values()
        for trial in job
        if trial.measured_seconds <= 2.0 * min(t.measured_seconds for t in job)
    }
    of_near = [number for number, trial in enumerate(trials) if trial.name in near]
    small = [n for n, trial in enumerate(trials) if trial.prediction.scenario.n_nodes <= 4]
    yield "nanotron, near the best", trials, 8, small, of_near


def print_lessons():
    """Print what the usual number of runs and what two runs do, one line for each study."""
    print(
        "runs, before %, after %, inside %, worst change of a draw, draws that are worse %, "
        "median regret of jobs before % and after %"
    )
    for name, trials, usual, small, near in studies():
        for n_runs in (usual, 2):
            rows = 100.0 * linear_lessons(trials, n_runs, N_DRAWS, small, near)
            change = rows[:, 1] - rows[:, 0]
            before, after, inside, regret, regret_after = rows.mean(axis=0)
            worse = 100.0 * (change > HARMLESS).mean()
            print(
                f"{name}, {n_runs}: {before:.1f}, {after:.1f}, {inside:.0f}, "
                f"{change.max():+.1f}, {worse:.0f}, {regret:.1f}, {regret_after:.1f}"
            )


def print_trials():
    """Print the trials that orders of layouts need, over the jobs of nanotron."""
    jobs = jobs_of(published_trials("nanotron_h100", nanotron.nanotron)).values()
    counts = []
    for trials in (trials for trials in jobs if len(trials) > 1):
        by_profile = sorted(trials, key=lambda trial: trial.prediction.step_seconds)
        blind = [n_until_best(order_without_model(trials, s), trials) for s in range(N_SEEDS)]
        proposed = n_until_best(proposed_order(trials), trials)
        counts.append(
            (n_random(trials), np.mean(blind), n_until_best(by_profile, trials), proposed)
        )
    orders = ("random", "without a model", "by the profile", "next with learn")
    for name, column in zip(orders, np.transpose(counts), strict=True):
        print(f"{name}: median {np.median(column):.1f}, mean {column.mean():.1f} trials")


if __name__ == "__main__":
    print_lessons()
    print_trials()
