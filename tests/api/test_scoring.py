"""A table of a user's own runs is predicted row by row."""

import json

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.api.answers import predict
from axonn_tune.api.scoring import score
from axonn_tune.errors import AxonnTuneError
from axonn_tune.report.score import score_document, score_records, score_text
from axonn_tune.reproduce.steps import group_errors
from axonn_tune.spec.model import Model

COLUMNS = "model gpus layout global_batch micro_batch engine recompute step_seconds status"
HEADER = ",".join([*COLUMNS.split(), "memory_gib"])
# Layouts of one job, and an engine for each of two strategies.
LAYOUTS = ("tensor=2,data=4", "tensor=4,data=2", "tensor=8")


def step(layout, engine="megatron-core", strategy="megatron"):
    return predict(
        "llama3-8b",
        8,
        layout,
        "dgx-h100",
        strategy=strategy,
        engine=engine,
        global_batch=64,
        micro_batch=1,
        recompute="full",
    )


def written(path, *rows):
    table = path / "runs.csv"
    table.write_text("\n".join(["# mine", HEADER, *rows, ""]))
    return table


def row(layout, seconds, engine="megatron-core", status="", memory=""):
    return f'llama3-8b,8,"{layout}",64,1,{engine},full,{seconds!r},{status},{memory}'


def test_runs_that_took_as_long_as_predicted_have_no_error(tmp_path):
    table = written(tmp_path, *(row(layout, step(layout).step_seconds) for layout in LAYOUTS))
    scored = score(table, "dgx-h100")
    assert [timed.error for timed in scored.timed] == pytest.approx([0.0] * 3, abs=1e-12)


def test_each_row_has_its_own_engine_and_factor(tmp_path):
    sharded = step("shard=8", "fsdp2-eager", "zero3").step_seconds
    tensor = step("tensor=8").step_seconds
    table = written(
        tmp_path, row("shard=8", 2.0 * sharded, "fsdp2-eager"), row("tensor=8", tensor / 4.0)
    )
    timed = score(table, "dgx-h100").timed
    assert [t.error for t in timed] == pytest.approx([-0.5, 3.0])
    assert [t.run.group for t in timed] == ["fsdp2-eager on dgx-h100", "megatron-core on dgx-h100"]


TINY = (
    "n_layers,hidden_size,n_heads,vocab_size,norm,gated_mlp,tied_embeddings,seq_len,"
    "gpus,tp,data,shard,pp,global_batch,micro_batch,engine,recompute,distributed_optimizer,"
    "step_seconds"
)
TINY_ROW = "4,1024,8,32000,rms,yes,no,2048,8,4,2,,1,32,2,megatron-core,full,no,1.0"


def test_sizes_axes_and_options_have_columns_of_their_own(tmp_path):
    model = Model(
        "tiny",
        n_layers=4,
        hidden_size=1024,
        n_heads=8,
        vocab_size=32000,
        seq_len=2048,
        norm="rms",
        gated_mlp=True,
        tied_embeddings=False,
    )
    table = tmp_path / "runs.csv"
    sharded = TINY_ROW.replace(",4,2,,1,", ",1,,8,1,").replace("core,full,no", "fsdp,none,")
    table.write_text("\n".join([TINY, TINY_ROW, TINY_ROW.replace("full,no", "full,yes"), sharded]))
    timed = score(table, "dgx-h100").timed
    options = {"global_batch": 32, "micro_batch": 2, "machine": "dgx-h100"}
    of_megatron = {"strategy": "megatron", "recompute": "full", **options}
    expected = [
        predict(model, 8, "tensor=4,data=2", distributed_optimizer=False, **of_megatron),
        predict(model, 8, "tensor=4,data=2", distributed_optimizer=True, **of_megatron),
        predict(model, 8, "shard=8", engine="megatron-fsdp", recompute="none", **options),
    ]
    assert [t.error for t in timed] == pytest.approx([p.step_seconds - 1.0 for p in expected])
    assert expected[0].step_seconds != expected[1].step_seconds


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rms,yes", "rms,maybe", "row 1: gated_mlp is 'maybe'; allowed: true, yes, false, no"),
        ("4,1024", "4,", "row 1: the model's sizes: .*hidden_size"),
        ("4,1024,8,32000,rms,yes,no", ",,,,,,", "row 1: there is no model; allowed: a model, or"),
        (",4,2,,1,", ",,,,,", "row 1: there is no layout; allowed: either a layout, or sizes"),
        (",4,2,,1,", ",4,2,8,1,", "row 1: .*shard"),
        (",4,2,,1,", ",4,-2,,1,", "row 1: data is '-2'; allowed: a whole number"),
        ("full,no", "full,2", "row 1: distributed_optimizer is '2'; allowed: true"),
        ("4,1024,8,", "4,1024,7,", "row 1: the model's sizes: .*n_heads"),
    ],
)
def test_what_is_wrong_with_sizes_axes_and_options_is_said(tmp_path, old, new, message):
    table = tmp_path / "runs.csv"
    assert old in TINY_ROW
    table.write_text("\n".join([TINY, TINY_ROW.replace(old, new, 1)]))
    with pytest.raises(AxonnTuneError, match=message) as refusal:
        score(table, "dgx-h100")
    assert "\n" not in str(refusal.value)


def test_a_layout_that_is_given_twice_is_refused_with_both(tmp_path):
    table = tmp_path / "runs.csv"
    table.write_text(f"layout,{TINY}\ntp=8,{TINY_ROW}")
    message = "row 1: the layout is given twice, as 'tp=8' and by the size of data, tp, pp; allowed"
    with pytest.raises(AxonnTuneError, match=message):
        score(table, "dgx-h100")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("8,", "8.0,"),
        (",", ";"),
        ("3.5\n", "3.5\n,,,,,,\n"),
        ("\n", "\r\n"),
        ("model", "\ufeffmodel"),
    ],
    ids=["whole numbers of pandas", "semicolons", "empty rows", "Windows", "byte order mark"],
)
def test_a_table_is_read_as_spreadsheets_and_pandas_write_it(tmp_path, old, new):
    text = (
        "model,engine,gpus,tp,dp,global_batch,step_seconds\nllama3-8b,megatron-core,8,8,1,64,3.5\n"
    )
    plain, written_otherwise = tmp_path / "plain.csv", tmp_path / "other.csv"
    plain.write_text(text)
    written_otherwise.write_text(text.replace(old, new), newline="")
    expected, found = (score(table, "dgx-h100") for table in (plain, written_otherwise))
    assert found.timed[0].run.subject == expected.timed[0].run.subject
    assert found.mean_error == expected.mean_error


def test_a_column_without_a_name_is_refused_with_its_cause(tmp_path):
    table = tmp_path / "runs.csv"
    table.write_text(",model,gpus,layout,global_batch,step_seconds\n0,llama3-8b,8,8,64,3.5\n")
    with pytest.raises(AxonnTuneError, match=r"column 1 has no name; .* index=False"):
        score(table, "dgx-h100")


def test_memory_is_judged_by_what_ran_and_what_ran_out(tmp_path):
    fits = step("tensor=8")
    alone = predict(
        "llama3-70b",
        8,
        "tensor=8",
        "dgx-h100",
        strategy="megatron",
        global_batch=64,
        micro_batch=1,
        recompute="none",
    )
    assert fits.fits and not alone.fits
    gib = fits.allocator_bytes / 2**30
    large = 'llama3-70b,8,"tensor=8",64,1,megatron-core,none,1.0'
    table = written(
        tmp_path,
        row("tensor=8", 1.0, memory=f"{gib / 2}"),
        row("tensor=8", 1.0, status="oom"),
        f"{large},ok,",
        f"{large},oom,",
    )
    scored = score(table, "dgx-h100")
    memory = scored.memory
    counts = (memory.n_right_ok, memory.n_wrong_oom, memory.n_right_oom, memory.n_wrong_ok)
    assert counts == (1, 1, 1, 1)
    assert memory.errors == pytest.approx((1.0,))
    text = " ".join(score_text(scored, ()).split())
    assert "of 2 runs that ran, 1 was predicted not to fit;" in text
    assert "of 2 that ran out of memory, 1 was predicted to fit." in text


def test_the_command_prints_groups_memory_and_every_run(tmp_path, capsys):
    table = written(
        tmp_path,
        *(row(layout, 1.1 * step(layout).step_seconds) for layout in LAYOUTS),
        row("shard=8", 9.0, "fsdp2"),
    )
    _, text, _ = run_cli(capsys, "score", table, "--machine", "dgx-h100", "--quiet")
    for words in ("megatron-core on dgx-h100", "fsdp2 on dgx-h100", "Memory: of 4 runs that ran"):
        assert words in text
    _, text, _ = run_cli(capsys, "score", table, "--machine", "dgx-h100", "--format", "json")
    document = json.loads(text)
    assert document["schema_version"] == 1
    groups = {group["group"]: group for group in document["groups"]}
    of_megatron = groups["megatron-core on dgx-h100"]
    assert of_megatron["errors"]["mape"] == pytest.approx(1 - 1 / 1.1)
    assert of_megatron["spearman"] == 1.0 and of_megatron["median_regret"] == 0.0
    assert len(document["runs"]) == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "micro_batch,",
            "micro-batch,",
            "column 'micro-batch'; did you mean 'micro_batch'",
        ),
        ("step_seconds,", "memory_gib,", "column step_seconds is missing"),
        ("1.5", "", "row 1 has no step_seconds"),
        ("1.5", "-2", "row 1: step_seconds is '-2'; allowed: a number above 0"),
        ("1.5", "nan", "row 1: step_seconds is 'nan'"),
        (",64,1,", ",six,1,", "row 1: global_batch is 'six'; allowed: a whole number"),
        (",64,1,", ",\u00b2,1,", "row 1: global_batch is '\u00b2'"),
        ("tensor=8", "tensor=4", "row 1: layout .* has 4 ranks, not 8"),
        ("ok", "fine", "row 1: run: status is 'fine'; allowed: ok, oom"),
        ("llama3-8b", "llama9", "row 1: unknown model 'llama9'"),
        ("megatron-core", "megatron9", "row 1: unknown engine 'megatron9'"),
        ("ok,", "ok,1,2,3", "row 1 has more cells than the header"),
        (",64,1,", ",63,2,", "row 1: grid tensor=8.* is not allowed: micro-batch"),
        ('8,"tensor=8"', '16,"tensor=16"', "row 1: grid tensor=16.*: KV heads not divisible by"),
        (",64,1,", f",{5000 * '9'},1,", "row 1: global_batch is '9{40}'; allowed: a whole number"),
        ("megatron-core", 200_000 * "x", "malformed CSV: field larger than field limit"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_in_one_line(tmp_path, old, new, message):
    table = written(tmp_path, row("tensor=8", 1.5, status="ok"))
    table.write_text(table.read_text().replace(old, new, 1))
    with pytest.raises(AxonnTuneError, match=message) as refusal:
        score(table, "dgx-h100")
    assert "\n" not in str(refusal.value)


def test_a_mean_error_above_the_limit_ends_with_1(tmp_path, capsys):
    seconds = 1.1 * step("tensor=8").step_seconds
    table = written(tmp_path, row("tensor=8", seconds), row("tensor=8", 1.0, status="oom"))
    words = ("score", table, "--machine", "dgx-h100", "--quiet", "--format", "json", "--max-error")
    for limit, code, verdict in ((0.05, 1, "FAILED"), (0.10, 0, "passed")):
        found, out, err = run_cli(capsys, *words, limit)
        assert (found, len(json.loads(out)["runs"])) == (code, 2)
        assert err.startswith(f"{verdict}  mean error 9.1 % ")
    assert_refused(capsys, *words, 15, culprit="15.0 is not in the range 0<=x<=1")
    only_oom = written(tmp_path, row("tensor=8", 1.0, status="oom"))
    found, _, err = run_cli(capsys, *words, 0.5)
    assert found == 1 and "unknown" in err
    assert_refused(
        capsys, "score", only_oom, "--baseline", only_oom, "--max-error", 1, culprit="--max-error"
    )


def test_runs_that_are_alike_have_no_rank_correlation(tmp_path, capsys):
    table = written(tmp_path, row("tensor=8", 1.5), row("tensor=8", 1.5))
    code, text, errors = run_cli(
        capsys, "score", table, "--machine", "dgx-h100", "--quiet", "--format", "json"
    )
    assert code == 0 and not errors
    assert [group["spearman"] for group in json.loads(text)["groups"]] == [None]


def test_a_table_without_runs_is_refused(tmp_path):
    with pytest.raises(AxonnTuneError, match="there are no runs below the header"):
        score(written(tmp_path), "dgx-h100")


@pytest.mark.slow
def test_errors_are_shown_by_a_fact_and_by_the_size_of_an_axis(tmp_path, capsys):
    factors = dict(zip(LAYOUTS, (2.0, 1.0, 0.5), strict=True))
    rows = [row(name, step(name).step_seconds * factor) for name, factor in factors.items()]
    table = written(tmp_path, *rows)
    plot = tmp_path / "score.png"
    given = ["--machine", "dgx-h100", "--by", "tensor", "--by", "engine", "--plot", plot]
    code, text, errors = run_cli(capsys, "score", table, *given, "--quiet", "--format", "json")
    assert code == 0 and not errors and plot.stat().st_size > 1000
    by = json.loads(text)["by"]
    biases = {group["group"]: group["errors"]["bias"] for group in by["tensor"]}
    assert biases == pytest.approx({"2": -0.5, "4": 0.0, "8": 1.0})
    assert [group["group"] for group in by["engine"]] == ["Megatron-Core"]
    code, text, _ = run_cli(capsys, "score", table, *given[:4], "--quiet")
    assert code == 0 and "\ntensor  number" in text


def test_a_table_is_grouped_by_what_its_runs_have(tmp_path, capsys):
    table = written(tmp_path, row("tensor=8", 1.0))
    given = ["--machine", "dgx-h100", "--by", "shard", "--quiet"]
    assert_refused(capsys, "score", table, *given, culprit="--by is 'shard'; allowed: engine")


@pytest.mark.parametrize("output_format", ["table", "csv"])
def test_a_grouping_that_does_not_exist_is_refused_before_anything_is_written(
    tmp_path, capsys, output_format
):
    table, page = written(tmp_path, row("tensor=8", 1.0)), tmp_path / "score.html"
    plot = tmp_path / "score.svg"
    given = ["--machine", "dgx-h100", "--by", "step_seconds", "--quiet", "--html", page]
    given += ["--plot", plot, "--format", output_format]
    assert_refused(capsys, "score", table, *given, culprit="--by is 'step_seconds'; allowed")
    assert not page.exists() and not plot.exists()


def test_runs_that_are_all_out_of_memory_have_axes(tmp_path, capsys):
    table = written(tmp_path, row("tensor=8", 1.0, status="oom"))
    given = ["--machine", "dgx-h100", "--by", "tensor", "--quiet"]
    code, text, errors = run_cli(capsys, "score", table, *given)
    assert code == 0 and not errors and "1 that ran out of memory" in text


@pytest.mark.parametrize("option", ["--html", "--plot", "--output"])
def test_a_folder_that_does_not_exist_is_named_before_runs_are_predicted(tmp_path, capsys, option):
    table = tmp_path / "runs.csv"  # which does not exist, either
    path = tmp_path / "missing" / "score.svg"
    assert_refused(capsys, "score", table, option, path, culprit=f"{path} cannot be written")


def test_runs_out_of_memory_are_among_the_records(tmp_path):
    table = written(tmp_path, row("tensor=8", 1.0, status="oom"), row("tensor=4,data=2", 5.0))
    first, second = score_records(score(table, "dgx-h100"))
    assert (first["status"], first["measured_seconds"], first["error_fraction"]) == (
        "oom",
        None,
        None,
    )
    assert first["predicted_seconds"] == pytest.approx(step("tensor=8").step_seconds)
    assert first["predicted_to_fit"] and second["predicted_to_fit"]
    assert (second["status"], second["measured_seconds"]) == ("ok", 5.0)


def test_records_have_the_memory_that_the_errors_compare(tmp_path):
    table = written(tmp_path, row("tensor=8", 5.0, memory="40"), row("tensor=4,data=2", 5.0))
    scored = score(table, "dgx-h100")
    first, second = score_records(scored)
    assert first["measured_memory_gib"] == 40.0 and second["measured_memory_gib"] is None
    error = first["predicted_memory_gib"] / first["measured_memory_gib"] - 1.0
    assert scored.memory.errors == pytest.approx((error,))


def test_the_machine_of_runs_that_name_none_is_said_in_one_line(tmp_path, capsys):
    table = tmp_path / "runs.csv"
    header = "model,gpus,layout,global_batch,step_seconds,machine\n"
    table.write_text(header + "tiny,4,1x1x1x4,8,0.1,\ntiny,4,1x1x1x4,8,0.1,frontier\n")
    said = (
        f"axonn-tune: {table}: 1 of 2 runs without a machine: predicted on perlmutter "
        "(the default; choose with --machine)\n"
    )
    code, out, err = run_cli(capsys, "score", table, "--quiet", "--format", "csv")
    assert (code, err) == (0, said) and "on perlmutter" in out
    code, out, err = run_cli(capsys, "score", table, "--quiet", "--baseline", table)
    assert (code, err, out.count("\n")) == (0, 2 * said, 1)
    _, _, err = run_cli(capsys, "score", table, "--quiet", "--machine", "frontier")
    assert err == ""
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(header + "tiny,4,1x1x1x4,8,-1,\n")
    assert_refused(capsys, "score", wrong, "--quiet", culprit="row 1: step_seconds is '-1'")
    table.write_text(header + "tiny,4,1x1x1x4,8,0.1,frontier\n")
    _, _, err = run_cli(capsys, "score", table, "--quiet")
    assert err == ""


@pytest.mark.parametrize(
    ("memory", "machine", "allowed"),
    [
        ("7000000", "", "159.3 GiB, twice the memory of a GPU of dgx-h100"),
        ("159.4", "", "159.3 GiB"),
        ("82.4", "", None),
        ("159.4", "dgx-h200", None),
        ("82.4", "perlmutter", "80 GiB, twice the memory of a GPU of perlmutter"),
    ],
)
def test_no_run_held_more_than_twice_the_memory_of_a_gpu_of_its_machine(
    tmp_path, memory, machine, allowed
):
    """The host's memory, 2 TB in a DGX H100, holds nothing of what the column counts."""
    table = tmp_path / "runs.csv"
    first = row("tensor=8", 1.5, memory="40")
    second = row("tensor=8", 1.5, status="oom", memory=memory)
    table.write_text(f"{HEADER},machine\n{first},\n{second},{machine}\n")
    if allowed is None:
        assert len(score(table, "dgx-h100").memory.errors) == 2
        return
    with pytest.raises(AxonnTuneError) as refusal:
        score(table, "dgx-h100")
    message = f"{table}: row 2: memory_gib is '{memory}'; allowed: up to {allowed}"
    assert str(refusal.value).startswith(message) and "\n" not in str(refusal.value)


def test_labels_tell_runs_apart_by_the_fewest_facts(tmp_path):
    base = step("tensor=8").step_seconds
    rows = [
        row("tensor=8", base),
        row("tensor=8", base).replace(",64,1,", ",64,2,"),
        row("tensor=8", base).replace(",64,1,", ",128,1,"),
        row("tensor=8", base).replace(",64,1,", ",128,1,").replace("full", "none"),
        row("tensor=8", 2 * base).replace(",64,1,", ",128,1,").replace("full", "none"),
        row("tensor=8", base).replace(",64,1,", ",128,,"),
        row("tensor=4,data=2", base),
    ]
    labels = [
        record["run"] for record in score_records(score(written(tmp_path, *rows), "dgx-h100"))
    ]
    alone = "llama3-8b, tensor=8, 8 GPUs"
    assert labels == [
        f"{alone}, micro-batch 1, global batch 64",
        f"{alone}, micro-batch 2",
        f"{alone}, micro-batch 1, global batch 128, recompute full",
        f"{alone}, micro-batch 1, global batch 128, recompute none, run 1 of 2",
        f"{alone}, micro-batch 1, global batch 128, recompute none, run 2 of 2",
        alone,
        "llama3-8b, tensor=4,data=2, 8 GPUs",
    ]


def test_one_layout_has_one_name_however_rows_write_it(tmp_path):
    texts = ("tensor=4,data=2", "dp=2,tp=4", "tp=4 context=1 pp=1 dp=2")
    columns = "model,gpus,tp,pipeline,data,global_batch,micro_batch,engine,recompute,step_seconds"
    by_axis = tmp_path / "by_axis.csv"
    by_axis.write_text(f"{columns}\nllama3-8b,8,4,1,2,64,1,megatron-core,full,9\n")
    whole = score(written(tmp_path, *(row(text, 9.0) for text in texts)), "dgx-h100")
    name = "llama3-8b, tensor=4,data=2, 8 GPUs"
    labels = [record["run"] for record in score_records(whole)]
    assert labels == [f"{name}, run {number} of 3" for number in (1, 2, 3)]
    assert [record["run"] for record in score_records(score(by_axis, "dgx-h100"))] == [name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x=4,data=2", "4x1x1x2"),
        ("4x1x1x2 zyxd", "4x1x1x2 zyxd"),
        ("4x1x1x2 xyzd", "4x1x1x2"),
    ],
)
def test_a_grid_is_called_by_its_short_form_and_its_order(tmp_path, text, name):
    table = written(tmp_path, row(text, 9.0, engine="bundled"))
    (record,) = score_records(score(table, "dgx-h100"))
    assert record["run"] == f"llama3-8b, {name}, 8 GPUs"


def ordered(tmp_path, *rows):
    """Return the errors of all runs of a table of steps of one engine."""
    return group_errors(score(written(tmp_path, *rows), "dgx-h100").timed)[0]


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_layout_that_was_measured_twice_counts_once_where_layouts_are_ordered(
    tmp_path, is_reversed
):
    """The rows of the layout that is predicted to be the fastest took 10 and 14 s."""
    best, middle, last = sorted(LAYOUTS, key=lambda layout: step(layout).step_seconds)
    other_name = best.replace("tensor", "tp").replace("data", "dp")
    rows = [row(best, 10.0), row(other_name, 14.0), row(middle, 11.0), row(last, 13.0)]
    group = ordered(tmp_path, *(reversed(rows) if is_reversed else rows))
    assert group.model.n == 4
    # The means are 12, 11 and 13 s.
    assert (group.n_ordered_pairs, group.n_pairs) == (2, 3)
    assert group.spearman == group.job_spearman == pytest.approx(0.5)
    assert group.regret == group.median_regret == pytest.approx(12.0 / 11.0 - 1.0)


def test_a_layout_alone_has_no_regret_however_often_it_was_measured(tmp_path, capsys):
    rows = [row("tensor=8", 10.0), row("tp=8", 14.0)]
    group = ordered(tmp_path, *rows)
    assert (group.spearman, group.regret, group.median_regret, group.n_pairs) == (None,) * 3 + (0,)
    table = written(tmp_path, *rows)
    _, text, _ = run_cli(capsys, "score", table, "--machine", "dgx-h100", "--quiet")
    cells = next(line for line in text.splitlines() if line.startswith("megatron-core")).split()
    assert cells[-3:-1] == ["-", "-"]
    document = score_document(score(table, "dgx-h100"))
    assert document["groups"][0]["median_regret"] is None


@pytest.mark.parametrize(("second", "regret"), [("8192", 0.25), ("4096", None)])
def test_steps_of_longer_sequences_are_those_of_another_job(tmp_path, second, regret):
    best, other = sorted(LAYOUTS[:2], key=lambda layout: step(layout).step_seconds)
    table = tmp_path / "runs.csv"
    rows = f"{row(best, 10.0)},8192\n{row(other, 8.0)},{second}"
    table.write_text(f"{HEADER},seq_len\n{rows}\n")
    (group,) = score_document(score(table, "dgx-h100"))["groups"]
    assert group["median_regret"] == (regret and pytest.approx(regret))


def test_a_notebook_shows_a_score_in_one_line(tmp_path):
    """The text of all predictions had 634,000 characters."""
    path = tmp_path / "runs.csv"
    path.write_text("model,gpus,layout,global_batch,step_seconds\n" + 2 * "tiny,4,1x1x1x4,8,0.1\n")
    scored = score(path)
    text = f"Score(mean_error={scored.mean_error:.3f}, 2 steps in .timed, 2 runs in .judged)"
    assert repr(scored) == text
