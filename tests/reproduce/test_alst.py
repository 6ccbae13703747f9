"""DeepSpeed on sequences of up to 15 million tokens: nothing is fitted to these rows."""

import numpy as np
import pytest
from reproduced import LOADERS, timed_runs, words_of_page

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_model
from axonn_tune.reproduce.alst import arctic_long_sequences

ROWS = load_published("alst")
PAGE = words_of_page("validation.md")
# A pass forward, the same again, and a backward pass of 2.5 times its FLOPs, of the causal half.
ATTENTION_PASSES = 4.5 / 2.0


@pytest.fixture(scope="module")
def timed():
    return timed_runs(list(arctic_long_sequences(ROWS, LOADERS)))


def test_attention_alone_runs_at_the_rate_that_was_measured_without_other_kernels():
    """Steps with 1.1 million tokens and more are meant; FlashAttention-2 reaches 335 TFLOP/s."""
    model = load_model("llama3-8b")
    for row in ROWS:
        seq_len = int(row["seq_len"])
        if seq_len > 1e6:
            scores = 4.0 * seq_len**2 * model.n_heads * model.head_dim * model.n_layers
            rate = ATTENTION_PASSES * scores / float(row["step_seconds"]) / int(row["gpus"])
            assert 300e12 < rate < 335e12


def test_the_longest_sequences_that_fitted_nearly_fill_the_memory(timed):
    """The page says the same."""
    gib = [
        run.prediction.memory_bytes / 2**30
        for row, run in zip(ROWS, timed, strict=True)
        if int(row["seq_len"]) > 32768
    ]
    assert (round(min(gib)), round(max(gib))) == (62, 77)
    assert "predicted to take 62 to 77 of 80 GiB" in PAGE


def test_long_sequences_are_met_and_short_ones_wait_longer_for_the_host(timed):
    """The page says the same."""
    errors = {run.comparison.subject: 100.0 * run.error for run in timed}
    short = [error for subject, error in errors.items() if subject.startswith("32768 ")]
    long = [error for subject, error in errors.items() if not subject.startswith("32768 ")]
    assert (len(short), len(long)) == (3, 7)
    assert np.abs(long).max() < 7.0 and np.abs(long).mean() < 4.5
    assert (round(max(short)), round(min(short))) == (-31, -66)
    assert "The three steps with 32 thousand tokens are predicted 31 to 66 % too short" in PAGE
