"""A machine learns from runs on another machine, which the runs alone describe."""

import math
from dataclasses import replace

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine, load_machine
from axonn_tune.io.yaml_files import load_yaml, save_yaml
from axonn_tune.learning.learn import LEAST_SPREAD, Trial, learn, stated_spreads
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.learnable import improved, learnable
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.quantity import Quantity
from axonn_tune.step.predict import predict
from axonn_tune.step.spread import spread_of

LAYOUTS = ("tensor=8", "tensor=4,data=2", "tensor=2,data=4", "tensor=2,pipeline=4", "pipeline=8")
STATED = load_machine("dgx-h100")
KEYS = [resource.key for resource in learnable(STATED)]


def with_factors(**log_factors):
    """The machine whose resources differ by these logarithms."""
    return improved(STATED, [log_factors.get(key, 0.0) for key in KEYS])


def prediction(layout, n_gpus=8, engine="megatron-core"):
    strategy = "megatron" if engine == "megatron-core" else "zero3"
    search = build_search(
        "llama3-8b",
        n_gpus,
        STATED,
        strategy=strategy,
        engine=engine,
        global_batch=64,
        micro_batch=1,
        recompute="none",
        include_oom=True,
    )
    return best_of_layout(search, layout)


def trials(truth, layouts=LAYOUTS, **options):
    """Runs that took as long as they take on the machine `truth`."""
    runs = []
    for layout in layouts:
        predicted = prediction(layout, **options)
        trial = Trial(layout, predicted, predicted.step_seconds)
        runs.append(replace(trial, measured_seconds=trial.seconds_on(truth)))
    return runs


@pytest.fixture(scope="module")
def truth():
    return with_factors(products=-0.1, attention=-0.3, memory_kernels=-0.2)


@pytest.fixture(scope="module")
def learnt(truth):
    return learn(STATED, trials(truth))


def test_the_runs_are_predicted_better(learnt):
    runs = learnt.learned.runs
    assert min(abs(run.stated_error) for run in runs) > 0.05
    assert max(abs(run.learned_error) for run in runs) < 0.04


def test_a_layout_that_nobody_ran_is_predicted_better(truth, learnt):
    (other,) = trials(truth, ["tensor=4,pipeline=2"])
    before = abs(other.prediction.step_seconds / other.measured_seconds - 1.0)
    assert abs(other.seconds_on(learnt) / other.measured_seconds - 1.0) < before / 3.0


def test_a_node_says_nothing_of_the_network(learnt):
    assert learnt.links[-1] == STATED.links[-1]
    factors = {factor.key: factor for factor in learnt.learned.factors}
    assert factors["infiniband.bandwidth"].factor == 1.0
    assert factors["infiniband.bandwidth"].gain_fraction == pytest.approx(0.0)


def test_what_was_learned_says_from_what_and_how_sure_it_is(learnt):
    stated = STATED.kernels.flash_forward_fraction
    learned = learnt.kernels.flash_forward_fraction
    assert learned.origin == "fitted"
    before = f"before {stated.value:.4g}, {stated.origin}: {stated.source}"
    assert learned.source == f"learned from 5 runs of Megatron-Core; {before}"
    factor = learnt.learned.factors[KEYS.index("attention")]
    assert learned.value == pytest.approx(stated.value * factor.factor)
    assert learned.spread_fraction == factor.spread < factor.stated_spread


def test_a_bad_run_in_five_is_named_and_teaches_nothing(truth):
    runs = trials(truth)
    runs[2] = replace(runs[2], measured_seconds=1.8 * runs[2].measured_seconds)
    spoilt = learn(STATED, runs)
    assert [run.name for run in spoilt.learned.runs if run.is_set_aside] == [LAYOUTS[2]]
    others = learn(STATED, runs[:2] + runs[3:])
    rates = [machine.kernels.flash_forward_fraction.value for machine in (spoilt, others)]
    assert rates[0] == pytest.approx(rates[1])


def test_the_host_is_as_uncertain_as_the_number_on_which_the_steps_rest():
    """An engine without a time of its own rests on the machine's; others on an assumed factor."""
    machine = load_machine("a100-800g")
    measured = Quantity(80e-6, "measured", "a profiler")
    machine = replace(machine, kernels=replace(machine.kernels, issue_seconds=measured))
    spreads = {
        name: stated_spreads(machine, load_engine(name))[KEYS.index("host")]
        for name in ("megatron-2022", "nanotron")
    }
    assert spreads["megatron-2022"] == LEAST_SPREAD["host"]
    assert spreads["nanotron"] == spread_of(machine.kernels.issue_factor)


def test_products_that_were_timed_are_as_certain_to_learn_as_to_search():
    """Measured products stand beside an assumed rate, as in a profile into which logs were read."""
    rate = replace(STATED.gemm.sustained_fraction, origin="assumed", spread_fraction=0.0)
    machine = replace(STATED, gemm=replace(STATED.gemm, sustained_fraction=rate))
    products = KEYS.index("products")
    assert stated_spreads(machine, load_engine("megatron-core"))[products] == 0.05
    untimed = replace(machine, gemm=replace(machine.gemm, points=()))
    assert stated_spreads(untimed, load_engine("megatron-core"))[products] == 0.30


def test_runs_as_predicted_change_no_number():
    learnt = learn(STATED, trials(STATED, LAYOUTS[:3]))
    assert [factor.factor for factor in learnt.learned.factors] == pytest.approx([1.0] * len(KEYS))


def test_the_interval_of_a_machine_that_has_learned_is_its_own(learnt):
    """It holds at least what the runs scatter, and no track record of others."""
    stated = prediction("tensor=8")
    scenario = replace(stated.scenario, machine=learnt)
    spread = predict(scenario, stated.configuration, with_interval=True).spread_fraction
    assert learnt.learned.scatter_fraction <= spread < 0.12
    assert stated.scenario.track_record_spread > 0.0


def test_a_profile_that_has_learned_is_read_back(tmp_path, learnt):
    path = tmp_path / "mine.yaml"
    save_yaml(path, learnt)
    again = load_yaml(path, Machine)
    assert again.learned == learnt.learned
    assert again.gemm.sustained_fraction == learnt.gemm.sustained_fraction


def test_a_record_that_does_not_say_how_sure_its_scatter_is_is_read(tmp_path, learnt):
    path = tmp_path / "mine.yaml"
    save_yaml(path, learnt)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "scatter_freedom" not in line))
    assert load_yaml(path, Machine).learned == replace(learnt.learned, scatter_freedom=math.inf)


@pytest.mark.parametrize("freedom", [0.0, 0.5, -1.0, math.nan])
def test_less_than_one_degree_of_freedom_is_refused(learnt, freedom):
    with pytest.raises(InputError, match=r"scatter_freedom .*allowed: 1 to inf"):
        replace(learnt.learned, scatter_freedom=freedom)


def test_learning_twice_is_refused(learnt, truth):
    with pytest.raises(
        InputError, match=r"has already learned from 5 runs; allowed: .* \(dgx-h100\)"
    ):
        learn(learnt, trials(truth))


def test_two_engines_are_refused(truth):
    runs = trials(truth, ["tensor=8"]) + trials(truth, ["shard=8"], engine="fsdp2")
    with pytest.raises(InputError, match="allowed: runs of one engine"):
        learn(STATED, runs)


def test_the_host_of_an_engine_is_slower_by_the_machines_factor():
    fsdp = prediction("shard=8", engine="torchtitan").scenario
    slow = replace(fsdp, machine=with_factors(host=-math.log(2.0)))
    of_host = fsdp.strategy.engine.issue_seconds or fsdp.machine.kernels.issue_seconds
    assert slow.issue_seconds == pytest.approx(2.0 * of_host.value)
