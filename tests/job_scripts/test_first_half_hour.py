"""The scripts of docs/first-half-hour.md: their commands are those of this version."""

import os
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from axonn_tune.cli.main import cli

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
STAND_IN = '#!/bin/bash\nprintf "%q " "$(basename "$0")" "$@" >> "$CALLS"; echo >> "$CALLS"\n'


def commands_of(script, folder):
    """The commands that a script calls, with stand-ins for srun and axonn-tune."""
    for name in ("srun", "axonn-tune"):
        path = folder / name
        path.write_text(STAND_IN)
        path.chmod(0o755)
    calls = folder / "calls"
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "SLURM_NTASKS": "8",
    }
    subprocess.run(["bash", script], cwd=folder, env=environment, check=True, timeout=30)
    return [shlex.split(line) for line in calls.read_text().splitlines()]


def test_the_nodes_are_measured_searched_and_validated(tmp_path):
    commands = commands_of(EXAMPLES / "first-nodes.sbatch", tmp_path)
    starts = [words[0] for words in commands]
    assert starts == ["srun", "axonn-tune", "srun"]
    asked = [words[words.index("axonn-tune") + 1 :] for words in commands]
    assert [words[0] for words in asked] == ["calibrate", "suggest", "validate"]
    parent = click.Context(cli, **cli.context_settings)
    for name, *arguments in asked:
        command = cli.get_command(parent, name)
        given = command.make_context(name, list(arguments), parent=parent).params
        assert given["global_batch"] == 32 and given["model"] == "5b"
        assert "cluster.yaml" in (given.get("output"), given.get("machine"))


@pytest.mark.parametrize("name", ["first-node", "first-nodes"])
def test_what_only_the_user_knows_is_left_to_fill_in(name):
    script = EXAMPLES / f"{name}.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    assert "##SBATCH --account=YOUR_ACCOUNT" in script.read_text()
