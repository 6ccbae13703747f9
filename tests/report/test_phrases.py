"""Numbers in sentences and tables."""

import pytest

from axonn_tune.report.phrases import signed_percent


@pytest.mark.parametrize(
    ("fraction", "text"), [(-1e-9, "+0.0"), (-4e-4, "+0.0"), (-6e-4, "-0.1"), (0.1234, "+12.3")]
)
def test_no_minus_stands_before_a_zero(fraction, text):
    assert signed_percent(fraction) == text
