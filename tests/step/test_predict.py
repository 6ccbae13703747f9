"""One configuration is predicted without a search, and refused for what a search would refuse."""

from dataclasses import replace

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.search.rank import only_configuration, rank_candidates
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import Layout, grid_layout, parse_layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict, predict_each
from axonn_tune.step.prediction import hardware_flops


@pytest.fixture(scope="module")
def search():
    return build_search("20b", 32, global_batch=64, recompute="full")


def test_a_prediction_is_the_one_of_the_search(search):
    best = rank_candidates(search).prediction(0)
    alone = predict(search.scenario, best.configuration)
    assert alone.step_seconds == pytest.approx(best.step_seconds, rel=1e-13)


@pytest.mark.parametrize(("strategy", "n_depths"), [("axonn", 1), ("megatron", 6)])
def test_configurations_are_predicted_together_as_one_by_one(strategy, n_depths):
    search = build_search("20b", 32, global_batch=64, strategy=strategy, include_oom=True)
    ranking = rank_candidates(search)
    configurations = [ranking.table.configuration(row) for row in range(0, len(ranking), 4)]
    together = predict_each(search.scenario, configurations)
    alone = [predict(search.scenario, configuration) for configuration in configurations]
    assert [p.configuration for p in together] == configurations
    assert len({p.layout.n_stages for p in alone}) == n_depths
    for number in ("step_seconds", "memory_bytes", "bubble_seconds", "n_microsteps"):
        expected = [getattr(prediction, number) for prediction in alone]
        assert [getattr(p, number) for p in together] == pytest.approx(expected, rel=1e-12)


def test_a_step_and_whether_its_hosts_run_ahead_follow_from_one_plan(monkeypatch):
    """Nanotron's allocator holds more where they do."""
    words = {"strategy": "megatron", "engine": "nanotron", "machine": "aws-p5-2024"}
    held = build_search("20b", 32, global_batch=64, include_oom=True, **words)
    layout = parse_layout("tensor=4,pipeline=2,data=4", held.scenario.strategy.axes)
    planned = []
    plan = Scenario.plan

    def counted(scenario, table):
        planned.append(table)
        return plan(scenario, table)

    monkeypatch.setattr(Scenario, "plan", counted)
    assert predict(held.scenario, Configuration(layout)).layout.n_stages == 2
    assert len(planned) == 1


def test_a_search_that_chooses_nothing_has_one_configuration(search):
    layout = grid_layout(2, 2, 2, 4)
    held = search.of_layout(layout)
    assert only_configuration(held) is None
    fixed = replace(held, constraints=replace(held.constraints, micro_batch=2))
    assert only_configuration(fixed) == Configuration(layout, micro_batch=2, recompute="full")
    assert only_configuration(replace(fixed, include_oom=False)) is None
    assert only_configuration(replace(fixed, recomputes=("none", "full"))) is None


@pytest.mark.parametrize(
    ("configuration", "reason"),
    [
        (Configuration(grid_layout(2, 2, 2, 2)), "it has 16 ranks, not 32"),
        (Configuration(grid_layout(1, 32, 1, 1)), "attention heads"),
        (Configuration(grid_layout(1, 1, 16, 2), micro_batch=4), "micro-batch 4 does not divide"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_the_rule(search, configuration, reason):
    with pytest.raises(InputError, match=reason):
        predict(search.scenario, configuration)


def test_stages_that_cannot_be_cut_are_refused():
    scenario = build_search("20b", 32, global_batch=64, strategy="megatron").scenario
    layout = parse_layout("tensor=4,pipeline=8", scenario.strategy.axes)
    with pytest.raises(InputError, match="3 virtual stages"):
        predict(scenario, Configuration(layout, n_virtual=3))


def test_an_interval_is_predicted_where_it_is_asked_for(search):
    configuration = Configuration(grid_layout(1, 1, 16, 2))
    plain = predict(search.scenario, configuration)
    assert (plain.spread_fraction, plain.p_best) == (None, None)
    precise = predict(search.scenario, configuration, with_interval=True)
    assert precise.spread_fraction > 0.0 and precise.p_best == 1.0


@pytest.mark.parametrize("expert", [3, 16])
def test_experts_that_no_ranks_share_evenly_are_refused(expert):
    search = build_search("mixtral-8x7b", 16 * expert, "dgx-h100", strategy="megatron")
    layout = Layout(
        {"tensor": 1, "context": 1, "data": 16 * expert, "pipeline": 1, "expert": expert}
    )
    with pytest.raises(InputError, match=r"number of experts \(8\) not divisible by expert"):
        predict(search.scenario, Configuration(layout, micro_batch=1, recompute="none"))


@pytest.mark.parametrize(
    "options",
    [{}, {"samples_per_sequence": 8}, {"lora_rank": 16}, {"frozen": "embedding,layers:0-7"}],
)
def test_recomputed_attention_counts_once_more_and_all_else_as_without(options):
    """Samples, adapters and frozen parts count in MFU whether attention is formed again or not."""
    flops = []
    for recompute in ("none", "selective:core_attn"):
        given = {"recompute": recompute, "global_batch": 64, "strategy": "megatron"}
        scenario = build_search("llama3-8b", 8, "dgx-h100", **given, **options).scenario
        flops.append(hardware_flops(scenario, recompute))
    job, model = scenario.job, scenario.model
    n_layers = model.n_layers - 8 * ("frozen" in options)
    again = 4.0 * job.tokens * job.sample_len * model.hidden_size * n_layers
    assert flops[1] - flops[0] == pytest.approx(again)
