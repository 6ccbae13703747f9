"""Whole rehearsals against the step plan and the memory model, which they may contradict."""

import itertools
import json
import math
import re
from dataclasses import replace

import pytest
from command_line import run_cli

from axonn_tune.api.rehearsing import MOST_MICROSTEPS, rehearse, rehearse_script
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.report.rehearse import verdict_lines
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.rehearsal import (
    FusedAttention,
    Message,
    OtherKernel,
    Product,
    Rehearsal,
)
from axonn_tune.step.predict import predict
from axonn_tune.step.rehearsed import price
from axonn_tune.validation.rehearsed import compare
from axonn_tune.validation.runnable import runnable

# Largest error of the planned peak, as a fraction.
MOST_ERROR = 0.02
MODELS = {
    "5b": (8, "2x2x2x1"),
    "80b": (256, "1x4x64x1"),
    "gpt3-175b": (256, "4x4x16x1"),
    "llama2-7b": (8, "1x2x4x1"),
    "llama3-8b": (16, "1x4x2x2"),
    "llama3-70b": (64, "2x4x8x1"),
    "gpt-neox-20b": (16, "2x2x4x1"),
    "megatron-22b": (8, "1x8x1x1"),
}


def rehearsed(model, gpus, grid, n_layers=2, **options):
    """The comparison of a model with fewer layers; small batches make few micro-steps."""
    spec = replace(load_model(model), n_layers=n_layers)
    options = {"micro_batch": 1, "recompute": "none", "global_batch": 2 * gpus, **options}
    return rehearse(spec, gpus, grid, **options)[1]


def kinds_of(lines):
    """The kinds of the operations of a comparison."""
    return {line.subject.kind for line in lines}


def assert_agrees(comparison):
    assert not comparison.differing
    assert abs(comparison.memory_error) < MOST_ERROR
    assert kinds_of(comparison.lines) >= {"product", "attention", "attention backward"}


@pytest.mark.parametrize(
    ("model", "grid", "options"),
    [
        ("5b", "2x2x2x1", {}),
        ("llama3-8b", "1x4x2x2", {"gpus": 16, "recompute": "full", "order": "zyxd"}),
        ("llama2-7b", "shard=4,replica=2", {"strategy": "hsdp"}),
        ("5b", "shard=8", {"engine": "fsdp2"}),
    ],
)
def test_a_rehearsal_agrees_with_its_plan(model, grid, options):
    assert_agrees(rehearsed(model, options.pop("gpus", 8), grid, **options))


def in_turn(models, recomputes):
    """Each model with one recomputation, while they take turns."""
    return list(zip(models, itertools.cycle(recomputes), strict=False))


def first_slow(cases, count):
    """Return the cases as parameters, of which the first run in CI and the others in a sweep."""
    marks = [pytest.mark.slow] * count + [pytest.mark.sweep] * (len(cases) - count)
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


@pytest.mark.parametrize(
    ("model", "recompute"), first_slow(in_turn(MODELS, ["none", "selective", "full"]), 3)
)
def test_the_grid_of_any_model_agrees(model, recompute):
    assert_agrees(rehearsed(model, *MODELS[model], n_layers=4, recompute=recompute))


@pytest.mark.parametrize(
    "options",
    first_slow(
        [
            [{"overlap": False}],
            [{"keep_gathered_weights": True}],
            [{"attention": "unfused"}],
            [{"dtype": "fp32"}],
            [{"micro_batch": 4, "global_batch": 128}],
            [{"global_batch": 16}],
        ],
        2,
    ),
    ids=str,
)
def test_the_grid_agrees_with_other_options(options):
    comparison = rehearsed("80b", 64, "2x2x16x1", n_layers=4, **options)
    assert not comparison.differing and abs(comparison.memory_error) < MOST_ERROR


@pytest.mark.parametrize(
    ("model", "recompute"),
    first_slow(in_turn([name for name in MODELS if name != "gpt-neox-20b"], ["none", "full"]), 2),
)
def test_fsdp2_of_any_model_agrees(model, recompute):
    gpus = min(MODELS[model][0], 16)  # torch cuts a weight into its shards one by one
    comparison = rehearsed(
        model, gpus, f"shard={gpus}", n_layers=4, recompute=recompute, strategy="zero3"
    )
    assert not comparison.differing and abs(comparison.memory_error) < MOST_ERROR


@pytest.mark.parametrize(
    ("model", "layout", "recompute", "per_rank"),
    first_slow(
        [
            ("llama2-7b", "shard=4,replica=2", "full", 2),
            ("20b", "shard=8,replica=8", "none", 1),
            ("llama2-7b", "shard=4,replica=2", "none", 1),
            ("20b", "shard=8,replica=8", "full", 2),
            ("5b", "shard=1,replica=8", "full", 1),
            ("5b", "shard=1,replica=8", "none", 2),
        ],
        2,
    ),
)
def test_shards_with_replicas_agree_in_memory(model, layout, recompute, per_rank):
    gpus = math.prod(int(size) for size in re.findall(r"\d+", layout))
    options = {"strategy": "hsdp", "recompute": recompute, "global_batch": per_rank * gpus}
    comparison = rehearsed(model, gpus, layout, n_layers=6, **options)
    assert abs(comparison.memory_error) < MOST_ERROR


@pytest.mark.sweep
def test_a_whole_model_on_many_ranks_agrees():
    """The examples of the command rehearse 80B parameters on 1,024 ranks."""
    options = {"micro_batch": 1, "recompute": "none", "global_batch": 256, "engine": "fsdp2"}
    _, comparison = rehearse("20b", 128, "shard=128", **options)
    assert_agrees(comparison)
    assert comparison.rehearsal.n_ranks == 128


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_parallelism_forms_the_products_of_the_plan_again(recompute):
    comparison = rehearsed("5b", 4, "tensor=2,data=2", strategy="megatron-tp", recompute=recompute)
    assert "product" in kinds_of(comparison.lines) - kinds_of(comparison.differing)


def test_what_is_validated_of_fsdp2_forms_the_products_of_the_plan_again():
    comparison = rehearsed("5b", 4, "shard=4", strategy="zero3", recompute="full")
    prediction = comparison.prediction
    scenario = replace(prediction.scenario, strategy=runnable("zero3").strategy)
    validated = predict(scenario, prediction.configuration)
    comparison = compare(validated, comparison.rehearsal, comparison.n_microsteps)
    assert "product" in kinds_of(comparison.lines) - kinds_of(comparison.differing)


@pytest.fixture(scope="module")
def small():
    return rehearsed("5b", 8, "2x2x2x1")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"recompute": "full"}, "product"),
        ({"order": "zyxd"}, "all_gather"),
        ({"micro_batch": 2}, "all_reduce"),
    ],
)
def test_a_plan_of_another_configuration_is_found_out(small, change, kind):
    """The laws of this comparison can fail: each of these plans says what the program does not."""
    prediction = small.prediction
    wrong = predict(prediction.scenario, replace(prediction.configuration, **change))
    comparison = compare(wrong, small.rehearsal, small.n_microsteps)
    assert kind in kinds_of(comparison.differing)


@pytest.mark.parametrize(
    "change",
    [
        {"keep_gathered_weights": True},
        {"seq_len": 1024},
        {"attention": "unfused"},
        {"global_batch": 16},
    ],
    ids=str,
)
def test_a_plan_of_another_job_is_found_out(small, change):
    scenario = small.prediction.scenario
    other = replace(scenario, job=replace(scenario.job, **change))
    wrong = predict(other, small.prediction.configuration)
    comparison = compare(wrong, small.rehearsal, small.n_microsteps)
    assert comparison.differing
    verdict, *_ = verdict_lines(comparison, MOST_ERROR)
    assert verdict.startswith(f"Operations: {len(comparison.differing)} of ")


def test_operations_that_are_as_planned_are_said_to_be(small):
    verdict, *_ = verdict_lines(small, MOST_ERROR)
    assert verdict.startswith("Operations: all ") and "as planned" in verdict


def test_memory_that_is_not_planned_is_found_out(small):
    more = replace(small.rehearsal, peak_bytes=1.1 * small.rehearsal.peak_bytes)
    comparison = compare(small.prediction, more, small.n_microsteps)
    assert comparison.memory_error == pytest.approx(1 / 1.1 - 1, abs=MOST_ERROR)


@pytest.mark.slow
def test_a_step_of_many_micro_steps_is_shortened():
    assert rehearsed("tiny", 8, "1x1x8x1", global_batch=64).prediction.n_microsteps == 2
    whole = rehearsed("tiny", 8, "1x1x8x1", global_batch=32, whole_step=True)
    assert whole.prediction.n_microsteps == whole.n_microsteps == 4 > MOST_MICROSTEPS
    assert not whole.differing


# Mixtures of experts --------------------------------------------------------------------------

MIXTRAL = replace(load_model("mixtral-8x7b"), n_layers=2)
SMALL_MIXTURE = replace(
    MIXTRAL,
    n_layers=3,
    hidden_size=512,
    n_heads=4,
    n_kv_heads=4,
    ffn_hidden_size=2048,
    qk_norm="head",
    experts=Experts(8, 2, 1024, shared_hidden_size=512, first_layer=1),
)


def rehearsed_mixture(spec, grid, **options):
    pytest.importorskip("megatron.core")
    options = {"micro_batch": 1, "global_batch": 8, "seq_len": 512, **options}
    return rehearse(spec, 8, grid, engine="megatron-core", attention="unfused", **options)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "grid"),
    [
        (MIXTRAL, "dp=8,ep=8"),
        (MIXTRAL, "tp=2,dp=4,ep=4"),
        (SMALL_MIXTURE, "dp=8,ep=2"),
        (SMALL_MIXTURE, "tp=4,dp=2,ep=8"),
    ],
    ids=["mixtral", "mixtral with tensor", "shared", "shared with tensor"],
)
def test_megatron_core_does_with_experts_what_the_plan_says(spec, grid):
    comparison = rehearsed_mixture(spec, grid)
    assert not comparison.differing
    names = {name for line in comparison.lines for name in line.names}
    assert {"forward.router.gemm", "forward.experts_up.gemm"} <= names
    assert {"forward.dispatch", "forward.probabilities"} <= names
    held = {line.holder: line for line in comparison.memory}
    for holder in ("weights", "gradients", "optimizer_states"):
        line = held[holder]
        assert line.planned_bytes == pytest.approx(line.rehearsed_bytes, rel=1e-4)


@pytest.mark.slow
def test_plans_of_other_experts_are_found_out():
    comparison = rehearsed_mixture(SMALL_MIXTURE, "dp=8,ep=4")
    assert not comparison.differing
    prediction = comparison.prediction
    scenario, configuration = prediction.scenario, prediction.configuration
    elsewhere = Layout({**configuration.layout.sizes, "expert": 2})
    wrong = [
        predict(scenario, replace(configuration, layout=elsewhere)),
        *(
            predict(replace(scenario, **change), configuration)
            for change in (
                {"job": replace(scenario.job, expert_imbalance=1.5)},
                {"strategy": replace(scenario.strategy, sends_once=True)},
            )
        ),
    ]
    for other in wrong:
        found = compare(other, comparison.rehearsal, comparison.n_microsteps).differing
        assert "all_to_all" in {line.subject.kind for line in found}


@pytest.mark.slow
def test_dense_models_through_megatron_core_agree_as_well():
    dense = replace(SMALL_MIXTURE, experts=None)
    assert not rehearsed_mixture(dense, "tp=2,dp=4").differing


@pytest.mark.slow
def test_experts_that_cannot_be_equally_busy_are_one_line(capsys):
    pytest.importorskip("megatron.core")
    words = "--model mixtral-8x7b --engine megatron-core --grid dp=8,ep=8 --attention unfused"
    code, _, err = run_cli(
        capsys, "rehearse", "--gpus", "8", *words.split(), "--seq-len", "3", "--global-batch", "8"
    )
    assert code == 2 and "equally busy" in err and err.count("\n") == 1


# Stages of pipelines --------------------------------------------------------------------------

DENSE = replace(load_model("llama2-7b"), n_layers=8, hidden_size=512, n_heads=8, n_kv_heads=8)
ALIKE_MIXTURE = replace(
    SMALL_MIXTURE,
    n_layers=4,
    experts=replace(SMALL_MIXTURE.experts, first_layer=0, shared_hidden_size=0),
)
DENSE = replace(DENSE, head_dim=64, ffn_hidden_size=1024)


def rehearsed_stage(spec, grid, stage, gpus=8):
    pytest.importorskip("megatron.core")
    options = {"micro_batch": 1, "global_batch": 16, "seq_len": 512, "attention": "unfused"}
    return rehearse(spec, gpus, grid, stage=stage, engine="megatron-core", **options)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "grid", "stage"),
    [
        (DENSE, "tp=2,pp=4", 0),
        (DENSE, "tp=2,pp=4", 1),
        (DENSE, "tp=2,pp=4", 2),
        (DENSE, "tp=2,pp=4", 3),
        (ALIKE_MIXTURE, "tp=2,dp=2,ep=4,pp=2", 0),
        (MIXTRAL, "dp=4,ep=2,pp=2", 1),
    ],
)
def test_a_stage_of_megatron_core_does_what_its_plan_says(spec, grid, stage):
    comparison = rehearsed_stage(spec, grid, stage)
    assert not comparison.differing
    n_stages = comparison.prediction.layout.n_stages
    assert comparison.rank == stage * 8 // n_stages
    (sends,) = [line for line in comparison.lines if "pipeline.send_recv" in line.names]
    n_neighbours = 1 if stage in (0, n_stages - 1) else 2
    assert sends.planned == n_neighbours * max(n_stages, MOST_MICROSTEPS)
    held = {line.holder: line for line in comparison.memory}
    for holder in ("weights", "gradients", "optimizer_states"):
        assert held[holder].planned_bytes == pytest.approx(held[holder].rehearsed_bytes, rel=1e-3)


@pytest.mark.slow
def test_earlier_stages_hold_more_micro_batches_as_planned():
    """A stage in the middle holds one micro-batch more than the next one.

    Of each the local layers keep more than the plan's do, which are fused.
    """
    stages = [rehearsed_stage(DENSE, "tp=2,pp=4", stage) for stage in (1, 2)]
    (more, fewer) = [
        next(line for line in each.memory if line.holder == "activations") for each in stages
    ]
    planned = more.planned_bytes - fewer.planned_bytes
    assert 0 < planned < more.rehearsed_bytes - fewer.rehearsed_bytes < 1.4 * planned


@pytest.mark.slow
def test_only_the_end_of_the_step_differs_in_a_stage_with_fewer_weights():
    comparison = rehearsed_stage(DENSE, "tp=2,dp=2,pp=4", 1, gpus=16)
    planned, done = sorted(comparison.differing, key=lambda line: -line.planned)
    assert planned.names == ("gradient.reduce",)
    assert planned.subject.kind == done.subject.kind == "all_reduce"
    weights = next(line for line in comparison.memory if line.holder == "weights")
    assert done.subject.nbytes == pytest.approx(weights.rehearsed_bytes, rel=1e-3)
    assert done.subject.nbytes < planned.subject.nbytes


@pytest.mark.slow
def test_only_the_end_of_the_step_differs_in_a_stage_with_another_norm():
    """The plan has no gain of the last norm, which sequence parallelism shares among ranks."""
    comparison = rehearsed_stage(ALIKE_MIXTURE, "tp=2,dp=2,ep=4,pp=2", 1)
    planned, done = sorted(comparison.differing, key=lambda line: -line.planned)
    assert planned.names == ("gradient.norms.all_reduce",)
    assert done.subject.nbytes - planned.subject.nbytes == 4 * ALIKE_MIXTURE.hidden_size


@pytest.mark.slow
def test_tied_embeddings_are_summed_by_the_first_and_the_last_stage():
    tied = replace(DENSE, tied_embeddings=True)
    for stage in (0, 3):
        lines = rehearsed_stage(tied, "tp=2,pp=4", stage).differing
        assert {line.subject.kind for line in lines} == {"all_reduce", "send_recv"}
        assert len({line.subject.nbytes for line in lines}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--grid", "tp=2,pp=2", "--stage", "2"), "stage 2 is not one of layout tensor=2"),
        (("--grid", "tp=2,pp=2", "--stage", "2"), "allowed: 0 to 1"),
        (("--grid", "tp=4", "--stage", "1"), "allowed: 0, since it has no pipeline"),
    ],
)
def test_a_stage_that_the_layout_does_not_have_is_one_line(capsys, words, said):
    pytest.importorskip("megatron.core")
    tiny = ("--gpus", "4", "--model", "tiny", "--engine", "megatron-core", "--global-batch", "8")
    code, _, err = run_cli(capsys, "rehearse", *tiny, *words, "--attention", "unfused")
    assert code == 2 and said in err and err.count("\n") == 1


def test_layers_that_do_not_divide_evenly_among_the_stages_are_named(tmp_path, capsys):
    """The plan counts the embedding and the head as layers, with which these divide evenly."""
    pytest.importorskip("megatron.core")
    model = tmp_path / "six.yaml"
    sizes = "n_layers: 6, hidden_size: 64, n_heads: 4, vocab_size: 512, seq_len: 64"
    model.write_text(f"{{name: six, {sizes}}}\n")
    job = ("--gpus", "4", "--model", model, "--global-batch", "8", "--attention", "unfused")
    grid = ("--engine", "megatron-core", "--grid", "pp=4")
    code, _, err = run_cli(capsys, "rehearse", *job, *grid)
    assert code == 2 and "six: n_layers is 6" in err and "a multiple of 4" in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_report_says_which_stage_of_a_pipeline_was_rehearsed(capsys):
    pytest.importorskip("megatron.core")
    job = ("--gpus", "4", "--model", "tiny", "--global-batch", "8", "--attention", "unfused")
    grid = ("--engine", "megatron-core", "--grid", "tp=2,pp=2", "--stage", "1")
    _, text, _ = run_cli(capsys, "rehearse", *job, *grid)
    assert "rehearsed rank 2 of 4 (stage 1 of stages 0 to 1)" in text
    assert "  differs\n" in text and "  (small)\n" in text
    _, text, _ = run_cli(capsys, "rehearse", *job, *grid, "--format", "json")
    assert json.loads(text)["stage"] == 1


# The command ----------------------------------------------------------------------------------

TINY = ("rehearse", "--model", "tiny", "--gpus", "4", "--micro-batch", "1", "--recompute", "none")
TINY = (*TINY, "--global-batch", "8", "--grid", "1x2x2x1", "--format", "json")


@pytest.mark.slow
def test_the_command_exits_with_1_if_something_differs(capsys):
    code, out, _ = run_cli(capsys, *TINY, "--max-memory-error", "0.5")
    document = json.loads(out)
    assert code == 0 and document["operations_agree"] and document["memory_agrees"]
    assert all(line["planned"] == line["rehearsed"] for line in document["operations"][:3])
    code, out, _ = run_cli(capsys, *TINY, "--max-memory-error", "0")
    assert code == 1 and not json.loads(out)["memory_agrees"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "tiny"), "give --gpus, --model and --grid"),
        (("--script", "x.py"), "--ranks"),
        (("--script", "x.py", "--ranks", "2", "--gpus", "2"), "--gpus does not go with --script"),
        (("--script", "x.py", "--ranks", "2", "--stage", "1"), "--stage does not go with --script"),
        (("--script", "missing.py", "--ranks", "2"), "missing.py cannot be read"),
        ((*TINY[1:], "--engine", "deepspeed"), "bundled"),
        (("--gpus", "8", "--model", "mixtral-8x7b", "--grid", "1x1x8x1"), "has experts"),
        ((*TINY[1:], "--engine", "bundled", "--strategy", "zero3"), "not zero3"),
    ],
)
def test_bad_input_is_one_line(capsys, words, said):
    code, _, err = run_cli(capsys, "rehearse", *words)
    assert code == 2 and said in err and err.count("\n") == 1


# Prices ---------------------------------------------------------------------------------------


def test_a_step_lies_between_all_and_nothing_hidden():
    near, far = tuple(range(4)), (0, 64, 128, 192)
    counts = {
        Product(4096, 4096, 4096, "NN", "bf16"): 10,
        FusedAttention(1, 16, 2048, 128, False, True, "bf16"): 1,
        OtherKernel("copy_", 10**8, "int64"): 1,
        Message("all_reduce", 10**8, "bf16", near): 1,
        Message("all_reduce", 10**8, "bf16", far): 1,
        Message("broadcast", 10**6, "bf16", far): 1,
    }
    rehearsal = Rehearsal(counts, 1.0, {}, 256, 1.0)
    priced = price(rehearsal, load_machine("perlmutter"))
    # The links between nodes are slower than those inside, and a rank shares them with others.
    assert priced.group_seconds[far] > 2 * priced.group_seconds[near] > 0
    assert priced.flops == 10 * 2 * 4096.0**3 + 4 * 16 * 2048.0**2 * 128
    assert priced.hidden_step_seconds == max(priced.compute_seconds, priced.group_seconds[far])
    assert priced.exposed_step_seconds == pytest.approx(
        priced.compute_seconds + sum(priced.group_seconds.values())
    )
    peak = 312e12
    assert priced.compute_seconds > 10 * 2 * 4096.0**3 / peak


def test_one_element_at_a_time_takes_longer_than_its_bytes():
    machine = load_machine("dgx-h200")
    plain = OtherKernel("mul", 10**9, "bf16")
    seconds = [
        price(Rehearsal({kernel: 1}, 1.0, {}, 1, 1.0), machine).compute_seconds
        for kernel in (plain, replace(plain, is_strided=True))
    ]
    rate = machine.kernels.strided_bytes_per_s.value * machine.gpu.training_clock_fraction.value
    assert seconds[1] == pytest.approx(10**9 / rate, rel=0.02) and seconds[1] > 3 * seconds[0]


def test_attention_that_is_not_causal_takes_twice_as_long():
    machine = load_machine("perlmutter")
    causal = FusedAttention(8, 16, 4096, 128, True, True, "bf16")
    seconds = [
        price(Rehearsal({kernel: 1}, 1.0, {}, 1, 1.0), machine).compute_seconds
        for kernel in (causal, replace(causal, causal=False))
    ]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.01)


def test_a_product_of_a_type_without_a_price_is_refused():
    with pytest.raises(InputError, match="multiplies in float64"):
        price(
            Rehearsal({Product(8, 8, 8, "NN", "float64"): 1}, 1.0, {}, 1, 1.0),
            load_machine("perlmutter"),
        )


def test_the_price_of_a_script_is_shown(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "w = torch.empty(256, 256, requires_grad=True)\n"
        "def step():\n"
        "    torch.mm(torch.empty(64, 256), w).sum().backward()\n"
        "    dist.all_reduce(w.grad)\n"
    )
    code, out, _ = run_cli(capsys, "rehearse", "--script", str(path), "--ranks", "32")
    assert code == 0
    assert re.search(r"product NN +64 x 256 x 256 +fp32 +1 ", out)
    assert "32 ranks 0, 1 .. 31, 1 apart" in out
    code, out, _ = run_cli(
        capsys, "rehearse", "--script", str(path), "--ranks", "32", "--format", "json"
    )
    document = json.loads(out)
    priced = rehearse_script(str(path), 32)
    assert document["exposed_step_seconds"] == pytest.approx(priced.exposed_step_seconds)
    assert document["groups"][0]["ranks"] == list(range(32))
    assert document["is_one_step"]


def test_a_script_has_its_own_arguments(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(
        "import argparse, torch\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--width', type=int, required=True)\n"
        "width = parser.parse_args().width\n"
        "torch.mm(torch.ones(8, width), torch.ones(width, 8))\n"
    )
    words = ("rehearse", "--script", str(path), "--ranks", "2")
    _, out, _ = run_cli(capsys, *words, "--", "--width", "24")
    assert "8 x 8 x 24" in out
    code, _, err = run_cli(capsys, *words)
    assert code == 2 and "line 4: SystemExit: 2" in err
    code, _, err = run_cli(capsys, "rehearse", "--gpus", "8", "--", "--width")
    assert code == 2 and "'--width' goes with --script only" in err


def test_a_script_of_which_several_steps_may_count_is_said_to_be_whole(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfor _ in range(2): torch.mm(torch.ones(8, 8), torch.ones(8, 8))\n"
    )
    words = ("rehearse", "--script", str(path), "--ranks", "2")
    _, out, _ = run_cli(capsys, *words)
    assert "all steps between" in out
    assert "defines no function step()" in out
    _, out, _ = run_cli(capsys, *words, "--format", "json")
    assert json.loads(out)["is_one_step"] is False


def test_attention_without_a_mask_is_priced_as_such():
    """The profile of H100 has kernels of both kinds that NVIDIA timed."""
    machine = load_machine("dgx-h100")
    (point,) = (
        p
        for p in machine.kernels.attention_points
        if (p.seq_len, p.n_heads, p.backward, p.masked) == (16384, 16, False, False)
    )
    operation = FusedAttention(1, 16, 16384, 128, False, False, "bf16")
    seconds = price(Rehearsal({operation: 1}, 1.0, {}, 1, 1.0), machine).compute_seconds
    clock = machine.gpu.training_clock(0.0)
    assert seconds == pytest.approx(point.seconds / clock, rel=0.05)


def test_a_script_may_train_with_torchs_distributed_data_parallel(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "dist.init_process_group('gloo')\n"
        "layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))\n"
        "model = nn.parallel.DistributedDataParallel(layers)\n"
        "for _ in range(2):\n"
        "    model(torch.randn(8, 64)).sum().backward()\n"
    )
    priced = rehearse_script(str(path), 4)
    parameters = 2 * (64 * 64 + 64)
    reduced = [
        (message, n)
        for message, n in ((o.operation, o.n_calls) for o in priced.operations)
        if getattr(message, "kind", "") == "all_reduce"
    ]
    assert sum(message.nbytes * n for message, n in reduced) == 2 * 4.0 * parameters
