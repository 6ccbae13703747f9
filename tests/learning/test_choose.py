"""Layouts to try next: the likely best, what runs have shown of its like, and what a try saves."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.learning import choose
from axonn_tune.learning.choose import next_layouts
from axonn_tune.search.rank import rank_candidates


@pytest.fixture(scope="module")
def candidates():
    """The six best layouts of a job, the fastest first."""
    search = build_search(
        "llama3-8b",
        16,
        "dgx-h100",
        strategy="megatron",
        engine="megatron-core",
        global_batch=64,
        recompute="none",
    )
    ranking = rank_candidates(search)
    return [ranking.prediction(row) for row in range(6)]


def test_without_runs_the_first_is_predicted_best_and_the_next_differs(candidates):
    proposals = next_layouts(candidates, [], [], 3)
    assert proposals[0].prediction is candidates[0]
    assert proposals[0].gain_fraction is None
    layouts = {proposal.prediction.layout for proposal in proposals}
    assert len(layouts) == 3
    assert proposals[1].gain_fraction >= proposals[2].gain_fraction > 0.0


def test_what_one_try_saves_is_the_expected_value_of_a_log_normal_time(candidates):
    """E[max(1 - t / best, 0)] = N(a) - exp(mean + variance / 2) / best N(a - deviation)."""
    tried, candidate = candidates[:2]
    best = 0.97 * tried.step_seconds
    (proposal,) = next_layouts([candidate], [tried], [best], 1)
    mean, variance = choose._given_runs([candidate], [tried], np.log([best]))
    deviation = float(np.sqrt(variance[0, 0]))
    a = (np.log(best) - mean[0]) / deviation
    below = NormalDist().cdf
    expected = below(a) - np.exp(mean[0] + deviation**2 / 2) / best * below(a - deviation)
    assert proposal.gain_fraction == pytest.approx(expected, rel=0.2)  # It is drawn in the tail.
    assert proposal.p_best == pytest.approx(below(a), abs=0.03)


def test_a_run_slower_than_predicted_slows_its_like_most(candidates, monkeypatch):
    """The numbers of the profile, which all share, are taken to be certain."""
    monkeypatch.setattr(choose, "deviations", lambda *_: (np.zeros((1, 1)), np.full(1, 0.1)))
    tried, *others = candidates
    as_predicted, slower = (
        choose._given_runs(others, [tried], np.log([factor * tried.step_seconds]))[0]
        for factor in (1.0, 1.3)
    )
    moved = slower - as_predicted
    assert (moved > 0).all() and (moved < np.log(1.3)).all()
    doublings = choose._doublings(candidates)[0, 1:]
    assert moved[doublings.argmin()] > moved[doublings.argmax()]


def test_a_layout_measured_much_faster_leaves_nothing_to_gain(candidates):
    tried, *others = candidates
    proposals = next_layouts(others, [tried], [0.2 * tried.step_seconds], 2)
    assert max(proposal.gain_fraction for proposal in proposals) < 0.05


def test_a_layout_is_no_doubling_away_from_itself_and_others_are(candidates):
    doublings = choose._doublings(candidates)
    assert (np.diag(doublings) == 0.0).all()
    assert (doublings + np.eye(len(candidates)) > 0.0).all()
    twice = replace(
        candidates[0],
        configuration=replace(candidates[0].configuration, micro_batch=8),
    )
    own = candidates[0].configuration.micro_batch
    assert choose._doublings([candidates[0], twice])[0, 1] == pytest.approx(np.log2(8 / own))
