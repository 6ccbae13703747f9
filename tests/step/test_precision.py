"""Whole steps in low precisions, and what every command says of them."""

from dataclasses import replace

import pytest
from worlds import quantity

from axonn_tune.api.answers import compare, launch, predict, suggest, whatif
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict as predict_one

LAYOUT = "tensor=4,data=16"
OPTIONS = {"strategy": "megatron", "micro_batch": 1, "recompute": "none", "global_batch": 64}


def step(precision, machine="dgx-h100", **options):
    return predict("llama3-8b", 64, LAYOUT, machine, precision=precision, **OPTIONS, **options)


def with_faster_products(factor):
    """An H100 whose products of bf16 are faster; attention keeps its rates."""
    machine = load_machine("dgx-h100")
    peaks = {name: q.scaled(factor) for name, q in machine.gpu.peak_flops_per_s.items()}
    points = tuple(replace(p, seconds=p.seconds / factor) for p in machine.gemm.points)
    kernels = machine.kernels
    fractions = {
        name: getattr(kernels, name).scaled(1 / factor)
        for name in ("flash_forward_fraction", "flash_backward_fraction")
    }
    return replace(
        machine,
        gpu=replace(machine.gpu, peak_flops_per_s=peaks),
        gemm=replace(machine.gemm, points=points),
        kernels=replace(kernels, **fractions),
    )


@pytest.mark.parametrize("precision", ["fp8-delayed", "fp8-current", "fp8-block"])
def test_a_low_step_is_faster_and_not_as_fast_as_products_alone_would_make_it(precision):
    usual = step("bf16").step_seconds
    low = step(precision).step_seconds
    # No product gains more than 2.4, whatever its points say, and casts cost time.
    assert usual > low > step("bf16", with_faster_products(2.4)).step_seconds


def test_delayed_scales_are_faster_than_current_ones_which_need_another_read():
    assert step("fp8-delayed").step_seconds < step("fp8-current").step_seconds


def test_utilisation_is_of_the_peak_of_bf16():
    low = step("fp8-current")
    assert low.mfu == pytest.approx(low.tflops_per_gpu * 1e12 / 989e12)


def test_transposed_copies_follow_the_machine():
    prediction = step("fp8-current")
    machine = prediction.scenario.machine
    on_blackwell = replace(machine, gpu=replace(machine.gpu, transposes_operands=False))
    moved = predict_one(
        replace(prediction.scenario, machine=on_blackwell), prediction.configuration
    )
    assert moved.step_seconds < prediction.step_seconds
    saved = prediction.memory_terms_bytes["weights"] - moved.memory_terms_bytes["weights"]
    model = prediction.scenario.model
    assert saved == pytest.approx(model.n_layers * model.block_matmul_parameters / 4)


@pytest.mark.slow
def test_a_word_stands_for_the_engines_usual_recipe():
    search = build_search("llama3-8b", 64, "dgx-h100", precision="fp8", **OPTIONS)
    assert isinstance(search.scenario, Scenario)
    assert search.scenario.job.precision == "fp8-delayed"
    assert suggest("llama3-8b", 64, "dgx-h100", precision="fp8", **OPTIONS).attrs["precision"] == (
        "fp8-delayed"
    )


@pytest.mark.slow
def test_a_comparison_leaves_out_what_lacks_the_precision():
    frame = compare("llama3-8b", 64, "dgx-h100", precision="fp8-current", global_batch=64)
    assert set(frame["strategy"]) == {"megatron"}
    with pytest.raises(InputError, match="allowed with engine bundled: bf16"):
        compare("llama3-8b", 64, "dgx-h100", strategies=["axonn"], precision="fp8-current")


@pytest.mark.parametrize(
    ("machine", "options", "message"),
    [
        ("dgx-h100", {"precision": "mxfp8"}, "allowed: bf16, fp8-delayed, fp8-current, fp8-block"),
        ("perlmutter", {"precision": "fp8"}, "no peak_flops_per_s.fp8, .*allowed: bf16$"),
        ("dgx-h100", {"precision": "fp9"}, "allowed with engine megatron-core: bf16, fp8-delayed"),
        ("dgx-h100", {"moments": "int8"}, "moments is 'int8'; allowed: fp32, bf16, fp8"),
        ("dgx-h100", {"moments": "bf16", "strategy": "axonn"}, "engine bundled: moments is 'bf16'"),
        ("dgx-h100", {"optimizer": "muon", "strategy": "axonn"}, "'muon'; allowed: adamw$"),
        ("dgx-h100", {"optimizer": "muon", "engine": "megatron-core-graphs"}, "allowed: adamw$"),
    ],
)
def test_what_cannot_be_done_is_one_line(machine, options, message):
    with pytest.raises(InputError, match=message):
        build_search("llama3-8b", 64, machine, **{**OPTIONS, **options})


@pytest.mark.slow
def test_a_what_if_on_another_gpu_needs_the_format_there():
    options = {"strategy": "megatron", "precision": "fp8-current", "global_batch": 64}
    frame = whatif("llama3-8b", 64, "dgx-h100", changes=["gpu=b200"], **options)
    before, after, _ = frame["step_seconds"]
    assert after < before
    with pytest.raises(InputError, match="precision fp8-current needs"):
        whatif("llama3-8b", 64, "dgx-h100", changes=["gpu=a100"], **options)


FLAGS = {
    "fp8-delayed": ["--fp8-format hybrid", "--fp8-recipe delayed"],
    "fp8-current": ["--fp8-format hybrid", "--fp8-recipe tensorwise"],
    "fp8-block": ["--fp8-format e4m3", "--fp8-recipe blockwise"],
    "mxfp8": ["--fp8-format e4m3", "--fp8-recipe mxfp8", "--fp8-param-gather", "--reuse-grad-buf"],
    "nvfp4": ["--fp4-format e2m1", "--fp4-recipe nvfp4", "--fp4-param-gather"],
}


@pytest.mark.parametrize("precision", FLAGS)
def test_megatron_is_told_the_recipe(precision):
    is_low = precision in ("mxfp8", "nvfp4")
    options = {**OPTIONS, "precision": precision, "low_weights": is_low, "moments": "bf16"}
    script = launch("llama3-8b", 64, LAYOUT, "dgx-b200", **options)["launch.sbatch"]
    assert all(flag in script for flag in FLAGS[precision])
    assert ("param-gather" in script.replace("--overlap-param-gather", "")) == is_low
    assert "--exp-avg-dtype bf16" in script
    replicated = {**options, "distributed_optimizer": False, "low_weights": None}
    with pytest.raises(InputError, match="leave out --no-distributed-optimizer or --moments"):
        launch("llama3-8b", 64, LAYOUT, "dgx-b200", **replicated)


def test_other_frameworks_are_not_told_what_their_programs_lack():
    options = {"strategy": "zero3", "engine": "torchtitan-2025", "precision": "fp8"}
    message = "precision is fp8-current; allowed where a script of torchtitan is written: bf16"
    with pytest.raises(InputError, match=message):
        launch("llama3-8b", 64, None, "dgx-h100", global_batch=64, **options)


def test_a_quantity_of_an_unknown_format_is_refused():
    gpu = load_machine("dgx-h100").gpu
    with pytest.raises(InputError, match="peak_flops_per_s is 'fp9'"):
        replace(gpu, peak_flops_per_s={**gpu.peak_flops_per_s, "fp9": quantity(1e15)})
