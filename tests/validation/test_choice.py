"""Which configurations a validation runs."""

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.search.rank import rank_candidates
from axonn_tune.validation.choice import choose, choose_grids


def ranking():
    return rank_candidates(build_search("tiny", 8, "dgx-a100", global_batch=8))


def test_choices_of_configurations():
    ranked = ranking()
    everything = choose(ranked, "all")
    assert len(everything) == len(ranked) == 20
    assert [p.place for p in choose(ranked, "top:3")] == [1, 2, 3]
    assert [p.place for p in choose(ranked, "spread:3")] == [1, 11, 20]
    assert [p.place for p in choose(ranked, "spread:1")] == [1]
    assert choose(ranked, "spread:99") == everything
    for wrong in ("some", "top:0", "top:", "spread:-1"):
        with pytest.raises(InputError, match="allowed: all, top:N or spread:N"):
            choose(ranked, wrong)


def test_explicit_grids_come_with_the_suggestion():
    ranked = ranking()
    best, worst = ranked.prediction(0), ranked.prediction(19)
    assert [p.place for p in choose_grids(ranked, [str(worst.layout)])] == [1, 20]
    assert [p.place for p in choose_grids(ranked, [str(best.layout)])] == [1]
    with pytest.raises(InputError, match="3x1x1x1 is not among the 20"):
        choose_grids(ranked, ["3x1x1x1"])
