"""What is assumed of memory makes it uncertain; what nearly fits is ranked apart."""

from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.api.answers import predict
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.search.rank import rank_candidates
from axonn_tune.units import gib

META = {
    "strategy": "megatron",
    "machine": "dgx-h100",
    "global_batch": 2048,
    "fix": {"tensor": 8, "pipeline": 16, "data": 128},
    "recompute": "none",
}


def with_reserve_spread(scenario, spread):
    reserve = scenario.machine.memory_reserve
    reserve = replace(
        reserve,
        reserved_bytes=replace(reserve.reserved_bytes, spread_fraction=spread),
        fragmentation_fraction=replace(reserve.fragmentation_fraction, spread_fraction=spread),
    )
    return replace(scenario, machine=replace(scenario.machine, memory_reserve=reserve))


def test_the_interval_is_that_of_random_reserves():
    """Fragmentation and reserve drawn from their spreads, added up one by one."""
    prediction = predict("80b", 1024, "1x1x512x2")
    prediction = replace(prediction, scenario=with_reserve_spread(prediction.scenario, 0.2))
    terms = prediction.memory_terms_bytes
    rough = np.array([terms["fragmentation"], terms["reserved"]])
    drawn = 1.0 + 0.2 * np.random.default_rng(0).standard_normal((200_000, 2))
    totals = prediction.memory_bytes + ((drawn - 1.0) * rough).sum(axis=1)
    ends = np.quantile(totals, [0.05, 0.95])
    assert prediction.memory_bytes_interval == pytest.approx(tuple(ends), rel=1e-3)


def test_what_is_known_exactly_has_no_interval():
    prediction = predict("80b", 1024, "1x1x512x2")
    exact = replace(prediction, scenario=with_reserve_spread(prediction.scenario, 1e-9))
    assert exact.memory_bytes_interval == pytest.approx((exact.memory_bytes,) * 2)
    assert not (exact.fits_tightly or exact.nearly_fits)


@pytest.mark.parametrize(
    ("machine", "engine", "model", "mib"),
    [
        # torch: two of 32 MiB on Hopper, or of 4 MiB and 4 MiB and 8 of 16 KiB on others.
        ("dgx-h100", "nanotron", "llama3-8b", 64),
        ("dgx-a100", "nanotron", "llama3-8b", 16.25),
        ("frontier", "nanotron", "llama3-8b", 0),
        # Transformer Engine: one of 32 MiB from Hopper on, of 4 MiB before, and four for experts.
        ("dgx-h100", "megatron-core", "llama3-8b", 64 + 32),
        ("dgx-a100", "megatron-core", "llama3-8b", 16.25 + 4),
        ("dgx-b200", "nemo", "llama3-8b", 16.25 + 32),
        ("dgx-b200", "megatron-core", "mixtral-8x7b", 16.25 + 5 * 32),
    ],
)
def test_cublas_has_a_workspace_for_each_handle(machine, engine, model, mib):
    search = build_search(model, 16, machine, engine=engine, strategy="megatron")
    assert search.scenario.workspace_bytes == mib * 2**20
    best = rank_candidates(search).prediction(0)
    assert best.memory_terms_bytes.get("workspaces", 0.0) == mib * 2**20
    assert sum(best.memory_terms_bytes.values()) == pytest.approx(best.memory_bytes)


def test_what_nearly_fits_is_ranked_apart_and_a_margin_lets_it_in():
    ranking = rank_candidates(build_search("80b", 1024))
    near = ranking.near
    assert ranking.fits.all() and not near.fits.any() and len(near)
    assert (np.diff(near.step_seconds) >= 0).all()
    capacity = ranking.search.scenario.memory_capacity_bytes
    assert all(p.nearly_fits and p.memory_bytes > capacity for p in near.top())
    missing = gib(near.memory_bytes[0] - capacity)
    wider = rank_candidates(build_search("80b", 1024, memory_margin=f"{-missing - 0.01}GiB"))
    assert near.prediction(0).configuration in [p.configuration for p in wider.top()]


def test_all_rows_of_a_figure_take_the_memory_that_their_predictions_state():
    """Searches leave out what nanotron's stages hold only where their hosts run ahead."""
    ranking = rank_candidates(build_search("llama3-8b", 64, "dgx-h100", engine="nanotron"))
    stated = [prediction.memory_bytes for prediction in ranking.top()]
    assert ranking.stated_bytes.tolist() == stated
    assert (ranking.stated_bytes > ranking.memory_bytes).any()
    assert (ranking.stated_bytes <= ranking.search.scenario.memory_capacity_bytes).all()


def test_a_margin_is_kept_free():
    for margin, kept in (("2GiB", 2.0), ("5%", 2.0), (None, 0.0)):
        ranking = rank_candidates(build_search("80b", 1024, memory_margin=margin))
        largest = max(ranking.memory_bytes)
        assert gib(largest) <= 40.0 - kept
        if margin is None:
            assert gib(largest) > 38.0


def test_llama_on_its_own_layout_fits_without_whole_gradients():
    """The Llama 3 herd, arXiv 2407.21783, table 4: 16,384 GPUs, sequences of 8,192.

    It ran without recomputation. Its program shards gradients over data (section 3.3.2), which
    Megatron-Core holds whole; the second stage holds eight layers, and 15 micro-batches of each.
    """
    found = predict("llama3-405b", 16384, "tensor=8,pipeline=16,data=128", **META)
    assert not found.fits
    gradients = found.memory_terms_bytes["gradients"]
    assert gib(found.memory_bytes) == pytest.approx(86.5, abs=0.5)
    assert found.memory_bytes - gradients <= found.memory_capacity_bytes


@pytest.mark.parametrize("margin", ["40GiB", "100%", "2 apples", "-41GiB", "nan%"])
def test_an_impossible_margin_is_refused(margin):
    with pytest.raises(InputError, match="margin"):
        build_search("80b", 1024, memory_margin=margin)
