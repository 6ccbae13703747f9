"""Grouped products: one of them is a product, and those that run at a time share the GPU."""

import math
from dataclasses import replace

import numpy as np
import pytest
from worlds import machine_of

from axonn_tune.cost.gemm import Products
from axonn_tune.cost.grouped import GroupedProducts
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.plan import GroupedGemm
from axonn_tune.spec.points import GroupedGemmPoint

MACHINE = machine_of()
BANDWIDTH = MACHINE.gpu.memory_bandwidth_bytes_per_s.value * MACHINE.kernels.memory_fraction.value


def seconds_of(machine, m, n, k, mode="NN", **facts):
    prices = GroupedProducts(machine, "bf16", Products(machine, "bf16"))
    operation = GroupedGemm("", np.array([m], float), float(n), float(k), mode, **facts)
    return float(prices.seconds(operation)[0])


@pytest.mark.parametrize("mode", ["NN", "NT", "TN"])
@pytest.mark.parametrize("preset", ["", "dgx-h100"])
def test_a_group_of_one_is_a_product(mode, preset):
    machine = load_machine(preset) if preset else MACHINE
    alone = Products(machine, "bf16").seconds(1000, 2000, 3000, mode, kernel_tuning=False)
    assert seconds_of(machine, 1000, 2000, 3000, mode, n_groups=1.0) == pytest.approx(float(alone))


def test_products_that_share_the_gpu_leave_less_of_it_idle():
    """Small products one after another take as long as they do alone; at once they fill waves."""
    sizes = 128, 512, 4096
    alone = seconds_of(MACHINE, *sizes, n_groups=1.0)
    launch = MACHINE.kernels.launch_seconds.value
    by_number = [seconds_of(MACHINE, *sizes, n_groups=16.0, n_at_once=s) for s in (1, 4, math.inf)]
    assert by_number[0] - launch == pytest.approx(16 * (alone - launch))
    assert by_number == sorted(by_number, reverse=True)
    assert by_number[2] < by_number[0] / 2


def test_few_tokens_for_each_expert_cost_the_traffic_of_their_weights():
    n_groups, n, k = 64.0, 4096.0, 4096.0
    moved = n_groups * n * k * 2.0
    assert seconds_of(MACHINE, 1, n, k, n_groups=n_groups) > moved / BANDWIDTH


@pytest.mark.parametrize("sum_bytes", [0.0, 4.0])
def test_sums_are_read_and_written(sum_bytes):
    """dW of an expert with one token: the bytes of the sums are nearly all that moves."""
    m, n, n_groups = 4096.0, 4096.0, 64.0
    of_result = 2.0 * sum_bytes if sum_bytes else 2.0
    expected = n_groups * (of_result * m * n + 2.0 * (m + n)) / BANDWIDTH
    launch = MACHINE.kernels.launch_seconds.value
    done = seconds_of(MACHINE, m, n, 1.0, "TN", n_groups=n_groups, sum_bytes=sum_bytes)
    assert done == pytest.approx(expected + launch, rel=1e-6)


def test_measured_groups_are_met_and_correct_their_neighbours():
    point = GroupedGemmPoint(16, 256, 1024, 1024, "NN", "bf16", 4, 0.0, 1e-3)
    other = replace(point, m=1024, seconds=2e-3)
    measured = replace(MACHINE, gemm=replace(MACHINE.gemm, grouped_points=(point, other)))
    facts = {"n_groups": 16.0, "n_at_once": 4}
    assert seconds_of(measured, 256, 1024, 1024, **facts) == pytest.approx(1e-3)
    assert seconds_of(measured, 1024, 1024, 1024, **facts) == pytest.approx(2e-3)
    between = seconds_of(measured, 512, 1024, 1024, **facts)
    assert 1e-3 < between < 2e-3


def test_the_points_of_the_b200_are_met():
    machine = load_machine("b200-simumax")
    for p in machine.gemm.grouped_points:
        facts = {"n_groups": float(p.n_groups), "n_at_once": p.n_at_once, "sum_bytes": p.sum_bytes}
        done = seconds_of(machine, p.m, p.n, p.k, p.mode, **facts)
        assert done == pytest.approx(p.seconds, rel=1e-6)
