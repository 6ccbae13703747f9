"""``axonn-tune scale``: the best layout for each count of GPUs."""

import csv
import io
import json

import pytest
from command_line import assert_refused, run_cli


@pytest.mark.slow
def test_scaling_in_every_format(capsys):
    arguments = ["--model", "5b", "--gpus", "32..128", "--global-batch", "128"]
    arguments += ["--recompute", "full"]
    _, text, _ = run_cli(capsys, "scale", *arguments)
    _, table, _ = run_cli(capsys, "scale", *arguments, "--format", "csv")
    _, as_json, _ = run_cli(capsys, "scale", *arguments, "--format", "json")
    rows = list(csv.DictReader(io.StringIO(table)))
    document = json.loads(as_json)
    assert [row["gpus"] for row in rows] == ["32", "64", "128"]
    assert [r["efficiency"] for r in document["results"]] == pytest.approx(
        [float(row["efficiency"]) for row in rows]
    )
    assert document["results"][0]["efficiency"] == 1.0
    for row in rows:
        assert f"{float(row['step_seconds']):.3f}" in text


def test_weak_scaling_grows_the_model_or_the_batch(capsys):
    weak = ["scale", "--weak", "5b,10b", "--gpus", "16,32", "--recompute", "full"]
    _, out, _ = run_cli(capsys, *weak, "--format", "json")
    assert [r["model"] for r in json.loads(out)["results"]] == ["gpt-5b", "gpt-10b"]
    batch = ["scale", "--model", "tiny", "--gpus", "2,4", "--batch-per-gpu", "4"]
    _, out, _ = run_cli(capsys, *batch, "--format", "json")
    assert [r["global_batch"] for r in json.loads(out)["results"]] == [8, 16]
    assert "global batches from 8 to 16 sequences" in run_cli(capsys, *batch)[1]


@pytest.mark.slow
def test_a_factor_of_three_leaves_no_dent_in_the_scaling(capsys):
    scaling = ["scale", "--model", "20b", "--gpus", "96,128,192,256", "--recompute", "full"]
    rows = json.loads(run_cli(capsys, *scaling, "--format", "json")[1])["results"]
    assert [row["global_batch"] for row in rows] == [8064, 8192] * 2
    assert all(row["efficiency"] == pytest.approx(1.0, abs=0.1) for row in rows)
    _, text, _ = run_cli(capsys, *scaling)
    assert "default batch of 8192 sequences, 96, 192 GPUs take the nearest" in text


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--gpus", "32..64"], "--weak"),
        (["--gpus", "32..64", "--model", "5b", "--weak", "5b,10b"], "--weak"),
        (["--gpus", "32..64", "--weak", "5b"], "1 models for 2 counts"),
        (["--gpus", "64..32", "--model", "5b"], "--gpus 64..32"),
        (["--gpus", "2,4", "--model", "80b"], "fits on no grid"),
        (
            ["--gpus", "32,64", "--model", "5b", "--batch-per-gpu", "1", "--global-batch", "64"],
            "--batch-per-gpu",
        ),
    ],
)
def test_bad_scalings_are_one_line(capsys, arguments, culprit):
    assert_refused(capsys, "scale", *arguments, culprit=culprit)
