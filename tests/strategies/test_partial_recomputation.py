"""Recomputing a part of the layers lies between recomputing none and all, layer by layer."""

from dataclasses import replace

import numpy as np
import pytest
from build import operations
from worlds import machine_of

from axonn_tune.api.answers import predict
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import parse_layout
from axonn_tune.spec.recomputation import partial_recomputes, recompute_code, recompute_text
from axonn_tune.strategies.named import STRATEGIES

MODEL = "5b"  # 24 layers
LAYOUTS = {
    "axonn": "2x2x2x1",
    "axonn-pipeline": "1x1x2x1x4",
    "megatron": "tensor=2,pipeline=2,data=2",
    "zero1": "data=8",
    "zero2": "data=8",
    "zero3": "shard=8",
    "zeropp": "secondary=4,across=2",
    "zero-topo": "weights=2,gradients=4",
}
OPTIONS = {"global_batch": 32, "micro_batch": 1}


def of(strategy, recompute, **options):
    layout = LAYOUTS[strategy]
    return predict(
        MODEL, 8, layout, strategy=strategy, recompute=recompute, **{**OPTIONS, **options}
    )


def n_of_chunk(prediction):
    n_chunks = prediction.layout.n_stages * prediction.configuration.n_virtual
    return prediction.scenario.model.n_layers // n_chunks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_layers_are_full_recomputation(strategy):
    full = of(strategy, "full", virtual_stages=1)
    partial = of(strategy, f"full:{n_of_chunk(full)}", virtual_stages=1)
    assert partial.step_seconds == pytest.approx(full.step_seconds, rel=1e-12)
    assert partial.hfu == pytest.approx(full.hfu)
    activations = partial.memory_terms_bytes["activations"]
    assert activations == pytest.approx(full.memory_terms_bytes["activations"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_layers_take_more_time_and_less_memory(strategy):
    none = of(strategy, "none", virtual_stages=1)
    n_layers = n_of_chunk(none)
    counts = [1, n_layers // 2, n_layers - 1]
    found = [of(strategy, f"full:{n}", virtual_stages=1) for n in counts]
    row = [none, *found, of(strategy, "full", virtual_stages=1)]
    assert (np.diff([p.step_seconds for p in row]) > 0).all()
    assert (np.diff([p.memory_terms_bytes["activations"] for p in row]) < 0).all()
    assert (np.diff([p.hardware_tflops_per_gpu * p.step_seconds for p in row]) > 0).all()


@pytest.mark.parametrize("strategy", ["axonn", "megatron", "zero3"])
def test_every_layer_takes_the_same(strategy):
    """Without communication, each layer that is recomputed adds its forward pass."""
    machine = machine_of(bandwidths=(1e18, 1e18), latencies=(0.0, 0.0))
    fixed = {"machine": machine, "virtual_stages": 1}
    none = of(strategy, "none", **fixed)
    n_layers = n_of_chunk(none)
    whole = of(strategy, "full", **fixed).step_seconds - none.step_seconds
    for n in (1, n_layers // 2, n_layers - 1):
        added = of(strategy, f"full:{n}", **fixed).step_seconds - none.step_seconds
        assert added == pytest.approx(whole * n / n_layers, rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recompute", ["none", "full:1", "full:5", "full"])
def test_a_block_gathers_once_in_each_pass_and_computes_once_more(strategy, recompute):
    search = build_search(MODEL, 8, strategy=strategy, **OPTIONS)
    scenario = search.scenario
    layout = parse_layout(LAYOUTS[strategy], scenario.strategy.axes)
    table = CandidateTable.single(
        Configuration(layout, recompute=recompute), scenario.strategy.axes
    )
    part = scenario.strategy.plan(scenario.model, scenario.job, table).microstep
    issued = [op.name for op in operations(part)]
    n_layers = scenario.model.n_layers // layout.n_stages
    n_recomputed = {"none": 0, "full:1": 1, "full:5": 5, "full": n_layers}[recompute]
    assert issued.count("recompute.qkv.gemm") == n_recomputed
    assert issued.count("forward.qkv.gemm") == issued.count("backward.qkv.gemm_input") == n_layers
    if strategy == "axonn":
        assert issued.count("recompute.qkv.all_gather") == n_recomputed
        assert issued.count("backward.down.all_gather") == n_layers
    if strategy == "zero3":
        assert issued.count("recompute.block.all_gather") == n_recomputed
        assert issued.count("backward.block.all_gather") == n_layers - n_recomputed
    waited = {name for op in operations(part) for name in op.waits_for} - {"compute"}
    assert waited <= set(issued)


@pytest.mark.slow
def test_a_search_finds_what_trying_every_count_finds():
    """Only counts are left out that recompute more than needed."""
    search = build_search("20b", 64, "perlmutter", global_batch=256)
    found = rank_candidates(search).top()
    without = rank_candidates(replace(search, partial_recompute=False)).top()
    texts = partial_recomputes(search.scenario.model.n_layers)
    every = rank_candidates(
        replace(search, recomputes=("none", "selective", "full", *texts), partial_recompute=False)
    ).top()
    assert [p.step_seconds for p in found] == pytest.approx([p.step_seconds for p in every])
    assert found[0].step_seconds <= without[0].step_seconds
    assert any(p.configuration.recompute in texts for p in found)


def test_texts_and_numbers_are_one_to_one():
    texts = ["none", "selective", "full", "full:1", "full:2", "full:96"]
    assert [recompute_text(recompute_code(text)) for text in texts] == texts
    assert len({recompute_code(text) for text in texts}) == len(texts)
    assert partial_recomputes(8) == ["full:2", "full:4", "full:6"]
    assert partial_recomputes(2) == ["full:1"] and partial_recomputes(1) == []


@pytest.mark.parametrize(
    "text", ["full:0", "full:", "full:-1", "full:1.5", "full:²", "full:10000", "block"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(
        InputError, match=r"recompute is '.*'; allowed: auto, none, selective, full"
    ):
        build_search("tiny", 4, recompute=text)
