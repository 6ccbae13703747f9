"""Copies between GPU and host, and passes of the host's cores over its memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import machine_of, with_host

from axonn_tune.cost.host import copy_seconds, update_seconds
from axonn_tune.io.presets import load_machine

RATES = st.floats(1e9, 1e12)


@pytest.mark.parametrize(
    ("billions", "seconds"), [(1, 0.22), (2, 0.51), (4, 1.03), (8, 2.41), (10, 2.57)]
)
def test_the_measured_cpu_adam_of_zero_offload(billions, seconds):
    """Table 4 of arXiv 2101.06840: its rates differ among themselves by up to a third."""
    predicted = update_seconds(30.0 * billions * 1e9, load_machine("dgx2-1ib"), 1)
    assert predicted == pytest.approx(seconds, rel=0.17)


@given(RATES, RATES, st.integers(1, 16), st.floats(1.0, 1e12))
def test_neither_the_link_nor_the_shared_memory_is_exceeded(link, bandwidth, n_sharing, nbytes):
    machine = with_host(machine_of(), link=link, bandwidth=bandwidth)
    seconds = float(copy_seconds(nbytes, machine, n_sharing))
    assert seconds * link >= nbytes * (1 - 1e-12)
    assert seconds * bandwidth >= n_sharing * nbytes * (1 - 1e-12)
    assert seconds == pytest.approx(max(nbytes / link, n_sharing * nbytes / bandwidth))


@given(RATES, st.floats(0.1, 1.0), st.integers(1, 16))
def test_cores_share_what_they_reach_of_the_memory_s_bandwidth(bandwidth, fraction, n_sharing):
    machine = with_host(machine_of(), bandwidth=bandwidth, fraction=fraction)
    alone, shared = (float(update_seconds(1e9, machine, n)) for n in (1, n_sharing))
    assert alone == pytest.approx(1e9 / (bandwidth * fraction))
    assert shared == pytest.approx(n_sharing * alone)
