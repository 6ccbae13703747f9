"""What learning from a few published runs does for the prediction of the others.

docs/learn.md has the same figures of more draws and of all jobs, which take minutes.
"""

import numpy as np
import pytest
from lessons import (
    jobs_of,
    lessons,
    llm_foundry_trials,
    n_random,
    n_until_best,
    order_without_model,
    proposed_order,
    published_trials,
)

from axonn_tune.reproduce import megatron, nanotron

pytestmark = pytest.mark.sweep
# Held-out runs that are predicted in each draw.
N_OTHERS = 10


@pytest.fixture(scope="module")
def llm_foundry():
    return llm_foundry_trials()


@pytest.fixture(scope="module")
def vtrain():
    """Runs on several nodes, some of which were slow for a reason that no other run shares."""
    groups = published_trials("vtrain_a100_multi", megatron.vtrain)
    return {"vTrain": [trial for trials in groups.values() for trial in trials]}


def test_five_runs_make_a_known_engine_of_a_generic_one(llm_foundry):
    """The error is 8.8 to 17.2 % before, and the bar is 6 % after."""
    results = [
        lessons(trials, 5, 1, most_others=N_OTHERS).mean(axis=0) for trials in llm_foundry.values()
    ]
    before, after, within = np.mean(results, axis=0)
    assert after < min(0.06, 0.6 * before)
    assert within > 0.85


def test_six_runs_do_no_harm_where_errors_are_those_of_single_runs(vtrain):
    for trials in vtrain.values():
        before, after, within = lessons(trials, 6, 1, most_others=N_OTHERS).mean(axis=0)
        assert after < before + 0.01
        assert within >= 0.7


@pytest.mark.parametrize("source", ["llm-foundry", "vTrain"])
def test_two_runs_never_make_it_worse_than_none(source, llm_foundry, vtrain):
    groups = llm_foundry if source == "llm-foundry" else vtrain
    for trials in groups.values():
        before, after, _ = lessons(trials, 2, 2, most_others=N_OTHERS, seed=1).T
        assert (after < before + 0.002).all()


def is_of_a_small_job(run):
    """Whether a run is of the 1B model on 2 or 4 nodes: these jobs have 59 and 68 layouts."""
    is_of_the_model = run.group == "1B, up to 16 nodes"
    return is_of_the_model and run.search.scenario.job.n_gpus in (16, 32)


def test_the_best_layout_is_found_in_few_trials():
    groups = published_trials("nanotron_h100", nanotron.nanotron, None, is_of_a_small_job)
    jobs = [trials for trials in jobs_of(groups).values() if len(trials) > 1]
    counts = np.array(
        [
            (
                n_random(trials),
                np.mean([n_until_best(order_without_model(trials, s), trials) for s in range(3)]),
                n_until_best(proposed_order(trials), trials),
            )
            for trials in jobs
        ]
    )
    assert len(jobs) == 2
    by_chance, without_model, proposed = counts.mean(axis=0)
    assert proposed <= 3.0 < without_model < by_chance
