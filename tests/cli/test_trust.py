"""Every answer that ranks says how predictions of its kind have fared."""

import json

import pytest
from command_line import run_cli

from axonn_tune import processes
from axonn_tune.io.package_data import load_track_records
from axonn_tune.search.rank import Ranking

JOB = ["--model", "tiny", "--machine", "perlmutter", "--global-batch", "64"]
COMMANDS = [
    ["suggest", "--gpus", "8"],
    ["compare", "--gpus", "8", "--strategies", "axonn"],
    ["explain", "--gpus", "8", "--grid", "1x1x8x1"],
    ["scale", "--gpus", "8,16"],
    ["plan", "--gpus", "8"],
    ["whatif", "--gpus", "8", "--set", "inter_node.bandwidth=2x"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_every_text_and_every_json_has_the_track_record(capsys, command):
    record = load_track_records().of("axonn", "bundled runtime", "A100")
    _, text, _ = run_cli(capsys, *command, *JOB)
    (line,) = [line for line in text.splitlines() if line.startswith("Track record")]
    assert f"axonn on A100: {record.n_runs} published runs" in line
    assert f"{record.n_far} of {record.n_runs} off by more than 20 %" in line
    _, printed, _ = run_cli(capsys, *command, *JOB, "--format", "json")
    document = json.loads(printed)
    of = document["strategies"][0] if command[0] == "compare" else document
    stated = of["assumptions"]["track_record"]
    assert stated["runs"] == record.n_runs and stated["spread"] == pytest.approx(record.spread)
    assert of["assumptions"]["caveat"] is None


@pytest.mark.parametrize(
    ("strategy", "machine", "said"),
    [
        ("megatron", "dgx-h100", "Track record of megatron (Megatron-Core) on H100: "),
        ("megatron", "alps", "Track record of megatron (Megatron-Core) on GH200: "),
        ("megatron", "perlmutter", "(Megatron-Core) on all machines, since A100 has too few: "),
        ("zeropp", "alps", "(DeepSpeed 0.10) on V100, since GH200 has too few: "),
        ("axonn", "alps", "(of other engines, too; bundled runtime has too few)"),
        ("zero-topo", "perlmutter", "zero-topo: never compared with a measured step."),
        ("zero-topo", "perlmutter", "* zero-topo quantises messages"),
    ],
)
def test_the_track_record_says_what_it_is_of(capsys, strategy, machine, said):
    job = ["--gpus", "8", "--model", "tiny", "--global-batch", "64"]
    _, text, _ = run_cli(capsys, "suggest", *job, "--strategy", strategy, "--machine", machine)
    assert said in text


_ATTENTION = ["--lora-targets", "attention"]
SEVERAL_SEARCHES = [
    ["compare", "--gpus", "8", "--strategies", "axonn,zero3"],
    ["suggest", "--gpus", "8", "--strategy", "all"],
    ["scale", "--gpus", "4..8"],
    ["plan", "--gpus", "8"],
    ["whatif", "--gpus", "8", "--set", "inter_node.bandwidth=2x"],
]


@pytest.mark.parametrize("command", SEVERAL_SEARCHES, ids=lambda command: command[0])
def test_a_table_of_several_searches_computes_no_chance_that_it_does_not_show(
    capsys, monkeypatch, command
):
    wanted = []
    known = Ranking.uncertainty.func
    monkeypatch.setattr(
        Ranking, "uncertainty", property(lambda ranking: wanted.append(1) or known(ranking))
    )
    monkeypatch.setattr(processes, "_n_cores", lambda: 1)
    _, table, _ = run_cli(capsys, *command, *JOB)
    assert "90 % interval" in table and not wanted
    _, printed, _ = run_cli(capsys, *command, *JOB, "--format", "json")
    assert '"p_best": 0.' in printed and '"p_best": null' not in printed and wanted


def test_runs_of_another_kind_are_said_to_stand_for_too_few(capsys):
    """It said "(all kinds)" behind another bracket."""
    job = [
        "--gpus",
        "8",
        "--model",
        "mixtral-8x7b",
        "--machine",
        "frontier",
        "--global-batch",
        "64",
    ]
    words = ["--strategy", "megatron", "--engine", "nanotron", "--micro-batch", "1"]
    _, text, _ = run_cli(capsys, "suggest", *job, *words, "--lora-rank", "8", *_ATTENTION)
    (line,) = [line for line in text.splitlines() if line.startswith("Track record")]
    assert ") (" not in line.partition("published run")[2] and "(all kinds)" not in line
    assert "of all kinds of training, since there are too few of adapters in experts)" in line
