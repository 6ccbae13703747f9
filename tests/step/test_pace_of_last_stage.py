"""A pipeline runs at the pace of its slowest stage, and the last one has GPUs of its own."""

from dataclasses import replace

import numpy as np
import pytest
from worlds import llama, machine_of, quantity

from axonn_tune.cost.prices import slowest_rank_factor
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.player import Player
from axonn_tune.step.predict import predict
from axonn_tune.strategies.megatron.megatron3d import megatron_of

SIGMA = 0.03
N_STAGES, N_REPLICAS, N_MICRO = 8, 64, 32
# A head of nearly a layer's products makes the last of eight stages with a layer each the longest.
MODEL = llama(
    n_layers=8, hidden_size=2048, ffn_hidden_size=8192, n_heads=16, vocab_size=32768, seq_len=1024
)


def predicted(sigma, n_stages=N_STAGES):
    """A step on GPUs whose speed has this deviation, over links that take next to no time."""
    machine = machine_of(jitter=sigma)
    fast = replace(
        machine,
        links=tuple(
            replace(level, bandwidth_bytes_per_s=quantity(1e18), latency_seconds=quantity(0.0))
            for level in machine.links
        ),
    )
    strategy = megatron_of(Engine(), n_virtual=(1,))
    sizes = {"data": N_STAGES * N_REPLICAS // n_stages, "pipeline": n_stages}
    layout = Layout({axis: sizes.get(axis, 1) for axis in strategy.axes.names})
    job = Job(layout.n_ranks, N_MICRO * sizes["data"], MODEL.seq_len)
    scenario = Scenario(MODEL, job, fast, strategy)
    return predict(scenario, Configuration(layout, micro_batch=1))


def factors():
    """How much slower the slowest of all GPUs is, and the slowest of those of a stage."""
    machine = machine_of(jitter=SIGMA)
    return (
        slowest_rank_factor(machine, N_STAGES * N_REPLICAS),
        slowest_rank_factor(machine, N_REPLICAS),
    )


def test_the_last_stage_waits_for_its_own_slowest_gpu_and_others_for_the_slowest_of_all():
    equal, drawn = (Player(predicted(sigma)).stage_seconds() for sigma in (0.0, SIGMA))
    assert equal[-1] > 1.3 * equal[1]
    of_all, of_stage = factors()
    expected = [of_all] * (N_STAGES - 1) + [of_stage]
    np.testing.assert_allclose(np.divide(drawn, equal), expected, rtol=1e-9)


def test_a_step_is_nearer_to_one_of_drawn_gpus_than_if_all_ran_as_the_slowest():
    """Each replica runs at the pace of its longest stage, and the step waits for the last replica.

    Drawn GPUs are still faster: the expected largest deviate lies below its asymptote, and a
    micro-batch that fills the pipeline meets mean stages, too.
    """
    equal = predicted(0.0)
    stages = np.array(Player(equal).stage_seconds())
    rng = np.random.default_rng(0)
    slow = 1.0 + SIGMA * rng.standard_normal((200, N_REPLICAS, N_STAGES))
    passes = slow * stages
    of_replica = (N_MICRO - 1) * passes.max(axis=2) + passes.sum(axis=2)
    mean = of_replica.max(axis=1).mean() / ((N_MICRO - 1) * stages.max() + stages.sum())
    ratio = predicted(SIGMA).step_seconds / equal.step_seconds
    of_all, _ = factors()
    assert mean < ratio < mean + 0.65 * (of_all - mean)


def test_without_a_pipeline_all_wait_for_the_slowest_gpu():
    equal, drawn = (predicted(sigma, n_stages=1).step_seconds for sigma in (0.0, SIGMA))
    assert drawn / equal == pytest.approx(factors()[0], rel=1e-6)


def test_an_explanation_has_the_kernels_of_the_last_stage_as_they_run_there():
    equal, drawn = (
        {op.name: op.seconds_per_call for op in explain(predicted(sigma), False).operations}
        for sigma in (0.0, SIGMA)
    )
    of_all, of_stage = factors()
    for name, factor in (("forward.up.gemm", of_stage), ("optimizer.step", of_all)):
        assert drawn[name] / equal[name] == pytest.approx(factor, rel=1e-9)
