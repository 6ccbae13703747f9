"""FSDP2 in NeMo AutoModel, for experts and for shared sequences; nothing is fitted to it."""

from dataclasses import replace

import numpy as np
import pytest
from reproduced import LOADERS, words_of_page

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_model
from axonn_tune.reproduce.automodel import automodel, with_neighbours
from axonn_tune.reproduce.results import predict_runs

PAGE = words_of_page("experts.md")
ALL = load_published("nemo_automodel")
ROWS = [row for row in ALL if int(row["expert"]) > 1]
MEASURED = np.array([float(row["step_seconds"]) for row in ROWS])


def predicted(rows=ROWS):
    """The predictions of steps."""
    runs = automodel(rows, LOADERS)
    return predict_runs(list(runs))


@pytest.fixture(scope="module")
def steps():
    return predicted()


def seconds(predictions):
    return np.array([prediction.step_seconds for prediction in predictions])


def test_every_step_is_met_as_the_page_says(steps):
    errors = np.abs(seconds(steps) / MEASURED - 1.0)
    assert len(steps) == 6
    assert errors.mean() < 0.11
    assert (round(100 * errors.min()), round(100 * errors.max())) == (6, 15)
    assert "are predicted with errors of 6 to 15 %" in PAGE


def test_what_ran_fits(steps):
    assert all(prediction.fits for prediction in steps)


def test_gathering_and_reducing_once_in_a_step_is_worth_what_was_measured(steps):
    of_qwen = [row["model"] == "qwen3-30b-a3b" for row in ROWS]
    once, always = seconds(steps)[of_qwen]
    measured_once, measured_always = MEASURED[of_qwen]
    assert always - once == pytest.approx(measured_always - measured_once, rel=0.3)


@pytest.mark.parametrize(
    ("model", "n_ranks", "n_reached"),
    [
        ("qwen3-30b-a3b", 8, 1.0),
        ("gpt-oss-20b", 8, 1.0),
        ("gpt-oss-120b", 64, 2.0),
        ("deepseek-v3", 64, 2.0),
        ("kimi-k2", 32, 4 / 3),
    ],
)
def test_tokens_with_neighbouring_experts_reach_few_ranks(model, n_ranks, n_reached):
    """Counted over the tokens of the stand-in for a router (layers.py, FakeBalancedGate)."""
    experts = with_neighbours(load_model(model)).experts
    of_rank = experts.n_experts // n_ranks
    chosen = np.arange(experts.n_experts * experts.top_k).reshape(-1, experts.top_k)
    reached = [len(set(choice)) for choice in chosen % experts.n_experts // of_rank]
    assert np.mean(reached) == pytest.approx(n_reached)
    assert experts.n_reached(n_ranks) == pytest.approx(n_reached)


def test_a_router_makes_the_same_layouts_slower(steps, monkeypatch):
    monkeypatch.setattr("axonn_tune.reproduce.automodel.with_neighbours", lambda model: model)
    longer = seconds(predicted()) / seconds(steps) - 1.0
    assert (round(100 * longer.min()), round(100 * longer.max())) == (7, 35)
    assert "take 7 to 35 % longer" in PAGE


def test_the_gate_changes_nothing_but_the_choice():
    model = load_model("deepseek-v3")
    experts = replace(model.experts, n_groups=32, top_groups=1)
    assert with_neighbours(model) == replace(model, experts=experts)


def test_two_ranks_that_share_a_sequence_are_met():
    [row] = [row for row in ALL if int(row["context"]) > 1]
    [step] = predicted([row])
    assert step.fits
    assert abs(step.step_seconds / float(row["step_seconds"]) - 1.0) < 0.08
