"""Layouts of stages: which layers each has, in time and memory, and how they are written."""

from functools import partial

import pytest
from build import memory_terms, plan_of

import axonn_tune
from axonn_tune.api.answers import predict
from axonn_tune.api.searching import build_search
from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.stage_layout import layers_of_stages
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.pipeline import cut_layers

MODEL = Model(
    "m", n_layers=8, hidden_size=256, n_heads=8, vocab_size=512, seq_len=128, position="rotary",
    tied_embeddings=False,
)  # fmt: skip
JOB = Job(8, 32, 128)
MEGATRON = {
    "strategy": "megatron", "machine": "dgx-h100", "recompute": "none", "micro_batch": 1,
    "global_batch": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("EttttL", (4,)),
        ("Ettt|(tt|)*3,t|L", (3, 2, 2, 2, 1, 0)),
        ("Et*3|(tt|)*2L", (3, 2, 2, 0)),
        ("E|t*4|t*4|L", (0, 4, 4, 0)),
        ("Et*2|tt|, tt|ttL", (2, 2, 2, 2)),
        ("(Et|tt|)*1tL", (1, 2, 1)),
        ("Et*2|t*3m*2L", (2, 3)),
        ("Ett|tt|,mL", (2, 2, 0)),
        ("", ()),
    ],
)
def test_texts_are_read_as_megatron_core_reads_them(text, layers):
    assert layers_of_stages(text) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ettx|tL", "E, t, m and L in this order"),
        ("tE|tL", "in this order"),
        ("t|EtL", "the embedding E once, in the first stage"),
        ("Et|tL|t", "the head and loss L once, in the last stage"),
        ("Et|Et|tL", "embedding E once"),
        ("Et|t*|L", "in this order"),
        ("E(t*9999)*9999|L", "at most 20000 letters"),
        ("Et|m|L", "prediction m in the last stage, before L"),
        ("Et|mtL", "in this order"),
    ],
)
def test_what_is_no_layout_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        layers_of_stages(text)


def written(counts):
    """The text of a layout with these numbers of layers."""
    stages = ["t" * count for count in counts]
    return "|".join(["E" + stages[0], *stages[1:-1], stages[-1] + "L"])


@pytest.mark.parametrize("model", ["llama3-70b", "deepseek-v3", "gpt3-175b"])
@pytest.mark.parametrize("n_virtual", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "dualpipe"])
def test_the_usual_cut_is_one_of_the_layouts(model, n_virtual, schedule):
    if schedule != "1f1b" and n_virtual > 1:
        return
    layout = "tensor=4,data=2,pipeline=8" + ",expert=8" * (model == "deepseek-v3")
    of = partial(predict, model, 64, layout, schedule=schedule, **MEGATRON)
    n_layers = {"llama3-70b": 80, "deepseek-v3": 61, "gpt3-175b": 96}[model]
    usual = of(virtual_stages=n_virtual)
    same = of(stage_layout=written(cut_layers(n_layers, 8 * n_virtual)))
    assert same.configuration.n_virtual == n_virtual
    if model != "deepseek-v3":  # whose middle stages are predicted to be alike, and are not
        assert same.step_seconds == pytest.approx(usual.step_seconds, rel=1e-12)
        assert same.bubble_seconds == pytest.approx(usual.bubble_seconds, rel=1e-9)
    assert same.memory_bytes == pytest.approx(usual.memory_bytes, rel=0.05)
    assert same.step_seconds == pytest.approx(usual.step_seconds, rel=0.02)


def test_the_longest_stage_sets_the_pace():
    of = partial(predict, "llama3-70b", 64, "tensor=8,pipeline=8", **MEGATRON)
    layouts = ["Et*10|(t*10|)*6t*10L", "Et*10|(t*10|)*5t*13|t*7L", "Et*8|(t*10|)*5t*14|t*8L"]
    even, longer, longest = (of(stage_layout=text, virtual_stages=1) for text in layouts)
    assert even.step_seconds < longer.step_seconds < longest.step_seconds
    work = [p.mfu * p.step_seconds for p in (even, longer, longest)]
    assert work == pytest.approx([work[0]] * 3)


def test_a_stage_of_its_own_for_the_head_makes_room_for_layers():
    """The head of a large vocabulary takes as long as some layers."""
    of = partial(predict, "llama3-8b", 8, "pipeline=8", virtual_stages=1, **MEGATRON)
    even = of(stage_layout="Et*4|(t*4|)*6t*4L")
    balanced = of(stage_layout="Et*5|(t*5|)*3t*4|t*4|t*3|tL")
    assert balanced.step_seconds < even.step_seconds


@pytest.mark.parametrize(
    ("text", "layers", "ends"),
    [("Et*2|t*2|t*2|t*2L", 2, 1), ("E|t*3|t*3|t*2L", 3, 0), ("Et*5|t|t|tL", 5, 1)],
)
def test_the_neediest_stage_holds_its_own_layers(text, layers, ends):
    strategy = Megatron3D(stage_layout=text, distributed_optimizer=False)
    terms = memory_terms(strategy, MODEL, JOB, 1, data=2, pipeline=4)
    of_layer = 12 * 256 * 256 + 13 * 256
    expected = 2.0 * (layers * of_layer + ends * MODEL.head.parameters)
    assert terms["weights"] == pytest.approx(expected, rel=0.01)


def test_stages_alike_are_planned_once():
    plan = plan_of(Megatron3D(stage_layout="Et|t|t|tt|t|t|tL"), MODEL, JOB, 1, pipeline=7)
    assert plan.pipeline.places == (0, 1, 1, 3, 1, 1, 2)
    assert len(plan.pipeline.others) == 1
    names = [part.name for part in plan.parts]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_layout": "Et*4|t*4L"}, "the 32 layers of llama3-8b, not 8"),
        ({"stage_layout": "Et*16|t*16mL"}, "m as often as --mtp-modules says, 0, not 1"),
        ({"stage_layout": "Et*16|t*16L", "mtp_modules": 2}, "--mtp-modules says, 2, not 0"),
        ({"stage_layout": "Et*31|tL", "strategy": "axonn"}, "strategy axonn does not have"),
    ],
)
def test_layouts_of_other_models_and_strategies_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build_search("llama3-8b", 8, **{**MEGATRON, **options})


def test_stages_are_spread_over_all_ranks_of_a_pipeline():
    with pytest.raises(AxonnTuneError, match="layout's 3 stages not divisible by pipeline"):
        predict("llama3-8b", 8, "data=4,pipeline=2", stage_layout="Et*16|t*15|tL", **MEGATRON)


def test_megatron_core_gets_the_layout_as_one_word():
    files = axonn_tune.launch(
        "llama3-8b", 8, grid="data=2,pipeline=4", stage_layout="Et*8|(t*8|)*2, t*8L", **MEGATRON
    )
    text = "\n".join(files.values())
    assert "--pipeline-model-parallel-layout 'Et*8|(t*8|)*2,t*8L'" in text
    assert "--num-virtual-stages" not in text
