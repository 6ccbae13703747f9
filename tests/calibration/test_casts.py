"""Casts are told from products by their sizes."""

from itertools import product

import numpy as np
import pytest

from axonn_tune.calibration.fit.casts import without_casts
from axonn_tune.errors import InputError
from axonn_tune.spec.points import GemmPoint

SIDES = (1024, 4096, 16384)
RATE, CAST, LAUNCH = 1400e12, 2e-12, 1e-5
# A memory in which five bytes of an element take longer than its cast here.
MEMORY = 2e12


def product_seconds(m, n, k):
    return 2 * m * n * k / RATE + m * n * 1e-12


def points(number_format, cast=CAST, launch=LAUNCH):
    return [
        GemmPoint(m, n, k, "NN", number_format, product_seconds(m, n, k) + cast * m * k + launch)
        for m, n, k in product(SIDES, SIDES, SIDES)
    ]


@pytest.mark.parametrize("number_format", ["fp8", "fp8_block", "nvfp4"])
def test_what_is_left_is_the_product(number_format):
    left = without_casts(points(number_format), MEMORY)
    assert left
    for point in left:
        assert point.seconds == pytest.approx(product_seconds(point.m, point.n, point.k), rel=1e-6)


def test_products_that_are_mostly_casts_are_left_out():
    left = {(p.m, p.n, p.k) for p in without_casts(points("fp8"), MEMORY)}
    whole = {
        sizes
        for sizes in product(SIDES, SIDES, SIDES)
        if product_seconds(*sizes) > CAST * sizes[0] * sizes[2] + LAUNCH
    }
    assert left == whole


def test_a_cast_takes_no_longer_than_two_reads_and_a_write():
    """Where a fit gives the operand more time than that, the product keeps the rest."""
    slow = points("fp8", cast=8e-12, launch=0.0)
    fast_memory = 1e12
    left = without_casts(slow, fast_memory)
    taken = {(p.m, p.n, p.k): p.seconds for p in slow}
    most = [5.0 * p.m * p.k / fast_memory for p in left]
    cast = [taken[p.m, p.n, p.k] - p.seconds for p in left]
    spare = np.array(cast) - np.array(most)
    assert left and np.ptp(spare) < 1e-9
    assert spare[0] >= 0.0


def test_wide_formats_have_no_casts():
    wide = points("bf16")
    assert without_casts(wide, MEMORY) == tuple(wide)


def test_a_few_products_do_not_tell():
    with pytest.raises(InputError, match="7 products in fp8; allowed: at least 8"):
        without_casts(points("fp8")[:7], MEMORY)
