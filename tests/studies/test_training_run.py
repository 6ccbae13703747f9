"""A whole training run: Daly's formulas against a simulation, and what follows from a step."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import axonn_tune
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.io.presets import load_model
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Facility
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.tuning import Frozen
from axonn_tune.strategies.megatron.muon_matrices import Matrices
from axonn_tune.studies.limits import Limits
from axonn_tune.studies.run_plan import meet_deadline, spend_budget
from axonn_tune.studies.training_run import Failures, checkpoint_bytes, muon_elements, training_run

DAY = 86400.0


def played_seconds(failures, work, random):
    """One run, event by event: intervals of work with a checkpoint each, failures at random."""
    interval, clock, done = failures.interval_seconds, 0.0, 0.0
    while done < work:
        segment = min(interval, work - done) + failures.checkpoint_seconds
        until_failure = random.exponential(failures.mtbf_seconds)
        if until_failure >= segment:
            clock += segment
            done += min(interval, work - done)
            continue
        clock += until_failure
        # A failure during the restart begins it anew.
        while (until := random.exponential(failures.mtbf_seconds)) < failures.restart_seconds:
            clock += until
        clock += failures.restart_seconds
    return clock


@pytest.mark.parametrize(
    ("mtbf", "checkpoint", "restart"), [(1000.0, 5.0, 20.0), (300.0, 10.0, 30.0), (1e5, 1.0, 1.0)]
)
def test_expected_time_is_that_of_runs_played_event_by_event(mtbf, checkpoint, restart):
    failures = Failures(mtbf, checkpoint, restart)
    random = np.random.default_rng(0)
    work = 100 * failures.interval_seconds
    runs = [played_seconds(failures, work, random) for _ in range(300)]
    error = np.std(runs) / math.sqrt(len(runs))
    assert failures.wall_seconds(work) == pytest.approx(np.mean(runs), abs=4 * error, rel=2e-3)


@pytest.mark.parametrize(("mtbf", "checkpoint"), [(1e4, 5.0), (3600.0, 60.0), (100.0, 10.0)])
def test_the_interval_is_the_best_one(mtbf, checkpoint):
    failures = Failures(mtbf, checkpoint, 60.0)
    best = failures.interval_seconds

    def overhead(interval):
        return math.expm1((interval + checkpoint) / mtbf) / interval

    tried = best * np.geomspace(0.2, 5.0, 2001)
    assert overhead(best) <= min(overhead(i) for i in tried) * (1 + 1e-3)


def test_more_failures_take_longer_and_too_many_never_end():
    walls = [Failures(mtbf, 10.0, 60.0).wall_seconds(1e6) for mtbf in (1e7, 1e5, 1e3, 1e2)]
    assert walls == sorted(walls) and walls[0] < 1.01e6
    assert Failures(1.0, 10.0, 600.0).wall_seconds(1e6) == math.inf


@pytest.mark.parametrize("failures", [Failures(1e5, 10.0, 60.0), Failures(900.0, 30.0, 90.0)])
@pytest.mark.parametrize("work", [1.0, 100.0, 1e3, 1e4, 1e7])
def test_the_work_of_a_time_is_the_inverse_of_the_time_of_work(failures, work):
    assert failures.work_seconds(failures.wall_seconds(work)) == pytest.approx(work, rel=1e-9)


def test_no_work_is_done_in_the_time_of_a_checkpoint_or_between_too_many_failures():
    assert Failures(1e5, 10.0, 60.0).work_seconds(9.0) == 0.0
    assert Failures(1.0, 10.0, 600.0).work_seconds(1e9) == 0.0


@pytest.fixture(scope="module")
def search():
    return build_search("5b", 64, global_batch=512)


def test_a_run_is_its_steps_with_failures(search):
    run = training_run(search, 1e11)
    assert run.n_steps == math.ceil(1e11 / (512 * 2048))
    assert run.work_seconds == pytest.approx(run.n_steps * run.best.step_seconds)
    assert run.wall_seconds == pytest.approx(run.work_seconds / run.useful_fraction)
    low, high = run.wall_seconds_range
    assert low < run.wall_seconds < high
    assert run.node_hours == pytest.approx(16 * run.wall_seconds / 3600)
    assert run.gpu_hours == pytest.approx(4 * run.node_hours)
    power = search.scenario.machine.facility.node_power_watts.value
    assert run.energy_joules == pytest.approx(run.node_hours * 3600 * power)
    assert run.cost is None
    assert run.failures.mtbf_seconds == search.scenario.machine.facility.gpu_mtbf_seconds.value / 64


def test_the_chance_to_end_in_a_time_is_that_of_the_step_interval(search):
    run = training_run(search, 1e11)
    low, high = run.wall_seconds_range
    assert run.chance_within(low) == pytest.approx(0.05, abs=1e-3)
    assert run.chance_within(run.wall_seconds) == pytest.approx(0.5, abs=1e-9)
    assert run.chance_within(high) == pytest.approx(0.95, abs=1e-3)
    assert run.chance_within(1.0) == 0.0
    few, many = run.tokens_within_range(run.wall_seconds)
    slow, fast = run.best.step_seconds_interval
    assert few == pytest.approx(1e11 * run.best.step_seconds / fast, rel=1e-3)
    assert many == pytest.approx(1e11 * run.best.step_seconds / slow, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("limits", [Limits(None, 1130.0), Limits(2 * DAY, None, 4800.0)])
def test_a_budget_is_spent_as_no_other_count_would(search, limits):
    counts = [4 * 2**power for power in range(11)] + [12 * 2**power for power in range(9)]
    tried = []
    for n_gpus in counts:
        with suppress(NoCandidateError):
            tried.append(training_run(search.on_gpus(n_gpus), 1e11))
    within = [run for run in tried if run.wall_seconds <= limits.seconds(run.scenario)]
    soonest = min(run.wall_seconds for run in within)
    assert spend_budget(search, 1e11, limits)[-1].wall_seconds == soonest
    most = max(run.tokens_within(limits.seconds(run.scenario)) for run in tried)
    assert spend_budget(search, None, limits)[-1].tokens == most
    assert spend_budget(search, 1e13, limits)[-1].tokens == most


@pytest.mark.parametrize(
    ("name", "matrices"),
    [
        # 32 layers of 4096 x 6144, 4096 x 4096, 4096 x 28672 and 14336 x 4096.
        ("llama3-8b", 32 * 4096 * (6144 + 4096 + 28672 + 14336)),
        # 48 layers: attention, a router of 128, and 128 experts of 768.
        ("qwen3-30b-a3b", 48 * 2048 * (5120 + 4096 + 128 + 128 * 3 * 768)),
    ],
)
def test_a_checkpoint_holds_the_moments_of_the_optimizer(name, matrices):
    """Adam has two moments, AdEMAMix three, and Muon one of each element of its matrices."""
    model, job = load_model(name), Job(64, 512, 4096)
    adamw = checkpoint_bytes(model, job)
    assert adamw == pytest.approx(13.8e12 / 1008e9 * model.parameters)
    third = checkpoint_bytes(model, replace(job, optimizer="ademamix"))
    assert third - adamw == pytest.approx(4 * model.parameters)
    assert adamw - checkpoint_bytes(model, replace(job, optimizer="muon")) == 4 * matrices
    assert checkpoint_bytes(model, replace(job, moments="bf16")) == adamw


@pytest.mark.parametrize("name", ["20b", "llama3-8b", "deepseek-v3", "gpt-oss-20b"])
@pytest.mark.parametrize("options", [{}, {"mtp_modules": 1}, {"frozen": Frozen(True, 2)}])
def test_muons_matrices_are_those_of_a_stage_that_is_the_whole_model(name, options):
    model, job = load_model(name), Job(1, 8, 1024, **options)
    kinds = Matrices.of(model)
    layers = range(job.frozen.n_layers, model.n_layers)
    layers = [*layers, *[model.n_layers - 1] * job.mtp_modules]
    dense, experts = kinds.orders(model, layers, model.n_experts)
    expected = [kinds.dense[place] for place in dense] + [kinds.experts[each] for each in experts]
    expected += kinds.module * job.mtp_modules + kinds.positions * job.trains_embedding
    assert muon_elements(model, job) == sum(kind.linear.parameters for kind in expected)


def test_money_and_missing_power(search):
    price = Quantity(10.0, "assumed", "test")
    facility = Facility(node_hour_price=price, currency="EUR")
    priced = search.on(replace(search.scenario.machine, facility=facility))
    run = training_run(priced, 1e11)
    assert run.cost == pytest.approx(10 * run.node_hours) and run.energy_joules is None
    with pytest.raises(InputError, match="currency is empty"):
        Facility(node_hour_price=price)


@pytest.mark.slow
def test_the_deadline_is_met_by_the_first_count_that_does(search):
    runs = meet_deadline(search, 1e11, 3 * DAY)
    assert runs[-1].wall_seconds <= 3 * DAY
    assert all(run.wall_seconds > 3 * DAY for run in runs[:-1])
    counts = [run.search.scenario.job.n_gpus for run in runs]
    assert counts == sorted(counts) and all(count % 4 == 0 for count in counts)
    for run in runs:
        alone = search.on_gpus(run.search.scenario.job.n_gpus)
        assert training_run(alone, 1e11).wall_seconds == run.wall_seconds


def test_nodes_of_any_size_are_counted_whole(search):
    """With five GPUs a node, no power of two is a whole number of nodes."""
    machine = search.scenario.machine
    links = (machine.links[0], replace(machine.links[1], unit_ranks=5))
    machine = replace(machine, facility=Facility(), ranks_per_node=5, links=links)
    tiny = build_search("tiny", 1, machine)
    for runs in (meet_deadline(tiny, 1e9, DAY), spend_budget(tiny, 1e9, Limits(None, 10.0))):
        counts = [run.scenario.job.n_gpus for run in runs]
        assert counts and all(count % 5 == 0 for count in counts)


def test_each_count_of_a_plan_has_a_batch_that_it_can_share():
    runs = meet_deadline(build_search("5b", 1), 1e12, 8 * DAY)
    batches = {run.scenario.job.n_gpus: run.scenario.job.global_batch for run in runs}
    assert {192, 256} <= set(batches)
    assert all(batch % n_gpus == 0 for n_gpus, batch in batches.items())
    work = [n_gpus * run.work_seconds for n_gpus, run in zip(batches, runs, strict=True)]
    assert max(work) < 1.05 * min(work)


def test_a_deadline_that_the_machine_cannot_meet_says_what_it_has(search):
    with pytest.raises(InputError, match="there are 6144"):
        meet_deadline(search, 1e15, DAY)
    with pytest.raises(InputError, match="come nearest with"):
        meet_deadline(search, 3e12, DAY)


def test_a_run_without_tokens_has_twenty_for_each_parameter():
    without = axonn_tune.plan("20b", 64)
    given = axonn_tune.plan("20b", 64, tokens=20 * load_model("20b").parameters)
    assert without.equals(given)


def test_gpus_that_are_named_are_planned_for_and_others_are_found():
    named = axonn_tune.plan("5b", 64, tokens=1e11, deadline_seconds=DAY)
    assert list(named["gpus"]) == [64] and named["deadline_probability"][0] < 0.01
    found = axonn_tune.plan("5b", tokens=1e11, node_hours=1e3)
    assert found["node_hours"].iloc[-1] <= 1e3
    with pytest.raises(InputError, match="--node-hours"):
        axonn_tune.plan("5b")
    with pytest.raises(InputError, match="node_hours is -1"):
        axonn_tune.plan("5b", 64, node_hours=-1)
