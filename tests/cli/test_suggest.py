"""``axonn-tune suggest``, the main job, and ``explain``, its next command."""

import csv
import io
import json
import re

import pytest
import yaml
from command_line import assert_refused, run_cli

SUGGEST = ["suggest", "--gpus", "64", "--model", "20b"]


def test_the_main_job_prints_ten_grids_assumptions_and_the_next_command(capsys):
    code, out, _ = run_cli(capsys, "suggest", "--gpus", "1024", "--model", "80b")
    assert code == 0
    assert "grids G_x x G_y x G_z x G_data" in out.splitlines()[0]
    header = out.splitlines()[2]
    for column in (
        "grid",
        "mbs",
        "recompute",
        "step s",
        "P(best)",
        "MFU %",
        "tokens/s",
        "GiB of 40",
    ):
        assert column in header
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
    step = next(line for line in out.splitlines() if re.match(r" *1  ", line)).split()[5]
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
    arguments = ["--format", "json", "--top-n", "2", "--output", target]
    code, out, _ = run_cli(capsys, *SUGGEST, *arguments)
    assert code == 0 and out == ""
    document = json.loads(target.read_text())
    assert document["schema_version"] == 1
    assert [entry["rank"] for entry in document["results"]] == [1, 2]
    assert document["assumptions"]["machine"] == "perlmutter"
    assert sum(document["rejected"].values()) > 0


@pytest.mark.slow
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


def test_why_not_finds_the_row_of_an_order_in_the_whole_ranking(capsys):
    orders = [*SUGGEST, "--order", "all"]
    _, out, _ = run_cli(capsys, *orders, "--format", "json", "--top-n", "999")
    grids = json.loads(out)["results"]
    row = next(i for i, grid in enumerate(grids) if i > 3 and grid["order"] == "dzxy")
    sizes = "x".join(str(grids[row]["grid"][axis]) for axis in ("x", "y", "z", "data"))
    _, out, _ = run_cli(capsys, *orders, "--why-not", f"{sizes} dzxy")
    slower = grids[row]["step_seconds"] / grids[0]["step_seconds"]
    place = f"it ranks {row + 1} of {len(grids)}"
    assert f"{place} and takes {slower:.3f} times as long as the best" in out
    _, out, _ = run_cli(capsys, *SUGGEST, "--why-not", f"{sizes} dzxy")
    assert "no --order asks for dzxy" in out


def test_why_not_names_the_order_that_was_asked_for_though_another_one_is_the_same(capsys):
    job = ["suggest", "--gpus", "48", "--model", "20b", "--order", "all"]
    said = [
        run_cli(capsys, *job, "--why-not", f"1x1x16x3 {order}")[1] for order in ("dxyz", "xydz")
    ]
    assert said[0].startswith("1x1x16x3 dxyz: allowed;")
    assert said[0].replace("dxyz", "xydz") == said[1]


def test_why_not_finds_the_row_of_a_layout_with_experts(capsys):
    job = ["suggest", "--gpus", "16", "--model", "mixtral-8x7b", "--machine", "dgx-h100"]
    _, out, _ = run_cli(capsys, *job, "--format", "json", "--top-n", "999")
    layouts = [result["grid"] for result in json.loads(out)["results"]]
    place = next(i for i, layout in enumerate(layouts) if i and layout["expert"] > 1)
    sizes = ",".join(f"{axis}={size}" for axis, size in layouts[place].items())
    _, out, _ = run_cli(capsys, *job, "--why-not", sizes)
    assert f"it ranks {place + 1} of {len(layouts)}" in out


def test_why_not_says_what_is_missing_where_no_batch_fits(capsys):
    job = ["suggest", "--gpus", "12", "--model", "gemma3-27b", "--within", "5%"]
    code, out, _ = run_cli(capsys, *job, "--why-not", "1x2x2x3")
    assert code == 0 and "GiB short" in out
    assert_refused(
        capsys, *job, "--why-not", "1x2x2x3", "--format", "json", culprit="--format is of a ranking"
    )


def test_paper_cost_model_shows_both(capsys):
    _, out, _ = run_cli(capsys, *SUGGEST, "--cost-model", "paper")
    assert "paper s" in out and "step s" in out


def test_a_page_beside_a_ranking(capsys, tmp_path):
    page = tmp_path / "report.html"
    job = ["suggest", "--gpus", "8", "--model", "tiny"]
    code, out, _ = run_cli(capsys, *job, "--html", page)
    assert code == 0 and page.read_text().startswith("<!doctype html>")
    assert out == run_cli(capsys, *job)[1]


def test_explain_json(capsys):
    job = ["--gpus", "64", "--model", "20b", "--grid", "2x2x16x1"]
    code, out, _ = run_cli(capsys, "explain", *job, "--format", "json")
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


def test_the_number_type_follows_the_machine(capsys):
    _, out, _ = run_cli(capsys, *SUGGEST, "--machine", "dgx2-4ib", "--top-n", "1")
    assert ", fp16, flash" in out
    _, out, _ = run_cli(capsys, *SUGGEST, "--machine", "dgx-h100", "--top-n", "1")
    assert ", bf16, flash" in out


def test_a_job_larger_than_the_machine_is_called_so(capsys):
    many = ["suggest", "--gpus", "8192", "--model", "80b", "--top-n", "1"]
    _, out, _ = run_cli(capsys, *many)
    assert "perlmutter has no more than 1536 nodes (6144 GPUs)." in out
    _, out, _ = run_cli(capsys, *many, "--machine", "frontier")
    assert "no more than" not in out


def test_a_config_states_its_sequence_length_and_what_is_left_out(capsys, tmp_path):
    config = {
        "model_type": "gemma2",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 4096,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "attn_logit_softcapping": 50.0,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    suggest = ["suggest", "--gpus", "8", "--model", path, "--top-n", "1"]
    _, out, _ = run_cli(capsys, *suggest)
    assert "4096 (max_position_embeddings of the config; choose with --seq-len)" in out
    assert "Predictions leave out soft caps of logits." in out
    _, out, _ = run_cli(capsys, *suggest, "--seq-len", "2048")
    assert "sequence length 2048, bf16" in out


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [3, 5])
def test_the_batches_and_counts_that_an_error_names_do_work(capsys, micro_batch):
    """64 GPUs of llama3-8b: no share of 2048 sequences can be cut into threes."""
    given = ["--model", "llama3-8b", "--machine", "dgx-h100", "--micro-batch", micro_batch]
    code, _, err = run_cli(capsys, "suggest", "--gpus", "64", *given, "--global-batch", "2048")
    assert code == 2 and f"layouts: micro-batch {micro_batch} does not divide" in err
    named = re.search(r"batches that do: (\d+), (\d+) sequences, .* can share (\d+) evenly", err)
    for batch in named.groups():
        fitting = ["--gpus", "64", *given, "--global-batch", batch, "--top-n", "1"]
        assert run_cli(capsys, "suggest", *fitting)[0] == 0
    assert int(named.group(3)) % (64 * micro_batch) == 0


def test_explain_says_first_that_a_grid_does_not_fit(capsys):
    _, out, _ = run_cli(capsys, "explain", "--gpus", "64", "--model", "80b", "--grid", "x=1,z=64")
    assert "out of memory" not in out.splitlines()[1]
    _, out, _ = run_cli(capsys, "explain", "--gpus", "64", "--model", "80b", "--grid", "z=8,data=8")
    assert re.match(r"out of memory: \d+\.\d\d GiB short of 40.0 GiB", out.splitlines()[1])
    assert out.split("\n\n")[0].count("out of memory") == 1


def test_a_pipelined_grid_is_read_as_it_is_shown(capsys):
    piped = ["--gpus", "64", "--model", "5b", "--strategy", "axonn-pipeline"]
    _, out, _ = run_cli(capsys, "suggest", *piped, "--fix", "pipeline=2", "--top-n", "1")
    assert "grids G_x x G_y x G_z x G_data x stages" in out.splitlines()[0]
    grid = out.splitlines()[4].split()[1]
    assert grid.endswith("x2")
    _, out, _ = run_cli(capsys, "explain", *piped, "--grid", grid)
    assert f"grid {grid} (x, y, z, data, pipeline)" in out


@pytest.mark.parametrize(
    "command",
    [
        ["suggest", "--gpus", "64", "--model", "20b", "--order", "all"],
        ["suggest", "--gpus", "64", "--model", "20b", "--strategy", "megatron"],
        ["suggest", "--gpus", "256", "--model", "80b", "--cost-model", "paper"],
        pytest.param(["compare", "--gpus", "256", "--model", "20b"], marks=pytest.mark.slow),
        pytest.param(
            ["scale", "--gpus", "512..2048", "--weak", "10b,20b,40b", "--strategy", "megatron"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=" ".join,
)
def test_tables_fit_a_hundred_characters(capsys, command):
    _, out, _ = run_cli(capsys, *command)
    ruler = next(number for number, line in enumerate(out.splitlines()) if "--  --" in line)
    rows = out.split("\n\n")[1].splitlines()
    assert ruler == 3 and len(rows) > 2
    assert max(map(len, rows)) <= 100
    assert "step s" in rows[0] and "90 % interval" in rows[0]


@pytest.mark.parametrize(
    "command",
    [
        *("machines list", "engines list", "engines show nanotron"),
        "whatif --gpus 8 --model 5b --micro-batch 1 --recompute full --by 4",
    ],
)
def test_lists_fit_a_hundred_characters(capsys, command):
    _, out, _ = run_cli(capsys, *command.split())
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    "command", [["plan", "--tokens", "1B"], ["whatif", "--set", "inter_node.bandwidth=2x"]]
)
def test_tables_of_layouts_with_many_axes_fit_a_hundred_characters(capsys, command):
    job = ["--gpus", "16", "--model", "mixtral-8x7b", "--machine", "dgx-h100"]
    _, out, _ = run_cli(capsys, *command, *job)
    (dashes,) = (line for line in out.splitlines() if line.startswith("----"))
    assert len(dashes) <= 100


@pytest.mark.parametrize("strategy", ["axonn", "megatron", "zeropp"])
def test_a_layout_of_any_table_can_be_typed(capsys, strategy):
    given = ["--gpus", "64", "--model", "20b", "--strategy", strategy, "--recompute", "full"]
    _, out, _ = run_cli(capsys, "suggest", *given, "--top-n", "1")
    layout = out.splitlines()[4].split()[1]
    _, out, _ = run_cli(capsys, "suggest", *given, "--why-not", layout)
    assert "it ranks 1 of" in out


def test_explain_shows_the_share_of_a_sequence_that_a_rank_attends_to(capsys):
    context = ["--strategy", "megatron", "--grid", "context=8,data=8", "--seq-len", "8192"]
    _, out, _ = run_cli(capsys, "explain", "--gpus", "64", "--model", "llama3-8b", *context)
    assert "6 times 1 x 32 heads x 1024 x 128" in out


@pytest.mark.parametrize(
    "option", [["--why-not", "8x1x8x1"], ["--top-n", 3], ["--verbose"], ["--plot", "a.png"]]
)
def test_options_of_one_strategy_do_not_go_with_all(capsys, option):
    command = ["suggest", "--gpus", 64, "--model", "5b", "--strategy", "all", *option]
    assert_refused(capsys, *command, culprit=f"{option[0]} is of one strategy; allowed")


def test_a_reason_and_a_page_can_be_asked_for_together(capsys, tmp_path):
    page = tmp_path / "page.html"
    command = ["suggest", "--gpus", 8, "--model", "tiny", "--why-not", "1x1x4x2", "--html", page]
    code, out, _ = run_cli(capsys, *command)
    assert code == 0 and "1x1x4x2" in out and page.exists()


@pytest.mark.parametrize("command", ["suggest", "compare", "scale", "report", "explain"])
@pytest.mark.parametrize("strategy", ["megatron", "zero3"])
def test_low_weights_without_low_products_are_refused_by_every_command(capsys, command, strategy):
    gpus = ["--gpus", "8,16" if command == "scale" else "8"]
    named = ["--strategies" if command == "compare" else "--strategy", strategy]
    engine = [] if strategy == "megatron" else ["--engine", "torchtitan-2025"]
    grid = ["--grid", "tensor=1,shard=8,replica=1"] if command == "explain" else []
    words = [command, *gpus, "--model", "llama3-8b", *named, *engine, *grid, "--low-weights"]
    assert_refused(capsys, *words, culprit="--low-weights: precision is bf16")
