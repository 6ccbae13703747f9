"""Strategies side by side: `compare`, and `suggest`, `explain` of one of them."""

import csv
import io
import json

import pytest
from command_line import assert_refused, run_cli

import axonn_tune
from axonn_tune.strategies.named import STRATEGIES

CAVEATS = {"zeropp", "zero-topo"}
JOB = ["--gpus", "64", "--model", "5b", "--global-batch", "64", "--recompute", "full"]


@pytest.mark.slow
def test_the_best_of_every_strategy_is_a_row_the_fastest_first(capsys):
    _, text, _ = run_cli(capsys, "compare", *JOB, "--every-strategy", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["strategy"] for row in rows} == set(STRATEGIES)
    seconds = [float(row["step_seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    for row in rows:
        _, own, _ = run_cli(
            capsys, "suggest", *JOB, "--strategy", row["strategy"], "--format", "json"
        )
        best = json.loads(own)["results"][0]
        assert best["step_seconds"] == pytest.approx(float(row["step_seconds"]))


def test_a_limit_of_tensor_parallelism_is_for_those_that_have_it(capsys):
    limited = ["--max-tp", "2", "--strategies", "megatron,zero3", "--format", "json"]
    _, text, _ = run_cli(capsys, "compare", *JOB, *limited)
    best = {each["strategy"]: each["best"]["grid"] for each in json.loads(text)["strategies"]}
    assert best["megatron"]["tensor"] <= 2 and best["zero3"]["shard"] >= 1


@pytest.mark.slow
def test_python_has_the_same_comparison(capsys):
    _, text, _ = run_cli(
        capsys, "compare", *JOB, "--strategies", "zero3,megatron", "--format", "csv"
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    frame = axonn_tune.compare(
        "5b", 64, strategies=["zero3", "megatron"], global_batch=64, recompute="full"
    )
    assert list(frame["strategy"]) == [row["strategy"] for row in rows]
    assert list(frame["step_seconds"]) == pytest.approx([float(r["step_seconds"]) for r in rows])


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "left_out"), [([], CAVEATS), (["--every-strategy"], set())])
def test_suggest_all_is_compare(capsys, flags, left_out):
    _, compared, _ = run_cli(capsys, "compare", *JOB, *flags)
    _, suggested, _ = run_cli(capsys, "suggest", *JOB, "--strategy", "all", *flags)
    assert compared == suggested
    for name in STRATEGIES:
        assert (f"\n{name} " in compared) == (name not in left_out)


@pytest.mark.slow
def test_what_changes_the_numerics_is_left_out_unless_asked_for(capsys):
    tiny = ["compare", "--gpus", "4", "--model", "tiny", "--global-batch", "8"]
    tiny += ["--micro-batch", "1", "--recompute", "none"]
    _, text, _ = run_cli(capsys, *tiny)
    assert "Left out: zeropp, zero-topo," in text and "\nzeropp" not in text
    _, text, _ = run_cli(capsys, *tiny, "--every-strategy")
    assert "Left out" not in text
    assert "\nzeropp * " in text and "\nzero-topo * " in text and "\nzero3  " in text
    assert "* zeropp quantises messages (INT8 weights, INT4 gradients): the loss may" in text
    assert "it has no released implementation" in text
    _, text, _ = run_cli(capsys, *tiny, "--no-qwz", "--no-qgz")
    assert "Left out: zero-topo," in text and "\nzeropp  " in text


def test_what_has_a_caveat_is_no_yardstick(capsys):
    """Where a marked strategy is the fastest, the others still compare with each other."""
    job = ["--gpus", "8", "--model", "llama3-8b", "--machine", "dgx-h100", "--global-batch", "128"]
    names = ["--strategies", "zero-topo,zero3,zeropp"]
    _, text, _ = run_cli(capsys, "compare", *job, *names)
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith("zero")}
    assert " 1.000 " in rows["zero3"]
    assert next(iter(rows)) == "zero-topo" and " 0.9" in rows["zero-topo"]


def test_strategies_without_a_layout_say_why(capsys):
    _, text, _ = run_cli(capsys, "compare", "--gpus", "8", "--model", "80b", "--every-strategy")
    assert text.count("fits on no grid of 8") == len(STRATEGIES)
    _, text, _ = run_cli(capsys, "compare", "--gpus", "8", "--model", "80b", "--format", "json")
    document = json.loads(text)
    assert all(each["best"] is None and each["reason"] for each in document["strategies"])


@pytest.mark.parametrize("command", [["compare"], ["suggest", "--strategy", "all"]])
def test_a_comparison_in_which_nothing_has_a_layout_ends_as_a_search_does(capsys, command):
    job = ["--gpus", "8", "--model", "80b", "--format", "csv"]
    code, out, err = run_cli(capsys, *command, *job)
    assert (code, out.strip()) == (2, "")
    assert "nothing to compare has a layout" in err


def test_some_strategies_are_compared_when_named(capsys):
    _, text, _ = run_cli(
        capsys, "compare", *JOB, "--strategies", "zero3, megatron", "--format", "json"
    )
    names = [each["strategy"] for each in json.loads(text)["strategies"]]
    assert sorted(names) == ["megatron", "zero3"]


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("megatron", "tensor=2,pipeline=4,data=8"),
        ("zero3", "shard=8,replica=8"),
        ("zeropp", "secondary=4,across=16"),
        ("zero-topo", "weights=2,gradients=2,states=16"),
        ("axonn-pipeline", "1x1x4x8x2"),
    ],
)
def test_explain_takes_a_layout_of_any_strategy_apart(capsys, strategy, layout):
    arguments = ["explain", *JOB, "--strategy", strategy, "--grid", layout]
    code, text, _ = run_cli(capsys, *arguments)
    assert code == 0 and "exposed communication" in text
    assert ("pipeline bubble" in text) == ("pipeline" in strategy + layout)
    _, text, _ = run_cli(capsys, *arguments, "--format", "json")
    document = json.loads(text)
    assert document["assumptions"]["strategy"] == strategy
    groups = document["exposed_seconds_by_axis"]
    used = {op["axis"] for op in document["operations"] if op["axis"]}
    assert used <= set(groups)


def test_an_axis_of_any_strategy_is_fixed(capsys):
    fixed = ["--strategy", "megatron", "--fix", "tensor=2", "--fix", "pp=4"]
    _, text, _ = run_cli(capsys, "suggest", *JOB, *fixed, "--format", "json")
    grids = [result["grid"] for result in json.loads(text)["results"]]
    assert grids and all((g["tensor"], g["pipeline"]) == (2, 4) for g in grids)


def test_why_not_knows_layouts_of_other_strategies(capsys):
    base = ["suggest", *JOB, "--strategy", "megatron", "--why-not"]
    _, text, _ = run_cli(capsys, *base, "tp=8,dp=8")
    assert "it ranks" in text
    _, text, _ = run_cli(capsys, *base, "tensor=64")
    assert "attention heads not divisible by tensor" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "zero4"], "strategy is 'zero4'; allowed: axonn, axonn-pipeline, megatron"),
        (["--strategy", "megatron", "--fix", "shard=4"], "axis is 'shard'; allowed: tensor"),
        (["--fix", "tensor"], "'tensor' is not AXIS=SIZE"),
        (
            ["--strategy", "megatron", "--virtual-stages", "7"],
            "the stages cannot be cut into that number of virtual stages",
        ),
        (["--fix", "x=0"], "'x=0' is not AXIS=SIZE"),
        (["--fix", "x=2", "--fix", "x=4"], "give one size"),
        (["--fix", "x=2", "--gx", "4"], "axis x is fixed to 4 and to 2"),
        (
            ["--strategy", "megatron", "--fix", "tp=2", "--fix", "tensor=4"],
            "axis tensor is fixed to 2 and to 4",
        ),
        (["--strategy", "megatron", "--why-not", "tp=2,tensor=4"], "tensor has two sizes"),
        (
            ["--strategy", "zero3", "--order", "zxyd"],
            "--order zxyd: strategy zero3 has one rank order",
        ),
        (["--strategy", "zero3", "--cost-model", "paper"], "has one cost model"),
        (["--strategy", "megatron", "--why-not", "8x8"], "'8x8' is not the size of an axis"),
        (["--why-not", "2x2x2x2x4"], "the stages of axonn-pipeline"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert_refused(capsys, "suggest", *JOB, *arguments, culprit=message)


def test_the_next_command_explains_the_best_layout(capsys):
    _, text, _ = run_cli(capsys, "suggest", *JOB, "--strategy", "megatron", "--fix", "tensor=2")
    command = text.rstrip().splitlines()[-1].removeprefix("Next: axonn-tune ").split()
    code, explained, _ = run_cli(capsys, *command)
    assert code == 0 and "tensor=2" in explained


def rows_of(capsys, *arguments):
    _, text, _ = run_cli(capsys, "compare", *JOB, *arguments, "--format", "csv")
    return list(csv.DictReader(io.StringIO(text)))


def test_layouts_are_compared_side_by_side(capsys):
    grids = [
        "--grid",
        "1x1x64x1",
        "--grid",
        "megatron:tensor=2,data=32",
        "--grid",
        "axonn:x=2,z=32",
    ]
    rows = rows_of(capsys, *grids)
    assert sorted(row["strategy"] for row in rows) == ["axonn", "axonn", "megatron"]
    seconds = [float(row["step_seconds"]) for row in rows]
    assert seconds == sorted(seconds) and all(row["step_seconds_low"] for row in rows)
    (megatron,) = [row for row in rows if row["strategy"] == "megatron"]
    _, own, _ = run_cli(
        capsys,
        *("explain", *JOB, "--strategy", "megatron", "--grid", "tensor=2,data=32"),
        *("--format", "json"),
    )
    predicted = json.loads(own)["prediction"]["step_seconds"]
    assert float(megatron["step_seconds"]) == pytest.approx(predicted)


def test_what_does_not_fit_is_compared_last(capsys):
    grids = ["--grid", "1x1x1x64", "--grid", "1x1x64x1", "--micro-batch", "1"]
    rows = rows_of(capsys, *grids)
    assert [row["fits"] for row in rows] == ["True", "False"]


@pytest.mark.slow
def test_a_sweep_has_the_rows_of_each_value(capsys):
    vary = ["--vary", "batch=64,128", "--vary", "seq_len=1024,2048"]
    rows = rows_of(capsys, "--strategies", "axonn,zero3", *vary)
    assert [row["global_batch"] for row in rows] == ["64"] * 4 + ["128"] * 4
    for batch, seq_len in (("64", "1024"), ("128", "2048")):
        _, own, _ = run_cli(
            capsys,
            *("compare", *JOB, "--strategies", "axonn,zero3", "--format", "json"),
            *("--global-batch", batch, "--seq-len", seq_len),
        )
        wanted = {each["best"]["step_seconds"] for each in json.loads(own)["strategies"]}
        assert wanted <= {float(row["step_seconds"]) for row in rows}
    _, text, _ = run_cli(capsys, "compare", *JOB, "--strategies", "axonn,zero3", *vary)
    assert "strategy  batch  sequence  layout" in text and "sequence lengths 1024, 2048," in text


def test_a_pipeline_of_one_stage_is_no_row_of_its_own(capsys):
    both = ["compare", *JOB, "--strategies", "axonn,axonn-pipeline", "--micro-batch", "1"]
    _, text, _ = run_cli(capsys, *both)
    assert "\naxonn  " in text and "\naxonn-pipeline  " not in text
    assert "axonn-pipeline has no row: its best layout is one of those above." in text


@pytest.mark.slow
def test_engines_are_side_by_side_each_with_a_strategy_that_it_carries_out(capsys):
    engines = ["--engine", "fsdp2, fsdp2-eager,megatron-core", "--micro-batch", "1"]
    _, text, _ = run_cli(capsys, "compare", *JOB, *engines, "--format", "json")
    rows = {row["engine"]: row for row in json.loads(text)["strategies"]}
    assert list(rows)[-1] == "fsdp2-eager" and rows["megatron-core"]["strategy"] == "megatron"
    for name in ("fsdp2", "fsdp2-eager"):
        _, own, _ = run_cli(
            *(capsys, "suggest", *JOB, "--strategy", "zero3", "--engine", name),
            *("--micro-batch", "1", "--format", "json"),
        )
        best = json.loads(own)["results"][0]["step_seconds"]
        assert rows[name]["best"]["step_seconds"] == pytest.approx(best)
    _, table, _ = run_cli(capsys, "compare", *JOB, *engines)
    assert "zero3     fsdp2-eager" in table and "not compared" not in table


def test_a_layout_may_name_its_engine(capsys):
    layout = "tensor=4,data=16"
    grids = ["--grid", f"megatron-core:{layout}", "--grid", f"nanotron:{layout}"]
    _, text, _ = run_cli(capsys, "compare", *JOB, *grids, "--format", "json")
    rows = json.loads(text)["strategies"]
    assert [row["engine"] for row in rows] == ["megatron-core", "nanotron"]
    assert rows[0]["best"]["grid"] == rows[1]["best"]["grid"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "batch=many"], "--vary batch=many: allowed: counts with commas"),
        (["--vary", f"batch={5000 * chr(57)}"], "allowed: counts with commas"),
        (["--vary", "gpus=8"], "name is 'gpus'; allowed: batch, seq_len, micro_batch"),
        (["--grid", "1x1x8x1"], "it has 8 ranks, not 64"),
        (["--grid", "gpipe:1x1x8x1"], "strategy is 'gpipe'; allowed: axonn"),
        (["--engine", "fsdp2,warp"], "unknown engine 'warp'"),
        (
            ["--engine", "fsdp2", "--strategies", "megatron,axonn"],
            "engine fsdp2 carries out zero3, not megatron or axonn",
        ),
        (["--grid", "1x1x64x1", "--strategies", "zero3"], "not both"),
        (["--recompute", "full:0"], "recompute is 'full:0'; allowed: auto, none, selective, full"),
        (["--memory-margin", "5"], "--memory-margin: '5'"),
        (["--memory-margin", "80GiB"], "--memory-margin 80GiB: allowed: less than the GPU's 40"),
    ],
)
def test_bad_comparisons_are_one_line(capsys, arguments, message):
    job = [word for word in JOB if word not in ("--recompute", "full")]
    assert_refused(capsys, "compare", *job, *arguments, culprit=message)


H100 = ["--gpus", "8", "--model", "llama3-8b", "--machine", "dgx-h100", "--global-batch", "64"]


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (
            ["--engine", "nanotron,megatron-core", "--precision", "fp8"],
            "Left out: nanotron, since precision is 'fp8'; allowed with engine nanotron: bf16.",
        ),
        (
            ["--engine", "fsdp2,megatron-core", "--strategies", "megatron"],
            "Left out: fsdp2, which carries out zero3, not megatron.",
        ),
    ],
)
def test_an_engine_that_cannot_do_the_job_is_left_out(capsys, words, left_out):
    """It ended the whole comparison, where a strategy that cannot only has its line."""
    code, out, err = run_cli(capsys, "compare", *H100, *words, "--recompute", "none")
    assert code == 0, err
    assert left_out in out.splitlines() and "\nmegatron  " in out
    _, text, _ = run_cli(
        capsys, "compare", *H100, *words, "--recompute", "none", "--format", "json"
    )
    document = json.loads(text)
    assert document["left_out"] == [words[1].partition(",")[0]]
    assert [each["engine"] for each in document["strategies"]] == ["megatron-core"]


def test_engines_of_which_none_can_do_the_job_are_refused(capsys):
    words = ["--engine", "nanotron,nanogpt", "--precision", "fp8"]
    assert_refused(capsys, "compare", *H100, *words, culprit="allowed with engine nanotron: bf16")


def test_engines_are_left_out_by_their_own_names(capsys):
    """Two engines of a strategy were said to be one strategy, twice."""
    job = ["--gpus", "16", "--model", "mixtral-8x7b", "--machine", "dgx-h100"]
    words = ["--engine", "axonn,nanogpt,megatron-core", "--recompute", "none", "--max-tp", "2"]
    _, out, _ = run_cli(capsys, "compare", *job, *words)
    assert "Left out: axonn, nanogpt, since models with experts are predicted for" in out
