"""The product as a user meets it: calibrate this GPU, predict a run, run it, compare."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import environment

torch = pytest.importorskip("torch")

from axonn_tune.calibration.fit.rates import known_gpu  # noqa: E402
from axonn_tune.io.presets import preset_machines  # noqa: E402

pytestmark = pytest.mark.gpu_only
# 1.3 billion parameters, as GPT-3 XL (Brown et al., arXiv 2005.14165, table 2.1).
MODEL = {
    "name": "gpt-1.3b",
    "n_layers": 24,
    "hidden_size": 2048,
    "n_heads": 16,
    "vocab_size": 50304,
    "seq_len": 2048,
}
MOST_ERROR = 0.10


def axonn_tune(*arguments, seconds):
    done = subprocess.run(
        [sys.executable, "-m", "axonn_tune.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Profile and records stay in the folder that GPU_RESULTS names, or in a temporary one."""
    return Path(os.environ.get("GPU_RESULTS") or tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def model(folder):
    path = folder / "gpt-1.3b.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in MODEL.items()))
    return path


@pytest.fixture(scope="module")
def profile(folder, model):
    """A quick calibration; one rank has no links, so those of a preset are taken."""
    seen = torch.cuda.get_device_properties(0)
    known = known_gpu(seen.name, seen.total_memory, seen.multi_processor_count, preset_machines())
    if known is None:
        pytest.skip(f"no preset has links for {seen.name}")
    path = folder / "measured.yaml"
    of_search = ["--model", model, "--gpus", 1, "--global-batch", 8]
    options = ["--quick", "--ranks", 1, "--machine", known.name, "--output", path, *of_search]
    axonn_tune("calibrate", *options, seconds=280)
    return path


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_measured_step_is_predicted(folder, model, profile, micro_batch, note):
    ran = axonn_tune(
        *("run", "--grid", "1x1x1x1", "--model", model, "--machine", profile),
        *("--global-batch", 8, "--micro-batch", micro_batch, "--quiet", "--format", "json"),
        *("--record", folder / f"run-{micro_batch}.json"),
        *("--trace", folder / f"trace-{micro_batch}.json"),
        seconds=200,
    )
    report = json.loads(ran)
    predicted, measured = report["prediction"]["step_seconds"], report["median_step_seconds"]
    note(
        micro_batch=micro_batch,
        predicted_s=predicted,
        measured_s=measured,
        error=predicted / measured - 1,
        tflops=report["tflops_per_gpu"],
        peak_gib=report["peak_memory_bytes"] / 2**30,
    )
    assert predicted == pytest.approx(measured, rel=MOST_ERROR)
