"""GEMM, attention and memory-bound kernels against values worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from prices import attention_seconds, gemm_seconds
from worlds import machine_of, quantity

from axonn_tune.cost.memory_bound import memory_bound_seconds, moved_copy_seconds
from axonn_tune.cost.prices import KernelPrices, slowest_rank_factor
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Attention, Gemm, GroupedGemm, MemoryBound
from axonn_tune.spec.points import GemmPoint


def seconds(machine, m, n, k, mode="NN", dtype="bf16", tuning=False):
    return float(gemm_seconds(m, n, k, mode, machine, dtype, tuning))


def test_compute_bound_product_by_hand():
    # 4096 x 4096 in tiles of 256 x 128: 512 tiles on 100 multiprocessors are 6 waves.
    per_tile = 2 * 256 * 128 * (4096 + 100) / (300e12 * 0.8 / 100)
    assert seconds(machine_of(), 4096, 4096, 4096) == pytest.approx(5e-6 + 6 * per_tile)


def test_the_best_tile_is_taken():
    # A small product: one wave of large tiles, or one of small ones at half the speed.
    per_element = 2 * (512 + 100) / (300e12 * 0.8 / 100)
    best = min(256 * 128, 64 * 64 / 0.5) * per_element
    assert seconds(machine_of(), 640, 640, 512) == pytest.approx(5e-6 + best)


def test_memory_bound_product_by_hand():
    traffic = 2 * (65536 * 16 + 16 * 64 + 65536 * 64)
    machine = machine_of(memory_bandwidth=1e11)
    assert seconds(machine, 65536, 64, 16) == pytest.approx(5e-6 + traffic / 0.8e11)


def test_a_measured_point_is_reproduced_exactly():
    points = [
        GemmPoint(1024, 2048, 512, "NN", "bf16", 1e-3),
        GemmPoint(64, 64, 64, "NN", "bf16", 1e-5),
    ]
    machine = machine_of(points=points)
    assert seconds(machine, 1024, 2048, 512) == pytest.approx(1e-3, rel=1e-9)
    assert seconds(machine, 64, 64, 64) == pytest.approx(1e-5, rel=1e-9)


def test_points_carry_their_error_to_their_neighbourhood():
    plain = machine_of()
    shapes = [(1024, 1024, 1024), (4096, 1024, 1024), (1024, 4096, 4096)]
    points = [GemmPoint(*s, "NN", "bf16", 1.5 * seconds(plain, *s)) for s in shapes]
    corrected = seconds(machine_of(points=points), 2048, 2048, 2048)
    assert corrected == pytest.approx(1.5 * seconds(plain, 2048, 2048, 2048), rel=1e-9)


def test_tuning_avoids_a_slow_mode_and_pays_for_the_copy():
    machine = machine_of(modes=(1.0, 1.0, 0.1))
    slow, tuned = (seconds(machine, 8192, 8192, 8192, "TN", tuning=t) for t in (False, True))
    copy = 5e-6 + 2 * 2 * 8192 * 8192 / (1.5e12 * 0.8)
    assert tuned == pytest.approx(seconds(machine, 8192, 8192, 8192) + copy)
    assert tuned < slow / 5


def test_tuning_never_costs_time():
    machine = machine_of(modes=(0.9, 0.5, 1.0))
    for m, n, k in ((64, 64, 64), (8192, 128, 128), (512, 8192, 8192)):
        for mode in ("NN", "NT", "TN"):
            natural = seconds(machine, m, n, k, mode)
            assert seconds(machine, m, n, k, mode, tuning=True) <= natural


def attention(backward, fused=True):
    return Attention("a", 2.0, 8.0, 2048, 128, backward, fused)


def test_flash_attention_computes_the_causal_half():
    forward = 4 * 2 * 8 * 2048**2 * 128 / 2
    machine = machine_of()
    got = [float(attention_seconds(attention(b), machine, "bf16")) for b in (False, True)]
    assert got[0] == pytest.approx(forward / (300e12 * 0.5) + 5e-6)
    assert got[1] == pytest.approx(2.5 * forward / (300e12 * 0.4) + 5e-6)


def test_fused_attention_with_dropout_takes_the_measured_factor():
    machine = machine_of()
    kernels = replace(
        machine.kernels, dropout_forward_factor=quantity(1.7), dropout_backward_factor=quantity(1.2)
    )
    slower = replace(machine, kernels=kernels)
    for backward, factor in ((False, 1.7), (True, 1.2)):
        plain = attention(backward)
        usual = attention_seconds(plain, machine, "bf16")
        assert attention_seconds(plain, slower, "bf16") == usual
        dropping = replace(plain, dropout=True)
        assert attention_seconds(dropping, slower, "bf16") == pytest.approx(factor * usual)
        assert attention_seconds(dropping, machine, "bf16") == usual


@pytest.mark.parametrize(
    ("seq_len", "masked", "n_blocks"),
    [(128, True, 1), (205, True, 3), (205, False, 4), (1024, True, 36), (1024, False, 64)],
)
def test_flash_attention_computes_whole_blocks_of_short_sequences(seq_len, masked, n_blocks):
    """Rates hold at 2,048 tokens, which fill 136 blocks of 128 with a mask and 256 without."""
    operation = Attention("a", 2.0, 8.0, seq_len, 128, False, True, masked=masked)
    got = float(attention_seconds(operation, machine_of(), "bf16"))
    rated = 4 * 2 * 8 * 2048**2 * 128 / 2 / (300e12 * 0.5)
    assert got - 5e-6 == pytest.approx(rated * n_blocks / (136 if masked else 256))


def test_blocks_explain_a_part_of_what_short_sequences_lose():
    """FlashAttention-2 was measured on H100; its rates from 2,048 tokens on exceed shorter ones."""
    machine = load_machine("dgx-h100")
    measured = [
        p for p in machine.kernels.attention_points if p.library == "flash-attention" and p.masked
    ]
    long = tuple(p for p in measured if p.seq_len >= 2048)
    machine = replace(machine, kernels=replace(machine.kernels, attention_points=long))
    short = [p for p in measured if p.seq_len < 2048 and p.head_dim == 128]
    assert len(short) == 4
    for p in short:
        sizes = p.n_sequences, p.n_heads, p.seq_len, p.head_dim
        got = float(attention_seconds(Attention("a", *sizes, p.backward, True), machine, "bf16"))
        (rated,) = (
            q.seconds
            * (p.n_sequences * p.n_heads * p.seq_len**2)
            / (q.n_sequences * q.n_heads * q.seq_len**2)
            for q in long
            if (q.seq_len, q.head_dim, q.backward) == (2048, p.head_dim, p.backward)
        )
        assert 1.05 * rated < got < p.seconds


def test_unfused_attention_moves_its_scores_through_memory():
    machine = machine_of(memory_bandwidth=1e11)
    scores_bytes = 2 * 8 * 2048**2 * 2
    got = float(attention_seconds(attention(False, fused=False), machine, "bf16"))
    assert got > 4 * scores_bytes / 0.8e11
    assert attention_seconds(attention(True, fused=False), machine, "bf16") > got


def test_products_and_fused_attention_run_at_the_clock_of_training_and_all_else_does_not():
    machine = machine_of()
    slow = replace(machine, gpu=replace(machine.gpu, training_clock_fraction=quantity(0.5)))
    job = Job(1, 1, 128, kernel_tuning=False)
    usual, slowed = KernelPrices(machine, job), KernelPrices(slow, job)
    for kernel in (
        Gemm("product", 1024.0, 1024.0, 1024.0, "NN"),
        Attention("attention", 1.0, 8.0, 1024.0, 64, False, True),
        Attention("attention", 1.0, 8.0, 1024.0, 64, True, True),
    ):
        assert slowed.seconds(kernel) == pytest.approx(2.0 * usual.seconds(kernel))
    for kernel in (
        Attention("attention", 1.0, 8.0, 1024.0, 64, False, False),
        MemoryBound("sum", 2.0**20, "add"),
    ):
        assert slowed.seconds(kernel) == usual.seconds(kernel)


@pytest.mark.parametrize(("share", "clock"), [(0.0, 0.8), (0.25, 0.85), (1.0, 1.0)])
def test_the_clock_rises_with_the_share_of_attention(share, clock):
    machine = machine_of()
    limited = replace(machine, gpu=replace(machine.gpu, training_clock_fraction=quantity(0.8)))
    job = Job(1, 1, 128, kernel_tuning=False)
    product = Gemm("product", 1024.0, 1024.0, 1024.0, "NN")
    usual = KernelPrices(machine, job, share).seconds(product)
    assert KernelPrices(limited, job, share).seconds(product) == pytest.approx(usual / clock)


@pytest.mark.parametrize("clock", [0.0, 1.2])
def test_a_clock_in_training_is_at_most_that_of_measurements(clock):
    with pytest.raises(InputError, match=f"training_clock_fraction is {clock}; allowed"):
        replace(machine_of().gpu, training_clock_fraction=quantity(clock))


@pytest.mark.parametrize("n_groups", [1.0, 4.0])
def test_no_product_is_faster_in_training_than_the_power_limit_allows(n_groups):
    machine = machine_of()
    peak = machine.gpu.peak_flops_per_s["bf16"].value
    job = Job(1, 1, 128, kernel_tuning=False)
    product = Gemm("product", 4096.0, 4096.0, 4096.0, "NN")
    if n_groups > 1:
        product = GroupedGemm("product", 4096.0, 4096.0, 4096.0, "NN", n_groups=n_groups)
    usual = float(KernelPrices(machine, job).seconds(product))
    reached = product.flops / usual / peak

    def limited(fraction):
        gpu = replace(machine.gpu, training_peak_fraction=quantity(fraction))
        return float(KernelPrices(replace(machine, gpu=gpu), job).seconds(product))

    assert limited(0.5 * reached) == pytest.approx(2.0 * usual)
    assert limited(1.01 * reached) == usual


def test_memory_bound_kernel():
    """Without bytes to move it is not launched."""
    got = memory_bound_seconds(np.array([1e9, 0.0]), machine_of(), "copy", "bf16")
    assert got == pytest.approx([1e9 / 1.2e12 + 5e-6, 0.0])
    assert memory_bound_seconds(0.0, machine_of(), "copy", "bf16") == 0.0


def test_kernels_of_one_element_at_a_time_follow_the_clock_and_not_the_memory():
    machine = machine_of()
    launch = machine.kernels.launch_seconds.value
    job = Job(1, 1, 128)

    def seconds(rate, clock=1.0, strided_bytes=2e9, bandwidth=1.0):
        kernels = replace(machine.kernels, strided_bytes_per_s=rate and quantity(rate))
        bytes_per_s = machine.gpu.memory_bandwidth_bytes_per_s.scaled(bandwidth)
        gpu = replace(machine.gpu, memory_bandwidth_bytes_per_s=bytes_per_s)
        gpu = replace(gpu, training_clock_fraction=quantity(clock))
        kernel = MemoryBound("limits", 3e9, "copy", n_launches=4.0, strided_bytes=strided_bytes)
        priced = KernelPrices(replace(machine, gpu=gpu, kernels=kernels), job)
        return float(priced.seconds(kernel)) - 4.0 * launch

    assert seconds(None) == seconds(2e12) == pytest.approx(3e9 / 1.2e12)
    assert seconds(0.6e12) == pytest.approx(1e9 / 1.2e12 + 2e9 / 0.6e12)
    assert seconds(0.6e12, clock=0.8) == pytest.approx(1e9 / 1.2e12 + 2e9 / 0.48e12)
    assert seconds(0.6e12, bandwidth=2.0) == pytest.approx(1e9 / 2.4e12 + 2e9 / 0.6e12)
    assert seconds(0.6e12, strided_bytes=0.0) == pytest.approx(3e9 / 1.2e12)


def test_transposed_copy_reads_and_writes():
    assert moved_copy_seconds(np.array([1e9]), machine_of(), "bf16") == pytest.approx(
        2e9 / 1.2e12 + 5e-6
    )


def test_the_slowest_of_many_equal_gpus():
    machine = machine_of(jitter=0.03)
    assert slowest_rank_factor(machine, 1) == 1.0
    assert slowest_rank_factor(machine, 1024) == pytest.approx(
        1 + 0.03 * math.sqrt(2 * math.log(1024))
    )
    # The expected largest of N normal deviates lies a little below the asymptote.
    draws = np.random.default_rng(0).normal(1.0, 0.03, (400, 1024)).max(axis=1).mean()
    assert draws == pytest.approx(slowest_rank_factor(machine, 1024), rel=0.02)
