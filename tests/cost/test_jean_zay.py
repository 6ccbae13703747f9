"""The network of Jean Zay, of which a single ring was measured."""

import numpy as np
import pytest

from axonn_tune.cost.links import ring_share
from axonn_tune.io.presets import load_machine


def test_a_ring_takes_one_of_four_adapters_and_eight_rings_share_them():
    """An all-reduce of 4 GB over 32 GPUs took 1.529 s (bigscience at 358e3c8)."""
    link = load_machine("jean-zay").links[-1]
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "send_recv"):
        shares = ring_share(link, kind, np.array([1, 2, 4, 8]))
        assert 2 * 31 / 32 * 4e9 / shares[0] == pytest.approx(1.529, rel=2e-3)
        assert shares / shares[0] == pytest.approx([1.0, 1.0, 1.0, 0.5])
