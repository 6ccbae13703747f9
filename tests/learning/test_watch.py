"""A slowdown since the baseline is told from noise, and the resource that broke is named."""

import math
from dataclasses import replace

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.io.presets import load_machine
from axonn_tune.learning.learn import Trial
from axonn_tune.learning.watch import drift
from axonn_tune.report.learn import drift_line
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.learnable import learnable

MACHINE = load_machine("dgx-h100")
LAYOUTS = ("tensor=8,data=2", "tensor=4,data=4", "tensor=2,pipeline=8", "data=16")


@pytest.fixture(scope="module")
def baseline():
    search = build_search(
        "llama3-8b",
        16,
        MACHINE,
        strategy="megatron",
        engine="nanotron",
        global_batch=32,
        micro_batch=1,
        recompute="none",
        include_oom=True,
    )
    predictions = [best_of_layout(search, layout) for layout in LAYOUTS]
    # All runs are slower than predicted, as runs are.
    return [Trial(str(p.layout), p, 1.1 * p.step_seconds) for p in predictions]


def on(machine, trials):
    """The runs as they would have been on another machine."""
    return [replace(t, measured_seconds=1.1 * t.seconds_on(machine)) for t in trials]


def changed(trials, factors):
    """The trials with measured times that are so many times as long."""
    return [
        replace(trial, measured_seconds=factor * trial.measured_seconds)
        for trial, factor in zip(trials, factors, strict=True)
    ]


def test_noise_is_no_change(baseline):
    seen = drift(baseline, changed(baseline, (1.01, 0.995, 1.004, 0.99)))
    assert not seen.is_slower and not seen.culprit
    assert seen.error_fraction == pytest.approx(1 / 1.1 - 1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "key",
    [
        "products",
        pytest.param("nvlink.bandwidth", marks=pytest.mark.sweep),
        pytest.param("infiniband.bandwidth", marks=pytest.mark.sweep),
    ],
)
def test_the_resource_that_broke_is_named_with_its_change(baseline, key):
    (broken,) = (resource for resource in learnable(MACHINE) if resource.key == key)
    seen = drift(baseline, on(broken.improved(0.3), baseline))
    assert seen.is_slower
    assert seen.culprit == broken.name
    assert math.log1p(seen.culprit_fraction) == pytest.approx(math.log(0.3), rel=0.25)


def test_one_layout_alone_does_not_tell_why(baseline):
    slower = replace(baseline[0], measured_seconds=1.2 * baseline[0].measured_seconds)
    seen = drift(baseline, [slower, slower])
    assert seen.change_fraction == pytest.approx(0.2)
    assert seen.culprit == ""


def test_a_layout_that_the_baseline_lacks_is_bridged_by_its_prediction(baseline):
    now = [replace(baseline[3], measured_seconds=1.12 * baseline[3].measured_seconds)]
    assert drift(baseline[:3], now).change_fraction == pytest.approx(0.12)


def test_a_slowdown_does_not_hide_behind_a_larger_gain(baseline):
    seen = drift(baseline, changed(baseline, (1.15, 0.8, 1.0, 1.0)))
    assert seen.is_slower and seen.is_faster
    line = drift_line(seen)
    assert line.startswith(
        "1 of 4 runs slower by up to 15.0 % and 1 of 4 runs faster by up to 20.0 %"
    )


def test_a_slowdown_of_a_few_runs_is_not_one_of_all_and_no_resource_is_blamed(baseline):
    """No resource slows one layout by a quarter and its neighbours not at all."""
    seen = drift(baseline, changed(baseline, (1.0, 1.25, 1.0, 1.0)))
    assert (seen.n_slower, seen.n_faster, seen.culprit) == (1, 0, "")
    line = drift_line(seen)
    assert line.startswith("1 of 4 runs slower by up to 25.0 % than the baseline; no change of one")


@pytest.mark.parametrize("slowest", [0, 2])
def test_the_run_that_became_slower_most_is_named(baseline, slowest):
    factors = [1.3 if index == slowest else 1.1 for index in range(4)]
    line = drift_line(drift(baseline, changed(baseline, factors)))
    assert f", most in {baseline[slowest].name}; predicted" in line
