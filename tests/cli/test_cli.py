"""What holds for every command: bad input, files, help, presets."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from command_line import assert_refused, run_cli

from axonn_tune.cli.main import COMMANDS, cli

SUGGEST = ["suggest", "--gpus", "64", "--model", "20b"]


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
    assert_refused(capsys, *args, culprit=culprit)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpus", "--gpus': 'x' is not a whole number."),
        ("--expert-imbalance", "--expert-imbalance': 'x' is not a number."),
    ],
)
def test_a_word_in_place_of_a_number_is_refused_in_plain_words(capsys, option, said):
    assert_refused(capsys, "suggest", "--gpus", "8", "--model", "tiny", option, "x", culprit=said)


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
    assert_refused(capsys, *SUGGEST, "--output", folder, culprit="taken.json")
    assert folder.is_dir()


def options_with_paths():
    """Each command, and its options whose values are paths."""
    for names in help_pages():
        command = cli.get_command(None, names[0])
        command = getattr(command, "commands", {}).get(names[-1], command)
        for option in command.params:
            if isinstance(option.type, click.Path):
                yield pytest.param(names, option, id=f"{' '.join(names)} {option.opts[0]}")


def help_pages():
    """Every command, and every command below one."""
    for name in COMMANDS:
        yield [name]
        below = getattr(cli.get_command(None, name), "commands", {})
        yield from ([name, subcommand] for subcommand in below)


def test_help_says_one_default_of_an_option_whose_default_is_an_empty_text(capsys):
    """Such an option says in words what happens without it."""
    code, out, _ = run_cli(capsys, "suggest", "--help")
    text = " ".join(out.split())
    assert code == 0 and 'default: ""' not in text
    assert "Et*3|(tt|)*14t|L. [default: as many in each] --schedule" in text


@pytest.mark.parametrize("names", list(help_pages()), ids=" ".join)
def test_every_help_text_has_an_example_of_its_command(capsys, names):
    code, out, _ = run_cli(capsys, *names, "--help")
    assert code == 0 and f"axonn-tune {' '.join(names)}" in out.split("Example", 1)[1]


@pytest.mark.parametrize(("names", "option"), list(options_with_paths()))
def test_an_empty_path_is_refused(capsys, monkeypatch, tmp_path, names, option):
    """It would mean the folder in which the command runs, or no option at all."""
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, *names, option.opts[0], "", culprit=f"'{option.opts[0]}': the path is")
    assert not list(tmp_path.iterdir())


def test_the_path_of_a_folder_is_not_taken_for_that_of_a_file(capsys, tmp_path):
    given = f"{tmp_path}/new/"
    assert_refused(capsys, *SUGGEST, "--output", given, culprit=f"'{given}' is the path of a fold")
    assert not list(tmp_path.iterdir())


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


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the threads of a process")
def test_a_search_has_one_thread():
    program = (
        "import os; from axonn_tune.cli.main import main; "
        f"main({SUGGEST}); import numpy; numpy.ones((300, 300)) @ numpy.ones((300, 300)); "
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    words = [sys.executable, "-c", program]
    run = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.splitlines()[-1] == "1"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [("suggest", None, "1"), ("suggest", "2", "2"), ("emulate", None, None)],
)
def test_programs_that_a_command_starts_get_the_environment_of_the_user(
    monkeypatch, name, given, expected
):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", given)
    with click.Context(cli) as context:
        cli.resolve_command(context, [name])
        assert os.environ.get("OPENBLAS_NUM_THREADS") == expected
    assert os.environ.get("OPENBLAS_NUM_THREADS") == given
