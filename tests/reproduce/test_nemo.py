"""Llama 405B as NVIDIA's benchmarks of NeMo measured it on H100."""

import numpy as np
import pytest
from reproduced import LOADERS

from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.nemo import nemo
from axonn_tune.reproduce.results import predict_runs


@pytest.mark.parametrize("precision", ["bf16", "fp8-delayed"])
def test_405b_is_met_in_both_precisions(precision):
    all_rows = load_published("dgxc_h100")
    rows = [r for r in all_rows if (r["model"], r["precision"]) == ("llama3-405b", precision)]
    runs = list(nemo(rows, LOADERS))
    errors = [
        p.step_seconds / float(row["step_seconds"]) - 1.0
        for row, p in zip(rows, predict_runs(runs), strict=True)
    ]
    assert len(errors) == 24
    assert np.mean(np.abs(errors)) < 0.035


def test_proxies_have_the_vocabulary_that_was_trained():
    """GPT-2's 50,257 words stood for Llama's 128,256 until the recipes of NeMo 2."""
    for row in load_published("dgxc_h100"):
        is_proxy = row["model"] == "llama3-405b" and row["tag"] != "v25.04"
        assert row["vocabulary"] == ("51200" if is_proxy else "")
        assert not is_proxy or int(row["vocabulary"]) % (128 * int(row["tensor"])) == 0
