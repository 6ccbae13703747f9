"""``axonn-tune explain --measured``: a trace beside its prediction, and bad traces."""

import json

import pytest
from command_line import assert_refused, run_cli

OPTIONS = ["--gpus", 8, "--model", "tiny", "--grid", "1x1x8x1", "--global-batch", 8]


def events():
    launcher = {"External id": 1, "Input Dims": [[64, 128], [128, 512]]}
    return [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 1, "args": launcher},
        {"ph": "X", "cat": "kernel", "name": "nvjet", "dur": 9, "args": {"External id": 1}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllToAll", "dur": 9, "args": {}},
    ]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events()}))
    return path


def test_a_trace_stands_below_the_explanation(capsys, trace):
    code, out, _ = run_cli(capsys, "explain", *OPTIONS, "--measured", trace)
    _, without, _ = run_cli(capsys, "explain", *OPTIONS)
    assert code == 0 and out.startswith(without.rstrip("\n"))
    added = out[len(without) :]
    assert "64 x 512 x 128" in added
    assert "Traced, but not in the plan:" in added and "In the plan, but not traced:" in added


def test_json_holds_every_line(capsys, trace):
    _, out, _ = run_cli(capsys, "explain", *OPTIONS, "--measured", trace, "--format", "json")
    lines = json.loads(out)["measured"]
    (product,) = (line for line in lines if line["size"] == "64 x 512 x 128")
    assert product["traced_seconds"] == pytest.approx(9e-6) and product["predicted_calls"] > 0


def test_a_bad_trace_is_one_line(capsys, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("{")
    assert_refused(capsys, "explain", *OPTIONS, "--measured", path, culprit="malformed JSON")
