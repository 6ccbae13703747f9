"""Products in low formats: laws of peaks, bytes and points, and the published gain of a layer."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prices import gemm_seconds
from worlds import machine_of, quantity

from axonn_tune.cost.prices import KernelPrices
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Gemm, MemoryBound
from axonn_tune.spec.points import GemmPoint
from axonn_tune.spec.precision import RECIPES, operand_bytes

LAUNCH, PEAK = 5e-6, 300e12
SIDES = st.integers(1, 6000)
JOB = Job(n_gpus=8, global_batch=8, seq_len=2048)


def machine_with(points=(), bandwidth=1e18, **peaks):
    """A machine that has low formats, whose memory is no limit unless it is given."""
    machine = machine_of(memory_bandwidth=bandwidth, points=points)
    known = machine.gpu.peak_flops_per_s | {name: quantity(peak) for name, peak in peaks.items()}
    return replace(machine, gpu=replace(machine.gpu, peak_flops_per_s=known))


def seconds(machine, number_format, m=4096, n=4096, k=4096):
    return float(gemm_seconds(m, n, k, "NN", machine, number_format, False))


@given(SIDES, SIDES, SIDES)
def test_twice_the_peak_halves_the_computation(m, n, k):
    machine = machine_with(fp8=2 * PEAK)
    usual = seconds(machine, "bf16", m, n, k) - LAUNCH
    assert seconds(machine, "fp8", m, n, k) - LAUNCH == pytest.approx(usual / 2)


def test_operands_have_the_bytes_of_their_format_and_products_two():
    """Products that only move data, with a long inner length and with a short one."""
    slow = {"bandwidth": 1e9, "fp8": 1e18, "nvfp4": 1e18, "bf16": 1e18}
    machine = machine_with(**slow)
    inner, outer = 64 * 10**6 * 2, 4096 * 4096
    for number_format, operand in (("bf16", 2), ("fp8", 1), ("nvfp4", 0.5625)):
        long = seconds(machine, number_format, 64, 64, 10**6) - LAUNCH
        assert long == pytest.approx((operand * inner + 2 * 64 * 64) / 0.8e9)
        flat = seconds(machine, number_format, 4096, 4096, 1) - LAUNCH
        assert flat == pytest.approx((operand * 8192 + 2 * outer) / 0.8e9)


def test_the_nearest_format_with_points_corrects():
    """MXFP8 runs at the share of its peak that fp8 reaches, and fp8 at that of bf16."""
    sizes = (4096, 4096, 4096)
    without = machine_with(fp8=2 * PEAK, mxfp8=4 * PEAK)
    bf16 = GemmPoint(*sizes, "NN", "bf16", 1.5 * seconds(without, "bf16"))
    with_bf16 = machine_with([bf16], fp8=2 * PEAK, mxfp8=4 * PEAK)
    for low in ("fp8", "mxfp8"):
        assert seconds(with_bf16, low) == pytest.approx(1.5 * seconds(without, low))
    fp8 = GemmPoint(*sizes, "NN", "fp8", 1.25 * seconds(without, "fp8"))
    with_both = machine_with([bf16, fp8], fp8=2 * PEAK, mxfp8=4 * PEAK)
    for low in ("fp8", "mxfp8"):
        assert seconds(with_both, low) == pytest.approx(1.25 * seconds(without, low))
    assert seconds(with_both, "bf16") == pytest.approx(1.5 * seconds(without, "bf16"))


def test_a_product_without_a_format_is_priced_as_before():
    machine = machine_with(fp8=2 * PEAK)
    product = Gemm("p", 4096.0, 4096.0, 4096.0, "NT")
    usual = KernelPrices(machine, JOB).seconds(product)
    low_job = replace(JOB, precision="fp8-current")
    assert KernelPrices(machine, low_job).seconds(product) == usual
    low = KernelPrices(machine, low_job).seconds(replace(product, number_format="fp8"))
    assert low < usual


@given(SIDES, SIDES, SIDES)
def test_a_product_of_fp32_is_that_of_16_bits_at_half_the_rate_and_bandwidth(m, n, k):
    half = KernelPrices(machine_with(bandwidth=5e11, bf16=PEAK / 2), JOB)
    whole = KernelPrices(machine_with(bandwidth=1e12, bf16=PEAK), JOB)
    expected = half.seconds(Gemm("router", m, n, k, "NN"))
    priced = whole.seconds(Gemm("router", m, n, k, "NN", number_format="tf32"))
    assert priced == pytest.approx(expected)


def test_a_long_product_of_fp32_reaches_half_of_what_the_gpu_reaches_in_training():
    machine = machine_with(bandwidth=1e15, bf16=PEAK)
    machine = replace(machine, gpu=replace(machine.gpu, training_peak_fraction=quantity(0.1)))
    product = Gemm("router", 8192.0, 8192.0, 8192.0, "NN", number_format="tf32")
    seconds = KernelPrices(machine, JOB).seconds(product)
    assert seconds == pytest.approx(product.flops / (0.1 * PEAK / 2))


def test_a_machine_says_which_precisions_it_has():
    machine = machine_with(fp8=2 * PEAK)
    assert machine.gpu.precisions == ("bf16", "fp8-delayed", "fp8-current")
    machine.require_precision("fp8-current")
    with pytest.raises(InputError, match=r"no peak_flops_per_s\.nvfp4.*allowed: bf16, fp8-delayed"):
        machine.require_precision("nvfp4")


# Transformer Engine d0067d0d, docs/examples/gemm_profiling: the twelve products of a layer of
# 4096 and 16384 features over 15,872 tokens in bf16 over those in a low format, on an H200 NVL
# and a B300. The profiles are of H200 SXM and B300, and their points were timed with casts.
TOKENS = 15872
PRODUCTS = [
    sizes
    for k, n in [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]
    for sizes in ((TOKENS, n, k), (TOKENS, k, n), (k, n, TOKENS))
]


def layer_seconds(machine, number_format):
    return sum(seconds(machine, number_format, *sizes) for sizes in PRODUCTS)


@pytest.mark.parametrize(
    ("name", "number_format", "gain"),
    [
        ("dgx-h200", "fp8", 31.968 / 16.785),
        ("dgx-b300", "fp8", 13.102 / 6.812),
        ("dgx-b300", "mxfp8", 13.102 / 7.161),
        ("dgx-b300", "nvfp4", 13.102 / 3.764),
    ],
)
def test_products_gain_what_transformer_engine_publishes(name, number_format, gain):
    machine = load_machine(name)
    ours = layer_seconds(machine, "bf16") / layer_seconds(machine, number_format)
    assert ours == pytest.approx(gain, rel=0.03 if name == "dgx-h200" else 0.1)


@pytest.mark.parametrize(
    ("name", "precision", "published_ms"),
    [
        ("dgx-h200", "fp8-delayed", 18.978 - 16.785),
        ("dgx-h200", "fp8-current", 20.285 - 16.785),
        ("dgx-b300", "fp8-delayed", 7.802 - 6.812),
        ("dgx-b300", "fp8-current", 9.147 - 6.812),
        ("dgx-b300", "mxfp8", 8.984 - 7.161),
        ("dgx-b300", "nvfp4", 6.453 - 3.764),
    ],
)
def test_casts_take_what_transformer_engine_publishes(name, precision, published_ms):
    """The time with casts less that without.

    Each product there casts its input for both passes, and its weight along the rows only, since
    no input asks for a gradient (benchmark_gemm.py; pytorch/module/linear.py, `columnwise_usage`).
    """
    machine = load_machine(name)
    recipe = RECIPES[precision]
    n_copies = 2 if recipe.quantises_columns or machine.gpu.transposes_operands else 1
    prices = KernelPrices(machine, job_in(precision))
    casts = [
        prices.seconds(MemoryBound("", n_elements * element_bytes(recipe, copies), "cast"))
        for m, n, k in PRODUCTS
        for n_elements, copies in ((m * k, n_copies), (k * n, 1))
    ]
    assert 1e3 * sum(casts) == pytest.approx(published_ms, rel=0.25)


def element_bytes(recipe, copies):
    return recipe.reads * 2 + copies * operand_bytes(recipe.number_format)


def job_in(precision):
    """A job on one GPU, which waits for no slower one."""
    return replace(JOB, n_gpus=1, precision=precision)


def test_only_casts_are_slowed_and_only_by_their_recipe():
    machine = load_machine("dgx-b300")
    for kernel, factor in (("cast", RECIPES["nvfp4"].slowdown), ("copy", 1.0)):
        work = MemoryBound("", 1e9, kernel)
        usual = KernelPrices(machine, job_in("fp8-current")).seconds(work)
        assert KernelPrices(machine, job_in("bf16")).seconds(work) == usual
        assert KernelPrices(machine, job_in("nvfp4")).seconds(work) == pytest.approx(factor * usual)
