"""The memorisation study: what the page shows, and the same in small."""

import importlib.util
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import torch
from figures import assert_drawn
from runtime.ranks import on_grid, on_ranks

from axonn_tune.runtime import GPT, Engine
from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.model import Model

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples/memorisation.py"


def loaded_example():
    spec = importlib.util.spec_from_file_location("memorisation", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rates_of(results):
    """Exact-match rates with the whole loss, and with the goldfish loss, smallest model first."""
    rates = loaded_example().exact_match_percent(results)
    goldfish = rates.index.get_level_values("loss").str.startswith("goldfish")
    return rates[~goldfish], rates[goldfish]


def test_the_page_shows_the_record():
    results = pd.read_csv(DOCS / "memorisation.csv")
    page = (DOCS / "memorisation.md").read_text()
    assert loaded_example().table(results) in page
    for column in ("date", "torch", "axonn_tune", "grid"):
        (value,) = results[column].unique()
        assert value in page, column


def test_the_published_direction_holds_in_the_record():
    whole, goldfish = rates_of(pd.read_csv(DOCS / "memorisation.csv"))
    assert (whole.diff(axis="columns").iloc[:, 1:] >= 0).all(axis=None)
    assert (whole.diff().iloc[1:] >= 0).all(axis=None)
    assert (whole[16].diff().iloc[1:] > 10).all() and whole[16].iloc[-1] > 80
    assert whole[4].iloc[-1] > 10
    assert (whole[0] == 0).all()
    assert (goldfish < 2).all(axis=None)


def test_each_document_comes_as_often_as_it_shall():
    example = loaded_example()
    corpus = example.Corpus(n_documents=3, n_passages=160, seed=0)
    batches = [corpus.sequences(i, 0, example.BATCH, "cpu") for i in range(corpus.n_steps)]
    counts = Counter(tuple(sequence.tolist()) for sequence in torch.cat(batches))
    for repetitions, documents in corpus.documents.items():
        assert documents.shape == (3, example.SEQ_LEN + 1)
        assert all(counts[tuple(text.tolist())] == repetitions for text in documents)
    n_once = sum(counts.values()) - 3 * sum(example.REPETITIONS)
    assert 160 <= n_once < 160 + example.BATCH
    pairs = {pair for sequence in counts for pair in itertools.pairwise(sequence)}
    followers = Counter(word for word, _ in pairs)
    assert max(followers.values()) == example.N_FOLLOWERS


def check_known_words(rank):
    example = loaded_example()
    spec = Model("gpt", 1, 32, 4, example.N_WORDS, example.SEQ_LEN)
    n_read = example.SEQ_LEN + 1 - example.N_CONTINUED
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(example.N_WORDS, (3, n_read), generator=generator)
    with on_grid(grid_layout(1, 1, 2, 1)) as mesh:  # Z leaves the vocabulary whole.
        model = GPT(Engine(mesh, kernel_tuning=False), spec)
        with torch.no_grad():
            for _ in range(example.N_CONTINUED):
                text = torch.cat((text, model(text)[:, -1:].argmax(-1)), dim=1)
    with on_grid(grid_layout(1, 2, 1, 1)) as mesh:
        model = GPT(Engine(mesh, kernel_tuning=False), spec)
        assert example.known_words(model, text).all()
        text[1, n_read + 5] = (text[1, n_read + 5] + 1) % example.N_WORDS
        known = example.known_words(model, text)
        assert known[[0, 2]].all() and known[1, :5].all() and not known[1, 5]


def test_what_a_greedy_continuation_writes_is_known():
    on_ranks(2, check_known_words)


@pytest.mark.sweep
def test_a_small_study_has_the_published_direction(tmp_path):
    output, plot = str(tmp_path / "results.csv"), str(tmp_path / "figure.png")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--nproc-per-node=2", str(EXAMPLE), "--grid=1x2x1x1", "--seeds=0", "--documents=8"]
    options += ["--passages=800", "--hidden-sizes", "32", "128"]
    done = subprocess.run(
        [*torchrun, *options, "--output", output, "--plot", plot],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    whole, goldfish = rates_of(pd.read_csv(output))
    small, large = whole[16]
    assert small < large and large >= 25
    assert whole[0].max() == 0 and whole[4].max() < large
    assert goldfish.max(axis=None) < 0.5 * large
    assert_drawn(Path(plot))
