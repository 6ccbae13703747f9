"""The GEMM model against tiles handed out one by one, and its laws; see also test_kernels."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prices import attention_seconds, gemm_seconds
from worlds import machine_of, quantity

from axonn_tune.cost.gemm import EfficiencyCurve
from axonn_tune.errors import InputError
from axonn_tune.spec.plan import MODES, Attention
from axonn_tune.spec.points import GemmPoint

LAUNCH, SUSTAINED, K_OVERHEAD, N_MULTIPROCESSORS = 5e-6, 0.8, 100, 100
SIDES = st.integers(1, 6000)


def seconds(machine, m, n, k, mode="NN", dtype="bf16", tuning=False):
    return float(gemm_seconds(m, n, k, mode, machine, dtype, tuning))


def hand_out_tiles(m, n, k, rows, columns, flops_per_s):
    """Give each tile of the output to the multiprocessor that is free first; when is all done?"""
    n_tiles = len(range(0, m, rows)) * len(range(0, n, columns))
    per_tile = 2.0 * rows * columns * (k + K_OVERHEAD) / flops_per_s
    free_at = [0.0] * N_MULTIPROCESSORS
    for tile in range(n_tiles):
        free_at[tile % N_MULTIPROCESSORS] += per_tile  # equal tiles: the next is free first
    return max(free_at)


@given(SIDES, SIDES, SIDES)
def test_a_product_is_its_tiles_handed_out_one_by_one(m, n, k):
    peak, bandwidth = 300e12, 1.5e12
    each = peak * SUSTAINED / N_MULTIPROCESSORS
    computed = min(
        hand_out_tiles(m, n, k, 256, 128, each), hand_out_tiles(m, n, k, 64, 64, 0.5 * each)
    )
    moved = 2 * (m * k + k * n + m * n) / (0.8 * bandwidth)
    expected = LAUNCH + max(computed, moved)
    assert seconds(machine_of(), m, n, k) == pytest.approx(expected, rel=1e-12)


@given(SIDES, SIDES, SIDES)
def test_a_product_is_never_faster_than_peak_or_memory(m, n, k):
    got = seconds(machine_of(), m, n, k, tuning=True)
    assert got >= 2.0 * m * n * k / 300e12
    assert got >= 2.0 * (m * k + k * n + m * n) / 1.5e12


def test_fp32_takes_its_own_peak_and_moves_four_bytes():
    machine = machine_of()
    peaks = {**machine.gpu.peak_flops_per_s, "fp32": quantity(20e12)}
    machine = replace(machine, gpu=replace(machine.gpu, peak_flops_per_s=peaks))
    fast, slow = (seconds(machine, 4096, 4096, 4096, dtype=d) for d in ("bf16", "fp32"))
    assert (slow - LAUNCH) / (fast - LAUNCH) == pytest.approx(300 / 20, rel=1e-12)
    thin = replace(machine, gpu=replace(machine.gpu, peak_flops_per_s={"fp32": quantity(1e18)}))
    traffic = 4 * (65536 * 16 + 16 * 64 + 65536 * 64)
    assert seconds(thin, 65536, 64, 16, dtype="fp32") == pytest.approx(LAUNCH + traffic / 1.2e12)


def test_a_dtype_without_a_peak_is_refused():
    machine = machine_of()
    peaks = {"bf16": quantity(300e12)}
    machine = replace(machine, gpu=replace(machine.gpu, peak_flops_per_s=peaks))
    with pytest.raises(InputError, match="no peak for dtype fp32"):
        seconds(machine, 64, 64, 64, dtype="fp32")


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_its_own_rate(mode):
    fractions = {"NN": 1.0, "NT": 0.5, "TN": 0.25}
    machine = machine_of(modes=fractions.values())
    best = seconds(machine_of(), 4096, 4096, 4096) - LAUNCH
    got = seconds(machine, 4096, 4096, 4096, mode) - LAUNCH
    assert got == pytest.approx(best / fractions[mode], rel=1e-12)


# Kernel tuning --------------------------------------------------------------------------------

FRACTIONS = st.lists(st.floats(0.05, 1.0), min_size=3, max_size=3)


@given(SIDES, SIDES, SIDES, FRACTIONS, st.sampled_from(MODES))
def test_tuning_takes_the_natural_mode_or_pays_for_a_copy(m, n, k, fractions, mode):
    """The smaller operand is read and written once more; its kernel is launched."""
    machine = machine_of(modes=fractions)
    copy = LAUNCH + 2 * 2 * min(m * k, k * n) / 1.2e12
    choices = [seconds(machine, m, n, k, o) + (0 if o == mode else copy) for o in MODES]
    tuned = seconds(machine, m, n, k, mode, tuning=True)
    assert tuned == pytest.approx(min(choices), rel=1e-12)
    assert tuned <= seconds(machine, m, n, k, mode)


# Measured points ------------------------------------------------------------------------------

SHAPES = st.tuples(*[st.sampled_from([64, 100, 512, 1000, 4096, 12288])] * 3)
MEASURED = st.lists(
    st.tuples(SHAPES, st.floats(0.5, 4.0)), min_size=1, max_size=8, unique_by=lambda p: p[0]
)


def points_of(measured, mode="NN"):
    """Points that took so many times longer than the curve says."""
    return [
        GemmPoint(*shape, mode, "bf16", ratio * seconds(machine_of(), *shape, mode))
        for shape, ratio in measured
    ]


@given(MEASURED, st.sampled_from(MODES))
def test_every_measured_point_is_reproduced(measured, mode):
    points = points_of(measured, mode)
    machine = machine_of(points=points)
    for point in points:
        got = seconds(machine, point.m, point.n, point.k, mode)
        assert got == pytest.approx(point.seconds, rel=1e-8)


@given(MEASURED, SIDES, SIDES, SIDES)
def test_a_correction_lies_between_those_of_the_points(measured, m, n, k):
    got = seconds(machine_of(points=points_of(measured)), m, n, k)
    ratio = got / seconds(machine_of(), m, n, k)
    ratios = [r for _, r in measured]
    assert min(ratios) * (1 - 1e-9) <= ratio <= max(ratios) * (1 + 1e-9)


@given(st.floats(0.5, 4.0), SIDES, SIDES, SIDES)
def test_a_single_point_extrapolates_its_ratio_everywhere(ratio, m, n, k):
    machine = machine_of(points=points_of([((1024, 1024, 1024), ratio)]))
    expected = ratio * seconds(machine_of(), m, n, k)
    assert seconds(machine, m, n, k) == pytest.approx(expected, rel=1e-12)


def test_points_of_one_dtype_say_nothing_of_another():
    machine = machine_of(points=points_of([((1024, 1024, 1024), 3.0)]))
    for dtype in ("fp16", "fp32"):
        got = seconds(machine, 1024, 1024, 1024, dtype=dtype)
        assert got == seconds(machine_of(), 1024, 1024, 1024, dtype=dtype)


def test_between_two_points_the_logarithm_is_a_straight_line():
    points = points_of([((512, 1024, 1024), 2.0), ((4096, 1024, 1024), 1.0)])
    got = seconds(machine_of(points=points), 1024, 1024, 1024)
    ratio = got / seconds(machine_of(), 1024, 1024, 1024)
    assert np.log2(ratio) == pytest.approx(2 / 3, rel=1e-9)


def test_beyond_the_points_the_correction_stays_level():
    points = points_of([((512, 1024, 1024), 2.0), ((4096, 1024, 1024), 1.0)])
    for m, ratio in ((64, 2.0), (65536, 1.0)):
        got = seconds(machine_of(points=points), m, 4096, 64)
        assert got == pytest.approx(ratio * seconds(machine_of(), m, 4096, 64), rel=1e-9)


def test_a_product_says_most_of_its_own_sizes_in_another_mode():
    """NT was not timed at 2048; NN was, and took twice as long as the curve says there only."""
    shapes = [(m, n, 1024) for m in (512, 8192) for n in (512, 8192)]
    nt = points_of([(shape, 1.0) for shape in shapes], "NT")
    nn = points_of([(shape, 1.0) for shape in shapes] + [((2048, 2048, 1024), 2.0)], "NN")
    machine = machine_of(points=[*nt, *nn])
    ratio = seconds(machine, 2048, 2048, 1024, "NT") / seconds(machine_of(), 2048, 2048, 1024, "NT")
    assert 1.5 < ratio < 2.0


@given(st.integers(0, 2**32 - 1))
def test_a_smooth_correction_is_met_between_the_points(seed):
    random = np.random.default_rng(seed)
    slopes, bend = random.uniform(-0.1, 0.1, 3), random.uniform(-0.004, 0.004)

    def ratio(shape):
        logs = np.log2(np.array(shape, dtype=float)) - 9.0
        return float(np.exp(slopes @ logs + bend * (logs**2).sum()))

    grid = [(m, n, k) for m in SIZES_8X for n in SIZES_8X for k in SIZES_8X]
    machine = machine_of(points=points_of([(shape, ratio(shape)) for shape in grid]))
    for _ in range(5):
        shape = tuple(int(s) for s in 2 ** random.uniform(6, 12, 3))
        got = seconds(machine, *shape) / seconds(machine_of(), *shape)
        assert got == pytest.approx(ratio(shape), rel=0.05)


SIZES_8X = (64, 512, 4096)


@given(MEASURED, st.sampled_from(MODES))
def test_tuning_never_costs_time_with_measured_points(measured, mode):
    machine = machine_of(points=points_of(measured, "NN"), modes=(1.0, 0.6, 0.3))
    for (m, n, k), _ in measured:
        tuned = seconds(machine, m, n, k, mode, tuning=True)
        assert tuned <= seconds(machine, m, n, k, mode) * (1.0 + 1e-12)


@given(st.lists(st.tuples(SIDES, SIDES, SIDES), min_size=1, max_size=6), MEASURED, st.booleans())
def test_columns_are_priced_one_by_one(shapes, measured, tuning):
    machine = machine_of(points=points_of(measured), modes=(0.9, 0.6, 0.3))
    m, n, k = (np.array(side, dtype=float) for side in zip(*shapes, strict=True))
    together = gemm_seconds(m, n, k, "TN", machine, "bf16", tuning)
    alone = [seconds(machine, *shape, "TN", tuning=tuning) for shape in shapes]
    assert together == pytest.approx(alone, rel=1e-12)
    assert EfficiencyCurve.of(machine, "bf16").seconds(m, n, k, "NN").shape == m.shape


# Unfused attention is made of products ----------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_unfused_attention_is_two_batched_products_and_its_scores(backward):
    """Q K^T and P V over all heads at once; backward does each twice, for its two operands.

    The softmax reads and writes the scores: two passes; backward it reads the softmax and its
    gradient and writes that of the scores: three. What products move is in their own time.
    """
    n_sequences, heads, seq_len, head_dim = 2, 4, 512, 64
    machine = machine_of(modes=(1.0, 0.7, 0.4), memory_bandwidth=1e11)
    batch = n_sequences * heads
    products = seconds(machine, seq_len * batch, seq_len, head_dim, "NT")
    products += seconds(machine, seq_len * batch, head_dim, seq_len, "NN")
    passes = 3 if backward else 2
    scores = passes * 2 * batch * seq_len**2 / (0.8 * 1e11) + 3 * LAUNCH
    operation = Attention(
        "a", float(n_sequences), float(heads), seq_len, head_dim, backward, fused=False
    )
    got = float(attention_seconds(operation, machine, "bf16"))
    assert got == pytest.approx((2 if backward else 1) * products + scores, rel=1e-12)
