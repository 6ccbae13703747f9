"""What the validation page says of vTrain's steps follows from its table."""

import numpy as np
import pytest

from axonn_tune.io.package_data import load_published


def layer_seconds(micro_batch):
    """The time of a layer of hidden size 2048 and a micro-batch on one rank, without the rest.

    A step is linear in the layers of all micro-batches, in the micro-batches, and in the layers.
    """
    rows = [
        {name: float(cell) for name, cell in row.items()}
        for row in load_published("vtrain_a100_single")
    ]
    wanted = (2048, 1, 1, micro_batch)
    names = ("hidden", "tensor", "pipeline", "micro_batch")
    alike = [row for row in rows if tuple(row[name] for name in names) == wanted]
    n_micro = np.array([r["global_batch"] / r["data"] / r["micro_batch"] for r in alike])
    layers = np.array([row["layers"] for row in alike])
    seconds = np.array([1e-3 * row["step_milliseconds"] for row in alike])
    terms = np.stack([n_micro * layers, n_micro, layers], axis=1) / seconds[:, None]
    found, *_ = np.linalg.lstsq(terms, np.ones(len(alike)), rcond=None)
    assert np.abs(terms @ found - 1.0).max() < 0.01
    return found[0]


def test_steps_on_one_node_grow_too_little_for_recomputation():
    per_sequence = (layer_seconds(4) - layer_seconds(2)) / 2.0
    assert per_sequence == pytest.approx(2.0e-3, rel=0.02)
    tokens, hidden = 1024, 2048
    forward_flops = 24 * tokens * hidden**2 + 4 * tokens**2 * hidden
    assert 3 * forward_flops / per_sequence == pytest.approx(168e12, rel=0.02)
    assert 4 * forward_flops / per_sequence == pytest.approx(225e12, rel=0.02)
