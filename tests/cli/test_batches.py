"""Global batches on the command line: what is taken, what is said about it, what is refused."""

import json

import pytest
from command_line import assert_refused, run_cli


def suggestion(capsys, gpus, model="80b", *options):
    """The JSON of one ranking."""
    job = ["suggest", "--gpus", gpus, "--model", model, *options]
    code, out, _ = run_cli(capsys, *job, "--format", "json", "--top-n", "1")
    assert code == 0
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "batch", "power_of_two"),
    [(96, 8064, 128), (384, 8064, 512), (3072, 9216, 2048), (6144, 9216, 8192)],
)
def test_counts_with_a_factor_of_three_do_as_well_as_their_neighbours(
    capsys, gpus, batch, power_of_two
):
    document = suggestion(capsys, gpus)
    assert document["assumptions"]["global_batch"] == batch
    assert f"{gpus} GPUs take the nearest" in document["assumptions"]["global_batch_remark"]
    (best,) = document["results"]
    assert best["global_batch"] == batch
    neighbour = suggestion(capsys, power_of_two)
    assert neighbour["assumptions"]["global_batch"] == 8192
    assert neighbour["assumptions"]["global_batch_remark"] is None
    assert best["mfu"] == pytest.approx(neighbour["results"][0]["mfu"], rel=0.08)


def test_a_thousand_gpus_have_a_batch_or_hear_which_counts_do(capsys):
    assert suggestion(capsys, 1000, "5b")["assumptions"]["global_batch"] == 8000
    assert_refused(
        capsys, "suggest", "--gpus", "1000", "--model", "80b", culprit="fits on 960 or 1008 GPUs"
    )


def test_the_text_says_which_batch_was_taken_and_why(capsys):
    _, out, _ = run_cli(capsys, "suggest", "--gpus", "384", "--model", "80b")
    assert "global batch 8064 sequences (16.52M tokens)" in out
    assert "Instead of the default batch of 8192 sequences, 384 GPUs take the nearest" in out
    _, out, _ = run_cli(
        capsys, "suggest", "--gpus", "384", "--model", "80b", "--global-batch", 8192
    )
    assert "384 GPUs cannot share this global batch evenly, but they can share 8064" in out


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--global-batch", "8192"], "global batches that do: 8190, 8193 sequences"),
        (["--global-batch-tokens", "16M"], "15998976 or 16001024; --within 5%"),
        (["--global-batch-tokens", "16Q"], "16Q"),
        (["--global-batch-tokens", "0"], "global_batch_tokens is 0"),
        (["--global-batch-tokens", "1e999"], "global_batch_tokens is 1e999"),
        (
            ["--global-batch", "96", "--global-batch-tokens", "1M"],
            "global_batch is 96 and global_batch_tokens 1M; allowed: one of the two",
        ),
        (["--within", "120%"], "within is 120%; allowed: above 0 and below 1"),
        (["--within", "near"], "'near' is not a number"),
    ],
)
def test_bad_batches_are_one_line(capsys, arguments, culprit):
    assert_refused(capsys, "suggest", "--gpus", "96", "--model", "5b", *arguments, culprit=culprit)


WITHIN = ["--gpus", "96", "--model", "5b", "--recompute", "full"]
WITHIN += ["--global-batch-tokens", "16M", "--within", "5%"]


def test_batches_near_a_target_are_searched_and_compared_for_each_token(capsys):
    document = suggestion(capsys, 96, "5b", *WITHIN[4:])
    tried = {int(batch): seconds for batch, seconds in document["batch_seconds"].items()}
    assert len(tried) == 8 and all(0.95 <= batch * 2048 / 16e6 <= 1.05 for batch in tried)
    fastest = min(tried, key=lambda batch: tried[batch] / batch)
    assert document["assumptions"]["global_batch"] == fastest
    assert document["results"][0]["step_seconds"] == tried[fastest]
    _, out, _ = run_cli(capsys, "suggest", *WITHIN)
    assert "within 5 % of 7812 sequences, the fastest for each token is taken" in out
    assert f"{fastest} +0.0 %" in out
    following = out.splitlines()[-1].removeprefix("Next: axonn-tune ").split()
    assert "--within" not in following and str(fastest) in following
    assert f"global batch {fastest} sequences" in run_cli(capsys, *following)[1]


@pytest.mark.parametrize("command", ["explain", "trace", "whatif", "compare", "plan"])
def test_every_command_searches_batches(capsys, tmp_path, command):
    grid = ["--grid", "1x1x16x6"]
    options = {
        "explain": grid,
        "trace": [*grid, "--layers", "1", "--microsteps", "1", "--output", tmp_path / "t.json"],
        "whatif": ["--set", "jitter=2x"],
        "compare": ["--strategies", "axonn,zero3"],
        "plan": ["--tokens", "1T"],
    }
    code, out, _ = run_cli(capsys, command, *WITHIN, *options[command])
    assert code == 0
    assert command == "trace" or "the fastest for each token is taken" in out


def test_strategies_that_need_other_batches_are_compared_for_each_token(capsys):
    """No two GPUs share a sequence under ZeRO-3, and so twice as many need twice the batch."""
    job = ["--gpus", "16384", "--model", "80b", "--strategies", "axonn,zero3"]
    _, out, _ = run_cli(capsys, "compare", *job, "--format", "csv")
    _, text, _ = run_cli(capsys, "compare", *job)
    head, *rows = [line.split(",") for line in out.splitlines()]
    columns = {name: [row[head.index(name)] for row in rows] for name in head}
    assert dict(zip(columns["strategy"], columns["global_batch"], strict=True)) == {
        "axonn": "8192",
        "zero3": "16384",
    }
    rates = [float(rate) for rate in columns["tokens_per_second_per_gpu"]]
    assert rates == sorted(rates, reverse=True)
    assert f"{rates[0] / rates[1]:.3f}" in text and "global batches from 8192 to 16384" in text
