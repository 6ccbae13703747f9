"""The published bandwidth law on real sockets: rings of an axis share the links that they cross."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from axonn_tune.cost.boundaries import rings_through_boundary
from axonn_tune.io.presets import load_cluster

pytest.importorskip("torch")
RINGS = Path(__file__).with_name("rings.py")
# Share of a link that data have: 1448 of 1514 bytes of each packet.
PAYLOAD = 1448 / 1514


def axes_of(n_ranks):
    """Every (product of faster axes, size) that an axis can have."""
    powers = [2**i for i in range(n_ranks.bit_length())]
    return [(s, n) for s in powers for n in powers[1:] if s * n <= n_ranks]


def by_law(cluster, stride, size):
    """The least share of a crossed level: its rate over min(U_l, s), arXiv 2502.08145."""
    shares = []
    for level in cluster.levels:
        rings = rings_through_boundary(np.array([stride]), np.array([size]), level.unit_ranks)
        if rings[0]:
            shares.append(level.bandwidth_bytes_per_s / rings[0])
    return min(shares)


@pytest.mark.sweep
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "kind"), [("frontier-mini", "all_gather"), ("perlmutter-mini", "all_reduce")]
)
def test_rings_share_the_links_that_they_cross(name, kind, emulation, capsys):
    cluster = load_cluster(name)
    axes = axes_of(cluster.n_ranks)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "axonn_tune.cli.main", "emulate", "--spec", name, "--"),
            *(sys.executable, str(RINGS), kind, json.dumps(axes)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    ratios = {}
    for (stride, size), measured in zip(axes, json.loads(done.stdout), strict=True):
        ratios[stride, size] = measured / (PAYLOAD * by_law(cluster, stride, size))
    with capsys.disabled():
        shown = ", ".join(f"{axis}: {ratio:.2f}" for axis, ratio in ratios.items())
        print(f"\n{name}, {kind}: measured over predicted by (stride, size): {shown}")
    # More than the law allows would be a mistake in it, as would half of it; a busy host gets less.
    assert all(0.7 < ratio < 1.05 for ratio in ratios.values())
    assert np.median(list(ratios.values())) > 0.8
