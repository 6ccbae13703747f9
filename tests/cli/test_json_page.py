"""The page on JSON output names every key that a command prints."""

import json
import re
from pathlib import Path

import pytest
from command_line import run_cli

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
NAMES = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))
# Keys that are names themselves: of axes, terms of memory, reasons, batches and columns.
OF_NAMES = {
    "grid",
    "memory_terms_bytes",
    "exposed_seconds_by_axis",
    "rejected",
    "batch_seconds",
    "by",
    "provenance",
}
SEARCH = ["--gpus", "8", "--model", "5b", "--machine", "dgx-h100"]
COMMANDS = {
    "suggest": [*SEARCH, "--within", "5%"],
    "explain": [*SEARCH, "--strategy", "megatron", "--grid", "tp=2,pp=2,dp=2"],
    "compare": [*SEARCH, "--strategies", "axonn,zero3"],
    "whatif": [*SEARCH, "--set", "inter_node.bandwidth=2x", "--fix", "x=1", "--fix", "y=1"],
    "plan": [*SEARCH, "--tokens", "1e9", "--deadline", "30d", "--node-hours", "1k"],
    "score": ["runs.csv", "--machine", "dgx-h100", "--by", "tensor"],
    "learn": ["runs.csv", "--machine", "dgx-h100"],
    "next": [*SEARCH, "--strategy", "megatron", "--runs", "runs.csv", "--budget", "1"],
    "machines diff": ["dgx-h100", "dgx-h200"],
    "machines expect": ["dgx-h100"],
}


def keys(value):
    """Yield every key of a document, at all depths, that is not a name itself."""
    if isinstance(value, list):
        for each in value:
            yield from keys(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from () if key in OF_NAMES else keys(each)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_stands_on_the_page(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    columns = "model,gpus,layout,global_batch,engine,step_seconds"
    Path("runs.csv").write_text(f'{columns}\n5b,8,"tensor=2,data=4",64,megatron-core,3.4\n')
    arguments = [*command.split(), *COMMANDS[command], "--format", "json"]
    code, out, err = run_cli(capsys, *arguments)
    assert code == 0, err
    found = set(keys(json.loads(out)))
    assert len(found) > 5
    assert found <= NAMES, sorted(found - NAMES)
