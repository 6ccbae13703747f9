"""Candidates that are played in chunks have the times that they have when played at once.

A chunk may lack what others have, such as pipelines of some length, or recomputation: its plan then
has other phases than that of the next chunk, and than that of the shapes.
"""

import numpy as np
import pytest
from build import play_at_once

from axonn_tune.api.searching import build_search
from axonn_tune.search.rank import rank_candidates

SEARCHES = [
    pytest.param("tiny", 8, {}, id="pipelines of several lengths"),
    pytest.param("gpt-neox-20b", 16, {"recompute": "none"}, id="virtual stages"),
    pytest.param("olmoe-1b-7b", 8, {}, id="experts"),
    pytest.param("gpt-oss-120b", 8, {}, id="layers of two kinds", marks=pytest.mark.sweep),
    pytest.param("deepseek-v2", 8, {}, id="dense layers first", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("model", "n_gpus", "options"), SEARCHES)
def test_chunks_of_all_layouts_have_the_same_times(monkeypatch, model, n_gpus, options):
    search = build_search(
        model,
        n_gpus,
        "dgx-h100",
        strategy="megatron",
        global_batch=8 * n_gpus,
        exhaustive=True,
        every_configuration=True,
        include_oom=True,
        **options,
    )
    at_once = rank_candidates(search)
    play_at_once(monkeypatch, 29)
    in_chunks = rank_candidates(search)
    assert len(at_once) > 3 * 29
    for column in ("step_seconds", "exposed_seconds", "bubble_seconds"):
        expected = getattr(at_once, column)
        found = getattr(in_chunks, column)
        assert np.allclose(found, expected, rtol=1e-12, atol=1e-12 * expected.max())
