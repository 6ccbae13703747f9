"""What `launch` writes: as it was agreed (golden files), understood by those who read it."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import run_cli

from axonn_tune.api.searching import build_search
from axonn_tune.cli.main import main
from axonn_tune.errors import InputError
from axonn_tune.io.package_data import training_program
from axonn_tune.job_scripts.axonn import rank_lines
from axonn_tune.job_scripts.script import FRAMEWORKS, launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.layout import grid_layout, parse_layout
from axonn_tune.strategies.named import STRATEGIES, strategy_named

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
CASES = {
    "axonn": ("80b", 1024, "perlmutter", "axonn", "2x2x64x4", {}),
    "axonn-order": ("20b", 64, "frontier", "axonn", "2x1x8x4", {"order": "zxyd"}),
    "axonn-pipeline": ("20b", 64, "alps", "axonn-pipeline", "1x1x8x2x4", {}),
    "megatron": (
        "llama3-70b",
        512,
        "dgx-h100",
        "megatron",
        "tensor=8,pipeline=4,data=16",
        {"virtual_stages": 4, "recompute": "selective"},
    ),
    "megatron-gpt": (
        "gpt3-175b",
        512,
        "perlmutter-80gb",
        "megatron",
        "tensor=8,pipeline=8,data=8",
        {"recompute": "full", "dropout": True, "attention": "unfused"},
    ),
    "megatron-experts": (
        "deepseek-v2",
        256,
        "dgx-h100",
        "megatron",
        "tensor=2,pipeline=4,data=32,expert=32",
        {"virtual_stages": 1, "global_batch": 1024},
    ),
    "megatron-windows": (
        "gpt-oss-120b",
        64,
        "dgx-h100",
        "megatron",
        "tensor=2,data=32,expert=32",
        {"global_batch": 512},
    ),
    "fsdp2": ("20b", 64, "a100-400g", "zero3", "shard=64", {}),
    "fsdp2-hybrid": ("20b", 64, "perlmutter", "zero3", "shard=16,replica=4", {}),
    "zeropp": ("20b", 384, "frontier", "zeropp", "secondary=8,across=48", {"global_batch": 1536}),
}


def files_of(case, **options):
    model, gpus, machine, strategy, layout, arguments = CASES[case]
    arguments = {"micro_batch": 1, "recompute": "full", **arguments}
    search = build_search(model, gpus, machine, strategy=strategy, **arguments)
    return launch_files(best_of_layout(search, layout), **options)


@pytest.mark.parametrize("case", CASES)
def test_files_are_as_agreed(case):
    """Run with AXONN_TUNE_WRITE_GOLDEN=1 to agree on new ones."""
    files = files_of(case, sbatch_options=("--account=abc",))
    for name, text in files.items():
        if name.endswith(".py"):
            assert text == training_program(name)
            continue
        path = GOLDEN / case / name
        if os.environ.get("AXONN_TUNE_WRITE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text


@pytest.mark.parametrize("case", CASES)
def test_files_can_be_read_by_shell_and_python(case):
    for name, text in files_of(case).items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith((".sbatch", ".sh")):
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize("case", [case for case in CASES if "megatron" not in case])
def test_a_program_finds_its_modules_and_settings(case):
    """What a program imports is installed with its framework, or stands next to it."""
    files = files_of(case)
    installed = {"torch", "numpy", "axonn", "deepspeed", *sys.stdlib_module_names}
    for name, text in files.items():
        if name.endswith(".py"):
            needed = {module.split(".")[0] for module in imported_modules(text)} - installed
            assert {f"{module}.py" for module in needed} <= set(files)
    settings = json.loads(files["settings.json"])
    layout = parse_layout(CASES[case][4], strategy_named(CASES[case][3]).axes)
    sizes = {axis: size for axis, size in settings["layout"].items() if size > 1}
    assert sizes == {axis: size for axis, size in layout.sizes.items() if size > 1}
    assert settings["model"]["n_layers"] == 32 or case == "axonn"


def imported_modules(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def documented_keys():
    lines = (HERE / "deepspeed_keys.txt").read_text().splitlines()
    keys = [line for line in lines if not line.startswith("#")]
    return {k for k in keys if k[0] != " "}, {k.strip() for k in keys if k[0] == " "}


@pytest.mark.parametrize(("case", "framework"), [("zeropp", None), ("fsdp2", "deepspeed")])
def test_deepspeed_documents_every_key(case, framework):
    document = json.loads(files_of(case, framework=framework)["ds_config.json"])
    outer, inner = documented_keys()
    assert set(document) <= outer and set(document["zero_optimization"]) <= inner
    per_step = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"]
    assert document["train_batch_size"] == per_step * CASES[case][1]


@pytest.mark.parametrize(
    ("engine", "program"), [("deepspeed", "train_deepspeed.py"), ("fsdp2", "train_fsdp2.py")]
)
def test_the_engine_chooses_the_framework(engine, program):
    search = build_search("20b", 64, strategy="zero3", engine=engine, micro_batch=1)
    files = launch_files(best_of_layout(search, "shard=64"))
    assert program in files
    assert json.loads(files["settings.json"])["engine"] == f"{engine}-eager"


def test_torchtitan_is_launched_where_it_was_predicted():
    search = build_search("llama3-8b", 64, strategy="zero3", engine="torchtitan", micro_batch=1)
    files = launch_files(best_of_layout(search, "shard=64"))
    assert json.loads(files["settings.json"])["flavor"] == "8B"


def offloading(strategy, layout, **options):
    """A prediction with offload on hosts with the memory of Perlmutter's."""
    return best_of_layout(
        build_search("20b", 64, strategy=strategy, offload="optimizer", **options), layout
    )


def test_deepspeed_offloads_to_the_memory_of_the_host():
    files = launch_files(offloading("zero3", "shard=64", engine="deepspeed"))
    zero = json.loads(files["ds_config.json"])["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in files_of("fsdp2", framework="deepspeed")["ds_config.json"]


def test_fsdp2_reads_that_it_offloads():
    files = launch_files(offloading("zero3", "shard=64"))
    assert json.loads(files["settings.json"])["offload"] == "optimizer"


def test_megatron_offloads_with_its_distributed_optimizer_only():
    layout = "tensor=4,data=16"
    script = launch_files(offloading("megatron", layout))["launch.sbatch"]
    for flag in (
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction 1.0",
        "--use-precision-aware-optimizer",
        "--use-distributed-optimizer",
    ):
        assert flag in script
    assert "offload" not in files_of("megatron")["launch.sbatch"]
    replicated = offloading("megatron", layout, distributed_optimizer=False)
    with pytest.raises(InputError, match="--no-distributed-optimizer: Megatron-Core offloads"):
        launch_files(replicated)


@pytest.mark.parametrize(
    ("kind", "name"), [(None, "p2p"), ("all_gather", "all_gather"), ("ulysses", "a2a")]
)
def test_megatron_reads_the_kind_of_context_parallelism(kind, name):
    options = {"strategy": "megatron", "micro_batch": 1, "recompute": "full", "context_kind": kind}
    search = build_search("llama3-8b", 16, "dgx-h100", **options)
    script = launch_files(best_of_layout(search, "tensor=2,context=4,data=2"))["launch.sbatch"]
    assert f"--cp-comm-type {name} " in script
    whole = launch_files(best_of_layout(search, "tensor=8,data=2"))["launch.sbatch"]
    assert "cp-comm-type" not in whole


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("ulysses=2,ring=4", "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4"),
        ("ulysses=8,ring=1", "--cp-comm-type a2a "),
        ("ulysses=1,ring=8", "--cp-comm-type p2p "),
    ],
)
def test_megatron_reads_two_kinds_of_context_parallelism(layout, flags):
    search = build_search(
        "llama3-8b", 16, "dgx-h100", strategy="megatron", context_kind="ulysses_ring"
    )
    files = launch_files(best_of_layout(search, f"tensor=1,data=2,{layout}"))
    script = " ".join(files["launch.sbatch"].replace("\\\n", " ").split())
    assert f"--context-parallel-size 8 {flags}" in script


def test_megatron_shards_gradients_with_its_fsdp():
    search = build_search("llama3-8b", 16, "dgx-h100", strategy="megatron", shard_gradients=True)
    script = launch_files(best_of_layout(search, "tensor=2,data=8"))["launch.sbatch"]
    given = "--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads"
    for flag in (*given, "--ckpt-format fsdp_dtensor", "--use-distributed-optimizer"):
        assert flag in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script


@pytest.mark.parametrize("option", ["distributed_optimizer", "shard_gradients"])
def test_axonn_shards_in_a_program_of_the_user_only(option):
    search = build_search("5b", 16, "perlmutter", strategy="axonn", **{option: True})
    chosen = best_of_layout(search, "1x1x4x4")
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')}: train_axonn.py keeps"):
        launch_files(chosen)
    assert "python my.py" in launch_files(chosen, train="my.py")["launch.sbatch"]


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_reads_its_stage(stage):
    search = build_search("5b", 16, "frontier", strategy=f"zero{stage}", dtype="bf16")
    zero = json.loads(launch_files(best_of_layout(search, "data=16"))["ds_config.json"])
    assert zero["zero_optimization"]["stage"] == stage
    assert set(zero["zero_optimization"]) <= documented_keys()[1]


def test_the_parts_of_zeropp_are_switched():
    search = build_search("20b", 64, "frontier", strategy="zeropp", hpz=False, qgz=False)
    files = launch_files(best_of_layout(search, "secondary=8,across=8"))
    zero = json.loads(files["ds_config.json"])["zero_optimization"]
    assert zero["zero_quantized_weights"] is True
    assert "zero_hpz_partition_size" not in zero and "zero_quantized_gradients" not in zero


@pytest.mark.parametrize("order", ["xyzd", "zxyd", "dzyx"])
def test_ranks_are_numbered_as_axonn_does(order):
    """A process that stands at p has coordinates in the order; AxoNN's rank follows from them."""
    search = build_search("tiny", 8, global_batch=8, micro_batch=1, order=order)
    prediction = best_of_layout(search, "2x1x2x2")
    sizes = {"x": 2, "y": 1, "z": 2, "d": 2}
    script = "\n".join([*rank_lines(prediction), "echo $RANK"])
    ranks = []
    for place in range(8):
        done = subprocess.run(
            ["bash", "-c", script], env={"SLURM_PROCID": str(place)}, capture_output=True, text=True
        )
        ranks.append(int(done.stdout))
    expected, placements = [], Placements.of([grid_layout(2, 1, 2, 2)], (order,))
    strides = dict(zip("xyzd", placements.strides[:, 0], strict=True))
    for place in range(8):
        at = {axis: place // int(strides[axis]) % sizes[axis] for axis in "xyzd"}
        expected.append(at["x"] + 2 * (at["y"] + 1 * (at["z"] + 2 * at["d"])))
    assert ranks == expected and np.array_equal(np.sort(ranks), np.arange(8))


def test_every_strategy_says_what_runs_it():
    assert set(FRAMEWORKS) == set(STRATEGIES)
    search = build_search("20b", 64, strategy="zero-topo")
    chosen = best_of_layout(search, "weights=4,gradients=2,states=8")
    with pytest.raises(InputError, match="no released implementation"):
        launch_files(chosen)


def test_a_framework_that_does_not_run_the_strategy_is_refused():
    with pytest.raises(InputError, match="is 'megatron'; allowed with strategy axonn: axonn"):
        files_of("axonn", framework="megatron")


def test_axonn_reduces_gradients_after_the_backward_pass_only():
    search = build_search("20b", 64, overlap_grad_reduce=True)
    chosen = best_of_layout(search, "1x1x32x2")
    with pytest.raises(InputError, match=r"--overlap-grad-reduce: train_axonn\.py reduces"):
        launch_files(chosen)
    assert any("mine.py" in text for text in launch_files(chosen, train="mine.py").values())


def test_deepspeed_keeps_no_replicas():
    with pytest.raises(InputError, match=r"DeepSpeed has had no replicas .*: --framework fsdp2"):
        files_of("fsdp2-hybrid", framework="deepspeed")


@pytest.mark.parametrize("engine", ["deepspeed", "deepspeed-eager", "deepspeed-2021"])
def test_a_search_for_deepspeed_has_no_replicas(engine):
    ranking = rank_candidates(build_search("20b", 64, strategy="zero3", engine=engine))
    assert set(ranking.table.placements.size("replica")) == {1}
    assert any("does not keep" in reason for reason in ranking.rejected)


def test_layouts_are_chosen_for_the_framework(tmp_path, capsys):
    """FSDP2 would choose replicas for the first, and to recompute some layers for the second."""
    for job in (
        ("--gpus", 64, "--model", "20b", "--framework", "deepspeed"),
        (
            "--gpus",
            96,
            "--model",
            "llama3-70b",
            "--framework",
            "torchtitan",
            "--machine",
            "dgx-h100",
        ),
    ):
        out = tmp_path / job[5]
        code, said, error = run_cli(capsys, "launch", *job, "--strategy", "zero3", "--output", out)
        assert (code, error) == (0, "")
        assert str(out) in said


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed"])
def test_programs_that_split_no_layers_refuse_to(framework):
    search = build_search(
        "20b", 64, "dgx-h100", strategy="zero3", engine="torchtitan", recompute="full"
    )
    chosen = best_of_layout(search, "tensor=4,shard=16")
    with pytest.raises(InputError, match=r"splits no layers, .* or a layout with tensor=1"):
        launch_files(chosen, framework)
    assert any("mine.py" in text for text in launch_files(chosen, framework, "mine.py").values())


def test_the_command_writes_into_a_directory(tmp_path, capsys):
    folder = tmp_path / "new" / "run"
    main(["launch", "--gpus", "64", "--model", "20b", "--output", str(folder)])
    paths = capsys.readouterr().out.split()
    names = {path.name for path in folder.iterdir()}
    assert {"launch.sbatch", "rank.sh", "train_axonn.py", "settings.json"} < names
    assert sorted(paths) == sorted(str(path) for path in folder.iterdir())


def test_a_script_that_was_filled_in_is_not_replaced(tmp_path, capsys):
    arguments = ["launch", "--gpus", "4", "--model", "tiny", "--output", str(tmp_path)]
    main(arguments)
    main(arguments)
    script = tmp_path / "launch.sbatch"
    script.write_text(script.read_text() + "# mine\n")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and f"{script} exists with another text" in said
    assert script.read_text().endswith("# mine\n")
    main([*arguments, "--force"])
    assert "# mine" not in script.read_text()


def test_a_script_for_what_does_not_fit_says_so(tmp_path, capsys):
    arguments = ["--gpus", "8", "--model", "80b", "--grid", "1x1x8x1", "--output", str(tmp_path)]
    main(["launch", *arguments])
    said = "Predicted to run out of memory: "
    assert capsys.readouterr().err.startswith(said)
    assert f"# {said}" in (tmp_path / "launch.sbatch").read_text()
    assert not any(said in text for text in files_of("axonn").values())


def test_a_directory_that_is_a_file_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["launch", "--gpus", "64", "--model", "20b", "--output", str(tmp_path / "file")])
    assert ended.value.code == 2 and "file" in capsys.readouterr().err


def test_torchtitan_gets_a_recomputation_that_it_has_where_the_search_chooses_one(capsys, tmp_path):
    job = ["--gpus", "8", "--model", "llama3-70b", "--machine", "gb200-nvl72"]
    job += ["--engine", "torchtitan", "--global-batch", "16", "--micro-batch", "2"]
    job += ["--fix", "tensor=4", "--output", str(tmp_path)]
    code, _, error = run_cli(capsys, "launch", *job)
    assert code == 0 and not error
    written = json.loads((tmp_path / "settings.json").read_text())
    assert written["activation_checkpoint"] == "full"


@pytest.mark.parametrize(
    ("strategy", "engine", "started", "warns"),
    [
        ("zero3", "torchtitan-2024", "torchtitan", False),
        ("zero3", "deepspeed-eager", "deepspeed", False),
        ("zero3", "automodel-2025", "fsdp2", True),
        ("megatron", "nanotron", "megatron", True),
        ("megatron", "megatron-core", "megatron", False),
        ("megatron", "megatron-core-graphs", "megatron", False),
        ("megatron", "megatron-2021-09", "a Megatron-LM of 2026", True),
        ("megatron", "megatron-2022", "a Megatron-LM of 2026", True),
    ],
)
def test_an_engine_is_started_by_its_framework_or_the_command_says_so(
    capsys, tmp_path, strategy, engine, started, warns
):
    job = ["--gpus", "16", "--model", "llama3-8b", "--machine", "dgx-h100"]
    job += ["--strategy", strategy, "--engine", engine, "--output", str(tmp_path)]
    code, _, error = run_cli(capsys, "launch", *job)
    assert code == 0
    warning = f"The times are those of the engine {engine}; the script starts {started}."
    assert (warning in error) == warns


@pytest.mark.parametrize(
    ("engine", "said"),
    [("fsdp2", True), ("fsdp2-eager", False)],
)
def test_a_program_of_another_engine_than_the_predicted_one_says_so(engine, said, tmp_path, capsys):
    job = ["--gpus", "8", "--model", "llama3-8b", "--machine", "dgx-h100", "--engine", engine]
    assert run_cli(capsys, "launch", *job, "--output", tmp_path)[0] == 0
    script = (tmp_path / "launch.sbatch").read_text()
    assert ("# But train_fsdp2.py runs the engine fsdp2-eager;" in script) == said


def test_megatron_says_what_its_log_shows(tmp_path, capsys):
    """Half of 12 L s h of scores for each token are not in it (--log-throughput)."""
    job = ["--gpus", "512", "--model", "llama3-70b", "--machine", "alps", "--seq-len", "8192"]
    job += ["--strategy", "megatron", "--global-batch", "2048"]
    assert run_cli(capsys, "launch", *job, "--output", tmp_path)[0] == 0
    script = (tmp_path / "launch.sbatch").read_text()
    seconds = float(re.search(r"Predicted: ([\d.]+) s a step", script)[1])
    counted = float(re.search(r"([\d.]+) TFLOP/s per GPU, with", script)[1])
    scores = 12 * 80 * 8192 * 8192 * 2048 * 8192 / (512 * seconds * 1e12)
    shown = float(re.search(r"it shows about ([\d.]+) TFLOP/s", script)[1])
    assert shown == pytest.approx(counted - scores / 2, abs=0.2)


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_a_script_says_that_a_router_has_to_learn_first(imbalance):
    """Mock data and a router without training made steps of experts slower than predicted."""
    options = {"expert_imbalance": imbalance, "micro_batch": 1, "recompute": "full"}
    search = build_search("olmoe-1b-7b", 8, "dgx-h100", strategy="megatron", **options)
    script = launch_files(best_of_layout(search, "data=8,expert=8"))["launch.sbatch"]
    assert ("(--expert-imbalance predicts it)" in script) == (imbalance == 1.0)
