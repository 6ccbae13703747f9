"""Tables that are played together have the times that each of them has alone."""

from dataclasses import replace

import numpy as np
import pytest
from build import search_of
from worlds import machine_of

from axonn_tune.api.searching import build_search
from axonn_tune.cost.placements import PairedLinks
from axonn_tune.io.presets import list_models
from axonn_tune.search.candidates import legal_placements, with_micro_batches
from axonn_tune.search.parts import (
    in_orders,
    least_seconds,
    planned_parts,
    played_parts,
    sized_parts,
)
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.engine import IDEAL
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of
from axonn_tune.strategies.zero.zero import zero3

DENSE = Model("m", 8, 256, 8, 2048, 256)
# Stages of as many layers differ in their experts.
BALANCED = replace(IDEAL, megatron=replace(IDEAL.megatron, balances_stages=True))
MIXTURE = replace(DENSE, experts=Experts(8, 2, 128, first_layer=3))
CASES = {
    "dense": (DENSE, Megatron3D()),
    "unfused accumulation": (DENSE, Megatron3D(fused_accumulation=False)),
    "no overlap": (DENSE, Megatron3D(overlap_grad_reduce=False)),
    "experts": (MIXTURE, Megatron3D(has_experts=True)),
    "experts, unfused": (MIXTURE, Megatron3D(has_experts=True, fused_accumulation=False)),
    "modules": (replace(MIXTURE, mtp_modules=1), Megatron3D(has_experts=True)),
    "layout": (replace(DENSE, n_layers=16), Megatron3D(stage_layout="Ettt|ttttt|ttttt|tttL")),
    "balanced": (DENSE, megatron_of(BALANCED)),
    "zb-h1": (MIXTURE, Megatron3D(has_experts=True, schedule="zb-h1")),
    # Stages of three layers begin with either kind.
    "windows": (replace(DENSE, n_layers=12, window=64, full_attention_every=2), Megatron3D()),
    "experts in every second layer": (
        replace(DENSE, n_layers=12, experts=Experts(8, 2, 128, every=2)),
        Megatron3D(has_experts=True),
    ),
    "grid": (DENSE, Axonn4D(pipelined=True)),
    "zero": (DENSE, zero3()),
}


@pytest.mark.parametrize("case", CASES)
def test_tables_are_played_together_as_alone(case, monkeypatch):
    model, strategy = CASES[case]
    job = Job(8, 32, 256)
    search = search_of(model, job, machine_of(), strategy, include_oom=True, partial_recompute=True)
    # Parts of the layers are recomputed where less does not fit, and here nothing does.
    scenario = replace(search.scenario, memory_margin_bytes=1e15)
    search = replace(search, scenario=scenario)
    placements, _ = legal_placements(search)
    parts = sized_parts(search, with_micro_batches(search, placements)[0])
    alone = [Evaluator.of(scenario, part.table).play() for part in parts]
    monkeypatch.setattr("axonn_tune.search.parts.LEAST_SHARED_ROWS", 10**6)
    planned = planned_parts(scenario, parts)
    ordered = in_orders(parts, search.constraints.orders, [slice(None)] * len(parts))
    links = PairedLinks.of(scenario.machine, ordered[0].table.placements)
    together = played_parts(scenario, planned, ordered, links)
    least = least_seconds(planned, parts)
    for got, expected, bound in zip(together, alone, least, strict=True):
        np.testing.assert_allclose(got.times(), expected.times(), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(got.least_seconds(), expected.least_seconds(), rtol=1e-12)
        assert (bound <= expected.times()[0] * (1.0 + 1e-12)).all()
        assert (bound > 0.2 * expected.times()[0]).any()
    n_planned = [len(group.kernels().schedules.table) for group in planned]
    assert sum(n_planned) == sum(len(part.table) for part in parts)
    assert len(planned) < len(parts)


@pytest.mark.slow
def test_models_with_several_kinds_of_layers_are_ranked():
    """Stages of the catalogue's models begin and end with any kind of their layers."""
    options = {"strategy": "megatron", "include_oom": True, "micro_batch": 1}
    searches = [build_search(name, 48, "dgx-h100", **options) for name in list_models()]
    mixed = [search for search in searches if len(set(search.scenario.model.blocks)) > 1]
    assert len(mixed) >= 6
    for search in mixed:
        assert np.isfinite(rank_candidates(search).step_seconds).all()
