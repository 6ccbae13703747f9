"""Spearman's rank correlation, as scipy finds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from axonn_tune.correlation import rank_correlation

# Few values, so that many are equal and share their ranks.
VALUES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=20)


@given(VALUES)
def test_it_is_scipys_unless_all_values_of_a_side_are_equal(pairs):
    first, second = zip(*pairs, strict=True)
    found = rank_correlation(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
