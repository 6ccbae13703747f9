"""Text of a file or of an option is shown as text: no control, no formula, no markup."""

import csv
import json

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.cli.output import as_csv
from axonn_tune.errors import LONGEST_MESSAGE
from axonn_tune.io.presets import load_machine
from axonn_tune.io.yaml_files import save_yaml

MODEL = "n_layers: 4\nhidden_size: 512\nn_heads: 8\nvocab_size: 1024\nseq_len: 512\n"
NAMES = [
    "a$\\frac{$",
    "$x_$",
    "$(id)",
    "=1+2 ../../x it's `id`",
    '"</script> {x} %s',
]


TINY = ["--gpus", 8, "--model", "tiny"]


def model_named(tmp_path, name, **more):
    path = tmp_path / "model.yaml"
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in {"name": name, **more}.items()]
    path.write_text("".join(lines) + MODEL)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_any_printable_name_can_be_drawn_and_traced(capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    model = model_named(tmp_path, name)
    plot = tmp_path / "plot.svg"
    code, out, _ = run_cli(capsys, "suggest", "--gpus", 8, "--model", model, "--plot", plot)
    assert code == 0 and name in out and plot.stat().st_size > 1000
    trace = tmp_path / "trace.json"
    options = ["--gpus", 8, "--model", model, "--grid", "1x2x2x2"]
    code, _, err = run_cli(capsys, "trace", *options, "--output", trace)
    assert code == 0, err
    first = json.loads(trace.read_text())["traceEvents"][0]
    assert first["args"]["name"] == f"predicted: {name}, 1x2x2x2"


def test_controls_of_a_description_do_not_reach_the_terminal(capsys, tmp_path):
    """A name with them is refused; a description and a source may hold what a log held."""
    machine = load_machine("perlmutter")
    hostile = "\x1b[2J\x07\x9b31m\r"
    object.__setattr__(machine, "description", f"clean{hostile}text")
    path = tmp_path / "machine.yaml"
    save_yaml(path, machine)
    assert load_machine(path).description == f"clean{hostile}text"
    _, out, _ = run_cli(capsys, "machines", "show", path)
    assert "clean" in out and not set(hostile) - set("[2J31m") & set(out)


@pytest.mark.parametrize("name", ["gpt\x1b[31m-80b", "gpt\x07", "a\nb", "\udcff"])
def test_controls_of_an_option_do_not_reach_the_terminal(capsys, name):
    _, _, err = run_cli(capsys, "suggest", "--gpus", 8, "--model", name)
    assert err.rstrip("\n").isprintable()
    assert_refused(capsys, "suggest", "--gpus", 8, "--model", name, culprit="unknown model")


def test_a_spreadsheet_computes_nothing_from_a_table():
    texts = ["=1+2", "+1", "-1", "@x", "=cmd|' /C calc'!A0"]
    cells = list(csv.reader(as_csv([{"text": text, "value": -1.5} for text in texts]).splitlines()))
    assert cells == [["text", "value"], *([f"'{text}", "-1.5"] for text in texts)]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["suggest", "--gpus", 8, "--model", "tiny", "--fix", "x=²"], "--fix"),
        (["suggest", "--gpus", 8, "--model", "tiny", "--fix", "x=" + "9" * 5000], "--fix"),
        (["scale", "--gpus", "٣..6", "--model", "tiny"], "--gpus"),
        (["scale", "--gpus", "9" * 5000, "--model", "tiny"], "--gpus"),
        (["machines", "expect", "perlmutter", "--most", "1e300B"], "--most"),
        (["machines", "expect", "perlmutter", "--most", "9" * 5000], "--most"),
        (["explain", "--gpus", 8, "--model", "tiny", "--grid", "²x1x1x1"], "grid '²x1x1x1'"),
        (["plan", "--gpus", 8, "--model", "tiny", "--tokens", "9" * 5000], "--tokens"),
        (["suggest", "--gpus", "9" * 5000, "--model", "tiny"], "--gpus"),
        (["suggest", *TINY, "--offload-modules", "layers:" + "9" * 5000], "offload_modules"),
        (["suggest", *TINY, "--offload-modules", "layers:٣"], "offload_modules"),
        (["machines", "expect", "perlmutter", "--nodes", "9" * 400], "--nodes"),
        (["emulate", "--spec", "flat-8", "--", "/no/such"], "/no/such is no program"),
    ],
)
def test_numbers_of_other_scripts_or_of_5000_digits_are_refused(capsys, arguments, culprit):
    assert_refused(capsys, *arguments, culprit=culprit)


def test_a_count_that_fills_the_memory_is_refused_before_anything_is_listed(capsys):
    modules = ["--strategy", "megatron", "--mtp-modules"]
    assert_refused(capsys, "suggest", *TINY, *modules, 2**30, culprit="mtp_modules is 1073741824")


@pytest.mark.parametrize(
    "option", ["--model", "--machine", "--engine", "--gx", "--recompute", "--schedule"]
)
def test_a_message_leaves_out_the_middle_of_a_value_as_long_as_a_page(capsys, option):
    given = ["suggest", *TINY, option, "a" * 100_000]
    assert_refused(capsys, *given, culprit="aaa [...] ")
    *_, err = run_cli(capsys, *given)
    assert len(err) < LONGEST_MESSAGE + 100
    whole = run_cli(capsys, "suggest", *TINY, option, "a" * 1000)[2]
    assert "a" * 1000 in whole and "[...]" not in whole
    assert whole[-100:] == err[-100:], "what is allowed stands at the end"
