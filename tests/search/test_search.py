"""Ranking, reasons for absence, explanation and the Python interface."""

import re
from dataclasses import asdict, replace

import pytest

import axonn_tune
from axonn_tune.api.searching import build_search
from axonn_tune.errors import AxonnTuneError, InputError, NoCandidateError
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.options import ExecutionOptions, SwitchOptions, declared, defaults
from axonn_tune.report.records import flat_record, record
from axonn_tune.report.suggest import ranking_document
from axonn_tune.search.no_fit import near_step
from axonn_tune.search.one_layout import best_of_layout, why_not
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import grid_layout
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import predict
from axonn_tune.strategies.named import Switches


@pytest.fixture(scope="module")
def search():
    return build_search("20b", 128)


@pytest.fixture(scope="module")
def ranking(search):
    return rank_candidates(search)


@pytest.mark.parametrize("n_gpus", [72, 144])
def test_whole_racks_of_72_gpus_have_layouts_that_keep_them_busy(n_gpus):
    found = build_search("llama3-8b", n_gpus, "gb200-nvl72", strategy="megatron", micro_batch=1)
    best = rank_candidates(found).top()[0]
    assert best.fits and 0.4 < best.mfu < 0.75


def test_ranked_by_step_time_and_all_fit(ranking):
    seconds = [p.step_seconds for p in ranking.top()]
    assert seconds == sorted(seconds)
    assert all(p.fits and p.memory_bytes <= p.memory_capacity_bytes for p in ranking.top())
    assert len(ranking) > 50


def test_a_grid_stands_for_its_best_configuration(ranking, search):
    every = rank_candidates(replace(search, every_configuration=True)).top()
    grids = [p.layout for p in ranking.top()]
    assert len(set(grids)) == len(grids)
    best = {}
    for p in every:
        best.setdefault(p.layout, p.step_seconds)
    assert [p.step_seconds for p in ranking.top()] == list(best.values())


def test_rates_follow_from_the_step_time(ranking, search):
    best = ranking.prediction(0)
    model_flops = search.scenario.model.model_flops(
        search.scenario.job.tokens, search.scenario.job.seq_len
    )
    assert best.mfu == pytest.approx(model_flops / best.step_seconds / 128 / 312e12)
    assert best.tflops_per_gpu == pytest.approx(best.mfu * 312)
    assert best.hfu == pytest.approx(best.hardware_tflops_per_gpu / 312)
    assert best.hfu >= best.mfu
    assert best.tokens_per_second_per_gpu * 128 * best.step_seconds == pytest.approx(2**24)


def test_hardware_flops_of_a_gpt_are_the_published_formula():
    model = load_model("80b")
    b, s, layers, h, v = 8192, 2048, 42, 12288, model.padded_vocab_size
    published = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert model.hardware_flops(b * s, s, "full") == pytest.approx(published, rel=1e-12)
    without = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model.hardware_flops(b * s, s, "none") == pytest.approx(without, rel=1e-12)


@pytest.mark.slow
def test_every_candidate_is_counted_once(search):
    everything = rank_candidates(replace(search, include_oom=True, every_configuration=True))
    fitting = rank_candidates(replace(search, every_configuration=True))
    assert len(everything) == len(fitting) + fitting.rejected["out of memory"]
    assert len(fitting) == fitting.n_evaluated == rank_candidates(search).n_evaluated
    assert everything.rejected["out of memory"] == fitting.rejected["out of memory"]
    verdicts = [p.fits for p in everything.top()]
    assert verdicts == sorted(verdicts, reverse=True)


def test_fixed_axes_and_largest_tensor_parallel_degree():
    fixed = rank_candidates(build_search("20b", 128, gz=4, gx=2)).top()
    assert {(p.layout.size("x"), p.layout.size("z")) for p in fixed} == {(2, 4)}
    small = rank_candidates(build_search("20b", 128, max_tp=32)).top()
    assert max(p.layout.n_ranks // p.layout.size("data") for p in small) == 32


def test_all_orders_include_the_papers_and_are_never_worse(ranking):
    every = rank_candidates(build_search("20b", 128, order="all"))
    assert every.prediction(0).step_seconds <= ranking.prediction(0).step_seconds
    assert {p.configuration.order for p in every.top()} > {"xyzd"}


@pytest.mark.parametrize("gpus", [384, 6144])
def test_counts_that_are_no_powers_of_two(gpus):
    best = rank_candidates(build_search("20b", gpus, "frontier", global_batch=12288)).prediction(0)
    assert best.layout.n_ranks == gpus


def test_smaller_batch_changes_the_result():
    a = rank_candidates(build_search("20b", 128, global_batch=8192)).prediction(0)
    b = rank_candidates(build_search("20b", 128, global_batch=1024)).prediction(0)
    assert b.step_seconds < a.step_seconds / 4


@pytest.mark.parametrize(
    "option",
    [
        {"seq_len": 1024},
        {"dtype": "fp32"},
        {"attention": "unfused"},
        {"recompute": "full"},
        {"oag": False},
        {"ors": False},
        {"oar": False},
        {"keep_gathered_weights": True},
        {"micro_batch": 1},
    ],
)
def test_every_option_changes_the_prediction(option):
    """Ignored inputs are the classic complaint."""
    grid = {"gx": 2, "gy": 2, "gz": 8, "gdata": 4, "micro_batch": 2, "recompute": "none"}
    grid |= {"include_oom": True}
    plain = rank_candidates(build_search("20b", 128, **grid)).prediction(0)
    changed = rank_candidates(build_search("20b", 128, **{**grid, **option})).prediction(0)
    assert changed.step_seconds != plain.step_seconds


def test_kernel_tuning_avoids_a_slow_mode():
    slow = rank_candidates(build_search("20b", 128, "frontier", kernel_tuning=False)).prediction(0)
    tuned = rank_candidates(build_search("20b", 128, "frontier")).prediction(0)
    assert tuned.step_seconds < slow.step_seconds


# Why not -------------------------------------------------------------------------------


def test_why_not_names_the_broken_rule(search):
    assert "attention heads" in why_not(search, grid_layout(1, 64, 2, 1))
    assert "64 ranks, not 128" in why_not(search, grid_layout(8, 8, 1, 1))
    grouped = build_search("llama3-70b", 64)
    assert why_not(grouped, grid_layout(1, 16, 4, 1)) == "1x16x4x1: KV heads not divisible by G_y"


def test_why_not_says_how_much_memory_is_missing(search):
    text = why_not(search, grid_layout(1, 1, 1, 128))
    short = float(re.search(r"([\d.]+) GiB short", text)[1])
    needed = float(re.search(r"needs ([\d.]+) GiB", text)[1])
    assert short == pytest.approx(needed - 40, abs=0.11)
    assert "largest term: optimizer_states" in text


def test_why_not_gives_the_rank_of_an_allowed_grid(search, ranking):
    best = ranking.prediction(0)
    assert "ranks 1 of" in why_not(search, best.layout)


def test_why_not_names_the_modules_with_which_a_layout_was_not_tried():
    """DeepSeek-V3 trained on this layout and recomputed these modules (arXiv 2412.19437)."""
    layout = "tensor=1,context=1,data=128,pipeline=16,expert=64"
    options = {"strategy": "megatron", "engine": "hai-llm", "precision": "fp8-block"}
    options |= {"global_batch": 15360, "schedule": "dualpipe", "micro_batch": 1}
    options["fix"] = {"tensor": 1, "context": 1, "pipeline": 16, "expert": 64}
    searches = [
        build_search("deepseek-v3", 2048, "h800", **options, recompute=recompute)
        for recompute in ("auto", "selective:mla_up_proj,layernorm,moe_act", "full")
    ]
    told = [why_not(search, layout) for search in searches]
    remark = "; --recompute selective:mla_up_proj,layernorm,moe_act was not tried"
    assert [text.endswith(remark) for text in told] == [True, False, False]
    automatic, modular, _ = (rank_candidates(search).step_seconds[0] for search in searches)
    assert modular < 0.8 * automatic


def test_why_not_leaves_out_modules_that_a_model_or_a_strategy_does_not_recompute():
    given = {"machine": "dgx-h100", "global_batch": 512, "micro_batch": 1}
    dense = build_search("llama3-70b", 128, strategy="megatron", fix={"tensor": 1}, **given)
    assert dense.partial_recompute
    assert "was not tried" not in why_not(dense, rank_candidates(dense).prediction(0).layout)
    sharded = build_search("qwen3-30b-a3b", 64, strategy="zero3", fix={"expert": 8}, **given)
    best = rank_candidates(sharded).prediction(0)
    assert best.configuration.recompute != "none"
    assert "was not tried" not in why_not(sharded, best.layout)


# Errors ----------------------------------------------------------------------------------


def test_no_grid_names_reasons_and_counts_nearby():
    with pytest.raises(
        NoCandidateError, match=r"no grid for 17 GPUs .*counts of GPUs nearby that do: 16, (18|24)$"
    ):
        rank_candidates(build_search("80b", 17, global_batch=8192))


def test_counts_on_which_stages_cannot_be_cut_either_are_not_named():
    """80 layers, and 82 with embedding and head, make no 12 stages on any number of GPUs."""
    fixed = {"strategy": "megatron", "fix": ["pipeline=4"], "virtual_stages": 3}
    with pytest.raises(NoCandidateError, match="virtual stages") as error:
        rank_candidates(build_search("llama3-70b", 64, "dgx-h100", global_batch=512, **fixed))
    assert "counts of GPUs nearby" not in str(error.value)


def test_nothing_fits_says_how_many_gpus_it_would_take():
    with pytest.raises(NoCandidateError, match=r"fits on no grid of 4 .*fits from (\d+) GPUs") as e:
        rank_candidates(build_search("80b", 4))
    enough = int(re.search(r"from (\d+) GPUs", str(e.value))[1])
    assert len(rank_candidates(build_search("80b", enough))) > 0


def test_nothing_fits_names_the_nearest_counts_that_do_if_they_are_near():
    """A thousand has a factor of 125, by which no weight of this model can be cut."""
    with pytest.raises(NoCandidateError, match="it fits on 960 or 1008 GPUs"):
        rank_candidates(build_search("80b", 1000))
    for near in (960, 1008):
        assert len(rank_candidates(build_search("80b", near))) > 0


@pytest.mark.parametrize(("n_gpus", "step"), [(1, 1), (48, 1), (1000, 2), (1024, 2), (16384, 32)])
def test_of_many_counts_only_multiples_of_a_power_of_two_are_near(n_gpus, step):
    assert near_step(n_gpus, n_gpus // 10) == step


@pytest.mark.parametrize(
    "arguments",
    [
        {"gpus": 0},
        {"gpus": -8},
        {"gpus": 10**9},
        {"gpus": 8, "seq_len": 0},
        {"gpus": 8, "global_batch": 0},
        {"gpus": 8, "global_batch": 8, "global_batch_tokens": 8},
        {"gpus": 8, "global_batch_tokens": 100},
        {"gpus": 8, "global_batch_tokens": "16Q"},
        {"gpus": 8, "within": "5pc"},
        {"gpus": 8, "within": 0},
        {"gpus": 8, "within": 5},
        {"gpus": 8, "micro_batch": -1},
        {"gpus": 8, "dtype": "int8"},
        {"gpus": 8, "recompute": "some"},
        {"gpus": 8, "attention": "linear"},
        {"gpus": 8, "order": "xyz"},
        {"gpus": 8, "cost_model": "guess"},
        {"gpus": 8, "max_tp": 0},
        {"gpus": 8, "gx": 3},
    ],
)
def test_bad_arguments_name_the_culprit(arguments):
    with pytest.raises(AxonnTuneError) as caught:
        rank_candidates(build_search("tiny", **arguments))
    assert "\n" not in str(caught.value)


# Predict and explain -----------------------------------------------------------------------


def test_predict_agrees_with_the_ranking(ranking, search):
    for own in ranking.top(3):
        fixed = replace(
            search,
            recomputes=(own.configuration.recompute,),
            constraints=replace(search.constraints, micro_batch=own.configuration.micro_batch),
        )
        again = best_of_layout(fixed, own.layout)
        assert again.step_seconds == pytest.approx(own.step_seconds, rel=1e-12)
        assert again.memory_bytes == own.memory_bytes


def test_predict_refuses_an_illegal_grid():
    with pytest.raises(InputError, match="attention heads"):
        axonn_tune.predict("20b", 128, "1x128x1x1")


def test_explanation_adds_up(ranking):
    own = ranking.prediction(len(ranking) // 2)
    parts = explain(own)
    kernels = sum(op.total_seconds for op in parts.operations if not op.axis)
    assert kernels == pytest.approx(own.compute_seconds, rel=1e-9)
    exposed = sum(parts.exposed_seconds_by_axis.values())
    assert exposed == pytest.approx(own.exposed_communication_seconds, rel=1e-9, abs=1e-9)
    for op in parts.operations:
        assert -1e-9 <= op.exposed_seconds <= op.total_seconds * (1 + 1e-9) or not op.axis
    assert sum(own.memory_terms_bytes.values()) == pytest.approx(own.memory_bytes)
    not_tensors = own.memory_terms_bytes["fragmentation"] + own.memory_terms_bytes["reserved"]
    assert own.allocated_bytes == pytest.approx(own.memory_bytes - not_tensors)


def test_more_of_a_resource_never_costs_time(ranking):
    parts = explain(ranking.prediction(5))
    assert all(s.saved_seconds >= -1e-9 for s in parts.sensitivities)
    assert parts.sensitivities[0].saved_seconds > 0
    saved = [s.saved_seconds for s in parts.sensitivities]
    assert saved == sorted(saved, reverse=True)


def test_a_kernel_without_bytes_is_not_listed(search):
    """Without X no norm makes a pass for sums; with it all do."""
    for x in (1, 2):
        configuration = Configuration(grid_layout(x, 2, 8, 8 // x))
        parts = explain(predict(search.scenario, configuration))
        sums = {op.name for op in parts.operations if op.name.endswith(".sums")}
        assert sums >= {"forward.norm1.sums", "backward.norm.sums"} if x > 1 else not sums
        kernels = [op for op in parts.operations if not op.axis]
        assert all(op.total_seconds > 0 and op.rate_per_s > 0 for op in kernels)
        assert "forward.norm1" in {op.name for op in kernels}


# Records and the DataFrame --------------------------------------------------------------------


def test_document_follows_the_contract(ranking):
    document = ranking_document(ranking, 3)
    assert document["schema_version"] == 1
    assert document["evaluated"] == ranking.n_evaluated > len(ranking)
    assert len(document["results"]) == 3
    contract = {
        "rank": int,
        "strategy": str,
        "grid": dict,
        "order": str,
        "micro_batch": int,
        "recompute": str,
        "step_seconds": float,
        "tflops_per_gpu": float,
        "mfu": float,
        "hfu": float,
        "exposed_communication_seconds": float,
        "memory_bytes": float,
        "memory_capacity_bytes": float,
        "fits": bool,
    }
    for entry in document["results"]:
        assert {key: type(entry[key]) for key in contract} == contract
        assert set(entry["grid"]) == {"x", "y", "z", "data"}


def test_flat_record_holds_the_same_values(ranking):
    best = ranking.prediction(0)
    flat, nested = flat_record(best), record(best)
    assert flat["g_x"] == nested["grid"]["x"]
    assert flat["memory_weights_bytes"] == nested["memory_terms_bytes"]["weights"]
    assert flat["step_seconds"] == nested["step_seconds"]


def test_suggest_returns_a_data_frame():
    frame = axonn_tune.suggest(model="tiny", gpus=8, machine="perlmutter", top_n=4)
    assert list(frame["rank"]) == [1, 2, 3, 4]
    assert (frame["g_x"] * frame["g_y"] * frame["g_z"] * frame["g_data"] == 8).all()
    assert frame["step_seconds"].is_monotonic_increasing


def test_models_and_machines_can_be_passed_as_objects():
    machine = load_machine("perlmutter")
    faster = replace(
        machine,
        gpu=replace(
            machine.gpu,
            peak_flops_per_s={k: q.scaled(2.0) for k, q in machine.gpu.peak_flops_per_s.items()},
        ),
    )
    slow = axonn_tune.predict(load_model("20b"), 64, "1x1x64x1", machine)
    fast = axonn_tune.predict(load_model("20b"), 64, "1x1x64x1", faster)
    assert fast.step_seconds < slow.step_seconds


def test_the_search_of_one_layout_keeps_what_does_not_fit():
    search = build_search("80b", 8)
    with pytest.raises(NoCandidateError, match="fits on no grid"):
        rank_candidates(search)
    kept = rank_candidates(search.of_layout(grid_layout(8, 1, 1, 1)))
    assert len(kept) == 1 and not kept.prediction(0).fits


def test_switches_have_the_defaults_of_the_options():
    shown = defaults(declared(ExecutionOptions, SwitchOptions))
    assert asdict(Switches()).items() <= shown.items()


@pytest.mark.slow
def test_orders_that_make_no_difference_are_one_row():
    every = rank_candidates(build_search("5b", 32, order="all", every_configuration=True))
    ranked = rank_candidates(build_search("5b", 32, order="all")).top()
    kinds = {(p.layout, f"{p.step_seconds:.9g}") for p in ranked}
    assert len(kinds) == len(ranked)
    orders = {(p.layout, p.configuration.order) for p in every.top()}
    assert len({p.layout for p in ranked}) == len({layout for layout, _ in orders})
    assert len(ranked) < len(orders)
    best = {}
    for p in every.top():
        best[p.layout] = min(p.step_seconds, best.get(p.layout, p.step_seconds))
    for p in ranked:
        assert p.step_seconds >= best[p.layout]
    assert {p.layout: p.step_seconds for p in reversed(ranked)} == best


def test_a_layout_that_no_virtual_stages_divide_is_said_to_be_so():
    search = build_search("20b", 64, "dgx-h100", strategy="megatron", virtual_stages=3)
    layout = "tensor=4,context=1,data=4,pipeline=4"
    assert why_not(search, layout).startswith(f"{layout}: the stages cannot be cut")
    with pytest.raises(InputError, match="the stages cannot be cut"):
        best_of_layout(search, layout)
