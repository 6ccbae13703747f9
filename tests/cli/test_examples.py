"""The examples of help texts and of pages run, wherever they need neither ranks nor a cluster."""

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from command_line import run_cli

from axonn_tune.cli.main import cli
from axonn_tune.io.package_data import template

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "data" / "training_logs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Commands that start ranks or measure; `reproduce` has its own tests.
NOT_RUN = {"run", "validate", "calibrate", "emulate", "reproduce"}
# Commands that search many times; CI runs the first example of each.
SLOW = {"compare", "next", "plan", "report", "scale", "whatif"}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


def commands(command, names=()):
    """Yield the names and the help text of every command."""
    yield names, command.help or ""
    if isinstance(command, click.Group):
        for name in command.list_commands(None):
            yield from commands(command.get_command(None, name), (*names, name))


def lines_of(text):
    """Yield the lines of a text that call the program; a line that goes on is joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip().startswith("axonn-tune ") and "FILE" not in line:
            yield " ".join(line.split())


def examples():
    """Yield every example once, as a line; a remark behind it makes no other example."""
    texts = [help_text for _, help_text in commands(cli)]
    for page in PAGES:
        if page.name != "cli.md":  # It holds the help texts.
            texts += BLOCK.findall(page.read_text())
    found = {}
    for line in (line for text in texts for line in lines_of(text)):
        found.setdefault(tuple(shlex.split(line, comments=True)), line)
    seen = set()
    for words, line in found.items():
        if words[1] in NOT_RUN or "--measured" in words or "--validation" in words:
            continue
        marks = []
        if words[1] == "rehearse":
            # A step of a whole model takes ten seconds, and that of the example's script one.
            marks = [pytest.mark.slow if "--script" in words else pytest.mark.sweep]
        elif words[1] in SLOW or "all" in words or "--html" in words:
            marks = [pytest.mark.sweep if words[1] in seen else pytest.mark.slow]
            seen.add(words[1])
        yield pytest.param(line, id=line, marks=marks)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the files that examples name."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("mycluster", "mine", "monday", "tuesday", "old", "new"):
        (tmp_path / f"{name}.yaml").write_text(template("machine"))
    (tmp_path / "myengine.yaml").write_text("name: mine\ntitle: mine\nstrategies: [zero3]\n")
    columns = "model,gpus,layout,global_batch,engine,step_seconds"
    for name, seconds in (("runs", 3.4), ("yesterday", 3.4), ("tonight", 3.45)):
        row = f'llama3-8b,64,"tensor=2,data=32",256,megatron-core,{seconds}'
        (tmp_path / f"{name}.csv").write_text(f"{columns}\n{row}\n")
    program = (ROOT / "docs" / "examples" / "train_step.py").read_text()
    (tmp_path / "train_step.py").write_text(program)
    logs = {"run1": "megatron", "run2": "nanotron", "titan": "torchtitan"}
    for name, log in logs.items():
        shutil.copy(
            ROOT / "tests" / "data" / "training_logs" / f"{log}.log", f"{tmp_path}/{name}.log"
        )
    sweep = "tp,dp,gpus,gbs,time_ms\n" + "2,4,8,64,900\n" * 3
    (tmp_path / "sweep.csv").write_text(sweep)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", list(examples()))
def test_an_example_runs(capsys, folder, line):
    code, out, err = run_cli(capsys, *shlex.split(line, comments=True)[1:])
    if "# an error" in line:
        assert code == 2
    else:
        assert code == 0, err
        assert "no grid for" not in out


def test_the_readme_shows_what_its_first_command_prints(capsys):
    shown = re.search(r"```text\n(gpt-80b .*?)```", PAGES[0].read_text(), re.DOTALL).group(1)
    _, out, _ = run_cli(capsys, "suggest", "--gpus", "1024", "--model", "80b")
    assert out.startswith(shown)
