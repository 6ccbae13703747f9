"""A switch that a strategy does not have is refused, or left to those that have it."""

from dataclasses import fields, replace

import pytest

from axonn_tune.api.comparing import comparison
from axonn_tune.api.searching import build_search
from axonn_tune.cli.report import page_searches
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.report.records import assumptions
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.job import Overlap
from axonn_tune.strategies.named import STRATEGIES, USUAL_ENGINES, strategy_named
from axonn_tune.strategies.switches import Switches, foreign_switches

# Values of switches other than true and false, of which one is not the engine's own.
VALUES = {
    "context_kind": ("ring", "ulysses"),
    "schedule": ("zb-h1",),
    "stage_layout": ("Et|tL",),
    "virtual_stages": (2,),
}
# Changes of a job that make a difference if a strategy has the switch.
CHANGED_JOBS = {
    "oar": {"overlap": Overlap(oar=False)},
    "ors": {"overlap": Overlap(ors=False)},
    "oag": {"overlap": Overlap(oag=False)},
    "keep_gathered_weights": {"keep_gathered_weights": True},
}
# zero3's usual engine refuses some of its switches.
ENGINES = USUAL_ENGINES | {"zero3": "torchtitan-2025"}


@pytest.mark.parametrize("name", [field.name for field in fields(Switches)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_has_the_switches_that_change_it(strategy, name):
    engine = load_engine(ENGINES[strategy])
    of_experts = name == "split_experts"
    usual = strategy_named(strategy, Switches(), engine, of_experts)
    is_foreign, changes = set(), False
    for value in VALUES.get(name, (True, False)):
        switches = Switches(**{name: value})
        if switches != Switches():
            is_foreign.add(foreign_switches(switches, strategy) == [name])
        if is_refused_by_engine(strategy, name, value):
            continue
        changes |= strategy_named(strategy, switches, engine, of_experts) != usual
    # The overlap of a grid's reduction is the job's.
    changes |= name == "overlap_grad_reduce" and strategy.startswith("axonn")
    changes |= name in CHANGED_JOBS and changes_a_step(strategy, CHANGED_JOBS[name])
    assert is_foreign == {not changes}


def changes_a_step(strategy, change):
    """Whether a change of the job moves the time of any layout of a strategy."""
    search = build_search(
        "5b", 16, strategy=strategy, global_batch=32, recompute="none", include_oom=True
    )
    search = replace(search, exhaustive=True, every_configuration=True)
    scenario = search.scenario
    other = replace(search, scenario=replace(scenario, job=replace(scenario.job, **change)))
    seconds = [sorted(rank_candidates(each).step_seconds) for each in (search, other)]
    return seconds[0] != seconds[1]


def is_refused_by_engine(strategy, name, value):
    """Whether torchtitan of 2025, which rings, refuses a kind of context parallelism."""
    return (strategy, name, value) == ("zero3", "context_kind", "ulysses")


def test_switches_that_are_not_set_are_foreign_to_no_strategy():
    for strategy in STRATEGIES:
        assert not foreign_switches(Switches(), strategy)
        assert not foreign_switches(Switches(virtual_stages=1), strategy)


def test_a_search_refuses_a_switch_of_other_strategies():
    message = "reduces_once is True, which strategy axonn does not have; allowed with it: zero3"
    with pytest.raises(InputError, match=message):
        build_search("llama3-8b", 8, reduces_once=True)


@pytest.mark.parametrize(
    ("option", "strategy"),
    [
        ({"keep_gathered_weights": True}, "zero3"),
        ({"oar": True}, "zero3"),
        ({"ors": False}, "megatron"),
        ({"oag": True}, "zero1"),
    ],
)
def test_what_a_job_asks_in_vain_of_a_strategy_is_refused(option, strategy):
    (name,) = option
    with pytest.raises(InputError, match=f"{name} is .* which strategy {strategy} does not have"):
        build_search("llama3-8b", 8, strategy=strategy, **option)


def test_a_comparison_keeps_gathered_weights_where_they_can_be_kept():
    bests = comparison("5b", 16, strategies=["axonn", "zero3"], keep_gathered_weights=True)
    kept = {
        best.search.scenario.strategy.name: assumptions(best.search)["keep_gathered_weights"]
        for best in bests.best
    }
    assert kept == {"axonn": True, "zero3": False}


@pytest.mark.parametrize(
    ("switch", "value", "owner"),
    [("schedule", "zb-h1", "megatron"), ("reduces_once", True, "zero3")],
)
def test_a_comparison_gives_a_switch_to_the_strategies_that_have_it(switch, value, owner):
    def strategies_with(**options):
        bests = comparison("llama3-8b", 8, "dgx-h100", ["axonn", "megatron", "zero3"], **options)
        searched = [best.search.scenario.strategy for best in bests.best]
        return {strategy.name: strategy for strategy in searched}

    usual, other = strategies_with(), strategies_with(**{switch: value})
    assert [name for name in usual if usual[name] != other[name]] == [owner]


def test_a_comparison_refuses_a_switch_that_none_has():
    with pytest.raises(InputError, match="which strategy axonn or zero1 does not have"):
        comparison("llama3-8b", 8, strategies=["axonn", "zero1"], sends_once=True)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"sends_once": True}, "sends_once is True, and model llama3-8b has no experts"),
        ({"overlaps_experts": True}, "overlaps_experts is True"),
        ({"split_experts": True}, "split_experts is True"),
        ({"expert_imbalance": 1.3}, "expert_imbalance is 1.3"),
        ({"lora_dropout": True}, "lora_dropout is True, and no adapters are trained"),
        ({"lora_targets": "attention"}, "allowed with it: lora_rank"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(option, said):
    with pytest.raises(InputError, match=said):
        build_search("llama3-8b", 8, "dgx-h100", strategy="megatron", **option)


def test_a_page_of_all_strategies_gives_each_its_own_switches():
    searches = page_searches("all", model="llama3-8b", gpus=8, reduces_once=True)
    reducing = {search.scenario.strategy.name for search in searches if reduces_once(search)}
    assert reducing == {"zero3"}
    assert len(searches) > 1


def reduces_once(search):
    zero = search.scenario.strategy.engine.zero
    return replace(zero, reduces_once=True) == zero


@pytest.mark.parametrize(
    ("engine", "culprit"),
    [
        ("megatron-core", "precision is bf16, .* engine megatron-core: --precision fp8-delayed, "),
        (
            "torchtitan-2025",
            "precision is bf16, .* engine torchtitan-2025: --precision fp8-current$",
        ),
        ("nanotron", "engine nanotron has no precision with weights in a low format"),
    ],
)
def test_weights_are_low_only_beside_products_of_low_operands(engine, culprit):
    strategy = load_engine(engine).strategies[0]
    options = {"machine": "dgx-h100", "engine": engine, "strategy": strategy}
    with pytest.raises(InputError, match=rf"^--low-weights: {culprit}"):
        build_search("llama3-8b", 8, low_weights=True, **options)
    build_search("llama3-8b", 8, low_weights=False, **options)
    if engine != "nanotron":
        build_search("llama3-8b", 8, low_weights=True, precision="fp8", **options)


def test_weights_are_low_only_with_the_distributed_optimizer():
    options = {"strategy": "megatron", "precision": "fp8", "low_weights": True}
    with pytest.raises(
        InputError, match=r"^--low-weights .*; leave out --no-distributed-optimizer"
    ):
        build_search("llama3-8b", 8, distributed_optimizer=False, **options)
