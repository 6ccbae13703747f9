"""The command line as a user types it."""

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from axonn_tune.cli.main import COMMANDS, main

SUGGEST = ["suggest", "--gpus", "64", "--model", "20b"]


def run_cli(capsys, *args):
    """Exit code, stdout and stderr of one command line."""
    code = 0
    try:
        main(list(args))
    except SystemExit as leaving:
        code = leaving.code
    out, err = capsys.readouterr()
    return code, out, err


def test_the_main_job_prints_ten_grids_assumptions_and_the_next_command(capsys):
    code, out, _ = run_cli(capsys, "suggest", "--gpus", "1024", "--model", "80b")
    assert code == 0
    header = next(line for line in out.splitlines() if "G_x" in line)
    for column in ("G_data", "mbs", "recompute", "step s", "TFLOP/s/GPU", "MFU %", "HFU %"):
        assert column in header
    assert "exposed %" in header and "GiB of 40" in header
    assert len([line for line in out.splitlines() if re.match(r" *\d+  ", line)]) == 10
    assert "machine perlmutter (the default" in out
    assert "16.78M tokens" in out and "sequence length 2048" in out and "bf16" in out
    following = out.splitlines()[-1]
    assert following.startswith("Next: axonn-tune explain --gpus 1024 --model 80b --grid ")
    code, out, _ = run_cli(capsys, *following.removeprefix("Next: axonn-tune ").split())
    assert code == 0 and "backward.down.gemm_weight" in out


def test_the_next_command_keeps_what_was_typed(capsys):
    _, out, _ = run_cli(capsys, *SUGGEST, "--no-oag", "--seq-len", "1024", "--order", "all")
    following = out.splitlines()[-1]
    assert "--no-oag" in following and "--seq-len 1024" in following and "--order" in following
    step = next(line for line in out.splitlines() if re.match(r" *1  ", line)).split()[8]
    _, out, _ = run_cli(capsys, *following.removeprefix("Next: axonn-tune ").split())
    assert f"step {step} s" in out


@pytest.mark.parametrize(
    "options",
    [["--include-oom"], ["--every-configuration", "--gx", "1"], ["--cost-model", "paper"]],
)
def test_the_next_command_is_one_that_explain_takes(capsys, options):
    _, out, _ = run_cli(capsys, *SUGGEST, *options)
    following = out.splitlines()[-1].removeprefix("Next: axonn-tune ").split()
    assert run_cli(capsys, *following)[0] == 0


def test_json_is_the_contract_and_goes_to_a_file(capsys, tmp_path):
    target = tmp_path / "ranking.json"
    code, out, _ = run_cli(
        capsys, *SUGGEST, "--format", "json", "--top-n", "2", "--output", str(target)
    )
    assert code == 0 and out == ""
    document = json.loads(target.read_text())
    assert document["schema_version"] == 1
    assert [entry["rank"] for entry in document["results"]] == [1, 2]
    assert document["assumptions"]["machine"] == "perlmutter"
    assert sum(document["rejected"].values()) > 0


def test_csv_and_yaml_hold_the_same_results(capsys):
    _, as_json, _ = run_cli(capsys, *SUGGEST, "--format", "json")
    _, as_csv, _ = run_cli(capsys, *SUGGEST, "--format", "csv")
    _, as_yaml, _ = run_cli(capsys, *SUGGEST, "--format", "yaml")
    results = json.loads(as_json)["results"]
    rows = list(csv.DictReader(io.StringIO(as_csv)))
    assert [float(row["step_seconds"]) for row in rows] == [r["step_seconds"] for r in results]
    assert yaml.safe_load(as_yaml)["results"] == results


def test_verbose_counts_the_rejected(capsys):
    _, out, _ = run_cli(capsys, *SUGGEST, "--verbose")
    assert re.search(r"\d+  attention heads not divisible by G_y", out)
    assert re.search(r"\d+  out of memory", out)


def test_out_of_memory_grids_show_their_largest_term(capsys):
    _, out, _ = run_cli(capsys, *SUGGEST, "--include-oom", "--gx", "1", "--gy", "1", "--gz", "1")
    assert "OOM: optimizer_states" in out


def test_why_not(capsys):
    code, out, _ = run_cli(capsys, *SUGGEST, "--why-not", "1x1x1x64")
    assert code == 0 and "GiB short" in out


def test_paper_cost_model_shows_both(capsys):
    _, out, _ = run_cli(capsys, *SUGGEST, "--cost-model", "paper")
    assert "paper s" in out and "step s" in out


def test_explain_json(capsys):
    code, out, _ = run_cli(
        capsys,
        "explain",
        "--gpus",
        "64",
        "--model",
        "20b",
        "--grid",
        "2x2x16x1",
        "--format",
        "json",
    )
    document = json.loads(out)
    assert code == 0
    names = {op["name"] for op in document["operations"]}
    assert {"forward.qkv.gemm", "backward.up.reduce_scatter", "optimizer.step"} <= names
    assert {s["resource"] for s in document["sensitivities"]} >= {"slingshot bandwidth"}
    by_name = {op["name"]: op for op in document["operations"]}
    assert by_name["backward.up.reduce_scatter"]["bound_by"] == "slingshot"


def test_user_files(capsys, tmp_path):
    model = tmp_path / "mine.yaml"
    model.write_text(
        "name: mine\nn_layers: 4\nhidden_size: 512\nn_heads: 8\nvocab_size: 1000\nseq_len: 128\n"
    )
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 512,
                "intermediate_size": 1024,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "vocab_size": 1000,
                "max_position_embeddings": 256,
            }
        )
    )
    for path in (model, config):
        code, out, err = run_cli(
            capsys, "suggest", "--gpus", "8", "--model", str(path), "--global-batch", "64"
        )
        assert (code, err) == (0, "")
        assert "8 NVIDIA A100" in out


def test_models_and_machines(capsys):
    _, out, _ = run_cli(capsys, "models", "list")
    for name in ("gpt-80b", "gpt3-175b", "megatron-1t", "gpt-neox-20b", "llama3-405b"):
        assert name in out
    _, out, _ = run_cli(capsys, "machines", "list")
    for name in ("perlmutter", "perlmutter-80gb", "frontier", "alps", "dgx-a100", "dgx-h100"):
        assert name in out
    _, out, _ = run_cli(capsys, "models", "show", "80b")
    assert "76762497024" in out
    _, out, _ = run_cli(capsys, "machines", "show", "frontier")
    assert "assumed" in out and "published" in out and "OLCF" in out and "gcd-gcd" in out


@pytest.mark.parametrize(
    ("args", "culprit"),
    [
        (["sugest"], "sugest"),
        (["suggest"], "--gpus"),
        (["suggest", "--gpus", "8"], "--model"),
        (["suggest", "--gpus", "eight", "--model", "80b"], "eight"),
        (["suggest", "--gpus", "-4", "--model", "80b"], "-4"),
        (["suggest", "--gpus", "0", "--model", "80b"], "0"),
        ([*SUGGEST, "--seq-len", "99999999999"], "99999999999"),
        ([*SUGGEST, "--seq-len", "1073741824"], "fits on no grid"),
        ([*SUGGEST, "--global-batch", "9" * 30], "9" * 30),
        ([*SUGGEST, "--gz", "9" * 30], "9" * 30),
        (["suggest", "--gpus", "9" * 30, "--model", "80b"], "9" * 30),
        ([*SUGGEST, "--machine", "perlmuter"], "did you mean 'perlmutter'"),
        (["suggest", "--gpus", "8", "--model", "gpt-81b"], "gpt-80b"),
        (["suggest", "--gpus", "8", "--model", "no/such.yaml"], "no/such.yaml"),
        ([*SUGGEST, "--grid", "2"], "--grid"),
        ([*SUGGEST, "--order", "zyx"], "zyx"),
        ([*SUGGEST, "--recompute", "most"], "most"),
        ([*SUGGEST, "--format", "xml"], "xml"),
        ([*SUGGEST, "--top-n", "0"], "--top-n"),
        ([*SUGGEST, "--why-not", "2x2"], "2x2"),
        ([*SUGGEST, "--output", "/no/such/folder/x.json"], "/no/such/folder"),
        ([*SUGGEST, "--global-batch", "7", "--gz", "2"], "64 GPUs"),
        (["suggest", "--gpus", "17", "--model", "80b"], "17"),
        (["suggest", "--gpus", "2", "--model", "640b"], "it fits from"),
        (["explain", "--gpus", "64", "--model", "20b", "--grid", "64x64x64x64"], "64x64x64x64"),
        (["explain", "--gpus", "64", "--model", "20b", "--grid", "1x64x1x1"], "attention heads"),
        (["models", "show", "zebra"], "zebra"),
        (["machines", "show", "fronteir"], "frontier"),
        (["reproduce", "--format", "xml"], "xml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, args, culprit):
    code, out, err = run_cli(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.startswith("axonn-tune: ") and err.count("\n") == 1
    assert culprit in err
    assert "Traceback" not in err


def test_malformed_machine_file_names_file_line_and_key(capsys, tmp_path):
    good = Path(__file__).parents[2] / "hardware_profiles" / "perlmutter.yaml"
    bad = tmp_path / "bad.yaml"
    bad.write_text(good.read_text().replace("unit_ranks: 4", "unit_rank: 4"))
    code, _, err = run_cli(capsys, *SUGGEST, "--machine", str(bad))
    line = 1 + bad.read_text().splitlines().index("    unit_rank: 4")
    assert code == 2 and err.count("\n") == 1
    assert "bad.yaml" in err and str(line) in err and "unit_ranks" in err
    bad.write_text("name: [unclosed\n")
    code, _, err = run_cli(capsys, *SUGGEST, "--machine", str(bad))
    assert code == 2 and "bad.yaml" in err and err.count("\n") == 1


def test_an_output_that_cannot_be_replaced_is_left_as_it_was(capsys, tmp_path):
    folder = tmp_path / "taken.json"
    folder.mkdir()
    code, _, err = run_cli(capsys, *SUGGEST, "--output", str(folder))
    assert code == 2 and "taken.json" in err and folder.is_dir()


def test_every_command_shows_an_example(capsys):
    for name in COMMANDS:
        code, out, _ = run_cli(capsys, name, "--help")
        assert code == 0 and f"axonn-tune {name}" in out.split("Example", 1)[1]


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m axonn_tune.cli.main models list | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_command_reference_is_up_to_date():
    from axonn_tune.cli.reference import reference_markdown

    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text().rstrip() == reference_markdown().rstrip(), (
        "run: python -m axonn_tune.cli.reference > docs/cli.md"
    )
