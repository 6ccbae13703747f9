"""What is said beside numbers that would mislead without it."""

from types import SimpleNamespace

import pytest

import axonn_tune
from axonn_tune.api.comparing import comparison
from axonn_tune.api.searching import build_search
from axonn_tune.report.compare import comparison_text
from axonn_tune.report.explain import explanation_text
from axonn_tune.report.phrases import assumption_line
from axonn_tune.report.plan import _chance
from axonn_tune.report.records import assumptions
from axonn_tune.report.suggest import ranking_text
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_best
from axonn_tune.step.explain import explain

MEGATRON = {"strategy": "megatron", "micro_batch": 1}


def explained(model, gpus, layout, **options):
    search = build_search(model, gpus, "dgx-h100", **{**MEGATRON, **options})
    explanation = explain(best_of_layout(search, layout), with_sensitivities=False)
    return explanation, explanation_text(search, explanation, 5)


@pytest.mark.parametrize(("strategy", "waits"), [("axonn-pipeline", True), ("zero3", False)])
def test_a_ranking_shows_bubbles_where_there_are_any(strategy, waits):
    search = build_search("5b", 64, strategy=strategy, global_batch=128, micro_batch=1)
    ranking = rank_best(search, 5)
    assert any(0.0 < p.bubble_seconds < 1.0 for p in ranking.top(5)) == waits
    heads = ranking_text(ranking, 5).splitlines()[2]
    assert ("bubble" in heads) == waits


@pytest.mark.parametrize(
    ("chance", "said"),
    [(None, "-"), (0.0, "<1"), (0.006, "1"), (0.5, "50"), (0.99, "99"), (0.996, ">99")],
)
def test_a_chance_is_never_said_to_be_certain(chance, said):
    assert _chance(SimpleNamespace(chance_within=lambda seconds: chance), 60.0) == said


def test_a_step_that_waits_for_its_host_says_so():
    options = {"global_batch": 16, "seq_len": 8192, "recompute": "none"}
    explanation, text = explained("llama3-8b", 64, "tensor=1,context=64", **options)
    assert explanation.host_seconds > 0.2 * explanation.prediction.step_seconds
    assert f"{explanation.host_seconds:.3f} s of the compute are waits for the host" in text
    _, text = explained("llama3-8b", 8, "tensor=1,data=8", global_batch=64, recompute="full")
    assert "waits for the host" not in text


def test_a_bubble_in_which_hosts_sleep_says_so():
    """A seventh of this bubble would be left without the sleep."""
    said = "the bubble includes the sleep of hosts over messages"
    for engine, layout, sleeps in (
        ("nanotron-2024-12", "tensor=2,data=8,pipeline=4", True),
        ("nanotron-2024-12", "tensor=2,data=32", False),
        ("nanotron", "tensor=2,data=8,pipeline=4", False),
    ):
        explanation, text = explained("llama3-8b", 64, layout, engine=engine, global_batch=256)
        assert (said in text) is sleeps
        assert (explanation.prediction.bubble_seconds > 10.0) is sleeps
        assert ("stand still for 0.6 s with each micro-batch" in text) is sleeps


def test_the_busiest_stage_is_told_of_where_the_last_one_has_less():
    options = {"global_batch": 64, "virtual_stages": 1, "stage_layout": "Et*10|t*10|t*10|ttL"}
    explanation, text = explained("llama3-8b", 4, "pipeline=4", **options | {"recompute": "full"})
    assert explanation.busiest_stage_seconds > 1.5 * explanation.stage_seconds
    assert "the busiest stage takes" in text
    explanation, text = explained("llama3-8b", 8, "tensor=1,data=8", global_batch=64)
    assert (explanation.stage_seconds, explanation.busiest_stage_seconds) == (0.0, 0.0)


def test_stages_are_as_long_as_the_parts_of_the_bubble_say():
    """The slowest stage works all the time but while the pipeline fills and drains."""
    explanation, _ = explained("5b", 4, "pipeline=4", global_batch=256, virtual_stages=1)
    prediction = explanation.prediction
    assert prediction.step_seconds == pytest.approx(
        256 * explanation.busiest_stage_seconds, rel=0.06
    )


def test_an_mfu_above_one_is_explained():
    search = build_search(
        "llama3-8b", 256, "dgx-b300", seq_len=2**19, global_batch=64, strategy="megatron"
    )
    ranking = rank_best(search, 1)
    assert ranking.prediction(0).mfu > 1.0
    assert "MFU above 100 %: attention counts without its mask" in ranking_text(ranking, 1)


@pytest.mark.parametrize(
    ("options", "said", "names"),
    [
        ({"strategy": "axonn"}, "overlap OAR+ORS+OAG,", {"oar", "ors", "oag"}),
        ({"strategy": "megatron"}, "overlap OAR+grad-reduce,", {"oar", "grad_reduce"}),
        ({"strategy": "megatron", "overlap_grad_reduce": False}, "overlap OAR,", {"oar"}),
        ({"strategy": "megatron", "oar": False}, "overlap grad-reduce,", {"grad_reduce"}),
        ({"strategy": "zero3"}, "overlap ORS+OAG,", {"ors", "oag"}),
        ({"strategy": "zero3", "overlap": False}, "overlap none,", set()),
        ({"strategy": "zero3", "engine": "deepspeed-2021"}, "overlap none,", set()),
        ({"strategy": "zero3", "engine": "deepspeed-2023"}, "overlap ORS,", {"ors"}),
    ],
)
def test_the_overlaps_that_are_stated_are_those_that_exist(options, said, names):
    search = build_search("5b", 16, **options)
    assert said in assumption_line(search)
    stated = assumptions(search)["overlap"]
    assert {name for name, active in stated.items() if active} == names


def test_layouts_without_a_strategy_are_compared_as_suggest_would():
    """AxoNN's strategy does not predict experts, and an engine names its own."""
    experts = {"precision": "bf16", "global_batch": 64}
    best = axonn_tune.compare("mixtral-8x7b", 16, "dgx-h100", grids=["dp=16,ep=8"], **experts)
    assert best["strategy"].tolist() == ["megatron"]
    best = axonn_tune.compare("5b", 16, grids=["shard=16"], engine="torchtitan")
    assert best["strategy"].tolist() == ["zero3"]


def test_one_strategy_one_step_and_one_sequence_are_singular():
    """Each of these texts was seen with the plural of one."""
    bests = comparison("5b", 16, strategies=["zero3"], global_batch=16).best
    assert ": the best layout of zero3\n" in comparison_text(bests, {})
    explanation, text = explained("5b", 16, "tensor=1,data=16", global_batch=16, micro_batch=1)
    assert explanation.prediction.n_microsteps == 1 and "; 1 micro-step; " in text
    line = assumption_line(build_search("5b", 1, global_batch=1))
    assert "global batch 1 sequence (" in line


def test_flops_are_told_with_the_mask_of_attention_where_it_takes_many_off():
    """Half of 12 L s h d of scores are gone: two thirds of what 235B counts with 32,768 tokens."""
    options = {"global_batch": 32, "recompute": "none", "seq_len": 32768}
    layout = "tensor=2,context=2,data=8,pipeline=8,expert=8"
    explanation, text = explained("qwen3-235b-a22b", 256, layout, **options)
    p = explanation.prediction
    tokens = 32 * 32768
    scores = 12 * 94 * 32768 * 8192 * tokens
    flops = p.tflops_per_gpu * 1e12 * 256 * p.step_seconds
    masked = 1e-12 * (flops - scores / 2) / (256 * p.step_seconds)
    assert f"these are {masked:.1f} TFLOP/s per GPU, MFU {100 * masked / 989:.1f} %" in text
    _, text = explained("llama3-8b", 8, "tensor=1,data=8", global_batch=64, seq_len=512)
    assert "causal mask" not in text


def test_a_comparison_names_the_engine_and_the_overlap_of_each_strategy():
    """Those of the fastest row alone would be said of all others, too."""
    options = {"model": "llama3-8b", "gpus": 8, "machine": "dgx-h100", "global_batch": 64}
    of_strategies = comparison(strategies=["axonn", "megatron", "zero3"], **options).best
    line = comparison_text(of_strategies, {}).splitlines()[-1]
    for said in (
        "ORS+OAG for zero3",
        "OAR+grad-reduce for megatron",
        "bundled for axonn",
        "fsdp2 for zero3",
    ):
        assert said in line
    line = comparison_text(comparison(strategies=["zero3"], **options).best, {}).splitlines()[-1]
    assert "overlap ORS+OAG, kernel tuning on, engine FSDP2, compiled" in line


@pytest.mark.parametrize("precision", ["bf16", "fp8-current"])
def test_the_peak_of_an_mfu_is_named_where_products_have_another(precision):
    options = {"global_batch": 64, "recompute": "full", "precision": precision}
    _, text = explained("llama3-8b", 8, "tensor=1,data=8", **options)
    said = "MFU and HFU are fractions of the peak of bf16, not of fp8-current"
    assert (said in text) == (precision != "bf16")


def test_a_prediction_names_its_optimizer_and_how_little_is_known_of_it():
    options = {"global_batch": 64, "strategy": "megatron"}
    search = build_search(
        "llama3-8b", 8, "dgx-h100", optimizer="muon", muon_mode="blockwise", **options
    )
    line = assumption_line(search)
    assert "bf16 with optimizer muon (blockwise)" in line
    assert line.endswith("Few measured steps had optimizer muon.")
    other = assumption_line(
        build_search("llama3-8b", 8, "dgx-h100", optimizer="ademamix", **options)
    )
    assert other.endswith("No measured step had optimizer ademamix.")
    assert "optimizer" not in assumption_line(build_search("llama3-8b", 8, "dgx-h100", **options))
