"""Rings that leave racks of GB200, of which all-reduces were published."""

import numpy as np
import pytest

from axonn_tune.cost.links import axis_links, ring_share
from axonn_tune.cost.prices import group_seconds
from axonn_tune.io.presets import load_machine

RING_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@pytest.mark.parametrize(("gibibytes", "milliseconds"), [(8, 45.004), (16, 84.625)])
def test_large_all_reduces_over_20_racks_take_what_was_measured(gibibytes, milliseconds):
    """NCCL 2.26.2 over 1,440 GB200 (coreweave/nccl-tests at f443305c)."""
    machine = load_machine("gb200-nvl72")
    seconds = group_seconds(machine, "all_reduce", 1, 20 * 72, gibibytes * 2.0**30)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.06)


@pytest.mark.parametrize(("name", "rack"), [("gb200-nvl72", 72), ("gb200-nvl72-64", 64)])
@pytest.mark.parametrize(("in_a_rack", "bus_bandwidth"), [(4, 196.9e9), (8, 393.7e9)])
def test_rings_through_few_gpus_of_a_rack_fill_their_adapters(name, rack, in_a_rack, bus_bandwidth):
    """16 GiB on rings over three racks, NCCL 2.27.3 (NVIDIA/nccl issue 1801)."""
    machine = load_machine(name)
    stride, size = np.array([rack // in_a_rack]), np.array([3 * in_a_rack])
    links = axis_links(machine, stride, size)
    for kind in RING_KINDS:
        assert links.kinds[kind].bandwidth_bytes_per_s == pytest.approx(bus_bandwidth)
    assert 0.95 < bus_bandwidth / (in_a_rack * 50e9) < 1.0


@pytest.mark.parametrize("name", ["gb200-nvl72", "gb200-nvl72-64"])
@pytest.mark.parametrize("kind", RING_KINDS)
def test_more_rings_of_a_rack_send_more_until_its_adapters_are_full(name, kind):
    link = load_machine(name).links[-1]
    n_rings = np.array([1, 2, 4, 8, 16, 32, 64])
    together = n_rings * ring_share(link, kind, n_rings)
    assert np.all(np.diff(together[:4]) > 0)
    assert together.max() <= link.bandwidth_bytes_per_s.value
    assert together[-2:] == pytest.approx([link.bandwidth_bytes_per_s.value] * 2, rel=0.03)
