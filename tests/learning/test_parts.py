"""A trace tells the parts of a step apart, and what it tells is learned."""

import math
from dataclasses import replace

import numpy as np
import pytest
from traces import traced_as_planned

from axonn_tune.api.searching import build_search
from axonn_tune.io.presets import load_machine
from axonn_tune.learning.fit import fitted
from axonn_tune.learning.learn import Trial, learn
from axonn_tune.learning.parts import parts_of
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.learnable import improved, learnable
from axonn_tune.spec.traced import Trace
from axonn_tune.step.explain import explain

STATED = load_machine("dgx-h100")
KEYS = [resource.key for resource in learnable(STATED)]
SLOWER = {"attention": 0.7, "memory_kernels": 0.8, "nvlink.bandwidth": 0.85}
TRUTH = improved(STATED, [math.log(SLOWER.get(key, 1.0)) for key in KEYS])


def explanation_on(machine):
    search = build_search(
        "llama3-8b",
        8,
        machine,
        strategy="zero3",
        engine="fsdp2",
        global_batch=16,
        micro_batch=2,
        recompute="none",
        include_oom=True,
    )
    return explain(best_of_layout(search, "shard=8"), with_sensitivities=False)


@pytest.fixture(scope="module")
def stated():
    return explanation_on(STATED)


@pytest.fixture(scope="module")
def trace():
    """The trace of a program that does what the plan says, on the slower machine."""
    return traced_as_planned(explanation_on(TRUTH), {"shard": 8}, slower=1.0)


@pytest.fixture(scope="module")
def learnt(stated, trace):
    # The step is as predicted, so that nothing but the trace tells what is slower.
    prediction = stated.prediction
    return learn(STATED, [Trial("row 1", prediction, prediction.step_seconds, trace)])


def test_each_part_is_as_much_slower_as_its_resource(stated, trace):
    parts = parts_of(stated, trace)
    rates = {name: part.predicted_seconds / part.traced_seconds for name, part in parts.items()}
    assert rates.pop("product") == pytest.approx(1.0, rel=0.01)
    assert rates.pop("attention") == pytest.approx(0.7, rel=0.01)
    assert rates.pop("attention, backward") == pytest.approx(0.7, rel=0.01)
    assert rates.pop("memory-bound") == pytest.approx(0.8, rel=0.05)
    assert rates.pop("optimizer") == pytest.approx(0.8, rel=0.05)
    large = [rate for name, rate in rates.items() if name.startswith("all_gather")]
    assert large and all(rate == pytest.approx(0.85, abs=0.05) for rate in large)


def test_what_a_trace_tells_apart_is_learned_apart(learnt):
    factors = {factor.key: factor.factor for factor in learnt.learned.factors}
    for key, slower in SLOWER.items():
        assert factors[key] == pytest.approx(slower, rel=0.06)
    assert factors["products"] == pytest.approx(1.0, abs=0.02)
    assert factors["infiniband.bandwidth"] == 1.0


def test_the_record_names_every_part(learnt, stated, trace):
    names = [run.name for run in learnt.learned.traced]
    assert names == [f"row 1: {name}" for name in parts_of(stated, trace)]
    assert [run.name for run in learnt.learned.runs] == ["row 1"]


def test_parts_that_fit_do_not_count_as_steps(learnt):
    """At best they tell the factors, so that the one step that fits tells the scatter alone."""
    of_known_factors = fitted(np.zeros((1, 1)), np.zeros(1), np.ones(1))
    assert learnt.learned.scatter_fraction > of_known_factors.scatter


def test_waits_in_a_collective_do_not_count(stated, trace):
    """In the second step each collective waits for a second."""
    waiting = tuple(
        replace(op, seconds=op.seconds + 1.0) if op.is_collective else op for op in trace.operations
    )
    of_two = parts_of(stated, Trace(trace.operations + waiting, 2))
    for name, part in parts_of(stated, trace).items():
        assert of_two[name].traced_seconds == pytest.approx(part.traced_seconds)


def test_buckets_of_other_sizes_tell_nothing(stated, trace):
    cut = tuple(
        replace(op, nbytes=op.nbytes / 3) if op.is_collective else op for op in trace.operations
    )
    kinds = set(parts_of(stated, Trace(cut, 1)))
    assert kinds == {"product", "attention", "attention, backward", "memory-bound", "optimizer"}
