"""The Python functions that measure on ranks."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys

import pytest

import axonn_tune
from axonn_tune.api.measuring import run_here
from axonn_tune.cli.calibrate import command as calibrate_command
from axonn_tune.cli.validate import command as validate_command
from axonn_tune.errors import InputError

# Options of the command line that say where results come from or go to, or what to make of them.
OF_FILES_AND_LIMITS = {
    "imports",
    "kind",
    "log_ranks",
    "log_ranks_per_node",
    "where",
    "thin_percent",
    "without_casts",
    "output",
    "resume",
    "source",
    "baseline",
    "csv",
    "junit",
    "plot",
    "trace",
    "max_error",
    "max_regret",
    "least_change",
}


@pytest.mark.parametrize(
    ("function", "command"),
    [(axonn_tune.calibrate, calibrate_command), (axonn_tune.validate, validate_command)],
)
def test_function_and_command_have_the_same_options(function, command):
    parameters = set(inspect.signature(function).parameters)
    options = {option.name for option in command.params}
    assert parameters - OF_FILES_AND_LIMITS == options - OF_FILES_AND_LIMITS
    for name in parameters:
        assert f"    {name} : " in function.__doc__


@pytest.mark.parametrize(
    ("engine", "strategy"),
    [(None, "axonn"), ("axonn", "axonn"), ("deepspeed", "zero3"), ("megatron-core", "megatron")],
)
def test_an_engine_says_what_is_run_where_no_strategy_is_named(engine, strategy):
    named, unnamed = run_here(strategy, engine), run_here(None, engine)
    assert unnamed.strategy == named.strategy
    assert unnamed.axes == named.axes


@pytest.mark.parametrize(
    ("function", "arguments", "wrong", "nearest"),
    [
        (axonn_tune.calibrate, ["m.yaml"], "quik", "quick"),
        (axonn_tune.validate, ["tiny", "perlmutter"], "step", "steps"),
    ],
)
def test_a_misspelt_option_is_named_with_the_nearest(function, arguments, wrong, nearest):
    with pytest.raises(InputError, match=rf"no option '{wrong}'.*{nearest}"):
        function(*arguments, **{wrong: 3})


def test_a_part_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(InputError, match=r"only.*disk.*gemm"):
        axonn_tune.calibrate(tmp_path / "m.yaml", only=("disk",), machine="perlmutter")


def test_too_few_steps_are_named():
    with pytest.raises(InputError, match=r"steps is 2.*at least 3"):
        axonn_tune.validate("tiny", "perlmutter", gpus=2, steps=2)


PROGRAM = """
import json
import sys

import axonn_tune

if __name__ == "__main__":
    path = sys.argv[1]
    machine = axonn_tune.calibrate(
        path, only=("memory",), machine="perlmutter", quick=True, ranks=1, device="cpu", quiet=True
    )
    validation = axonn_tune.validate(
        "tiny", path, gpus=2, grids="top:2", steps=3, device="cpu", quiet=True
    )
    steps = [min(outcome.step_seconds) for outcome in validation.outcomes]
    print(json.dumps({"machine": machine.name, "ranks": validation.n_ranks, "steps": steps}))
"""


@pytest.mark.sweep
def test_a_script_calibrates_and_validates(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(tmp_path / "mine.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["machine"], result["ranks"]) == ("mine", 2)
    assert len(result["steps"]) == 2 and min(result["steps"]) > 0.0
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []
