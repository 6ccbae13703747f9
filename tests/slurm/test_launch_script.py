"""The job script that `launch` writes, under a real sbatch on two nodes."""

import subprocess
from dataclasses import replace

import pytest

from axonn_tune.api import build_search
from axonn_tune.job_scripts.script import SCRIPT, launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.machine import JobScript

pytestmark = pytest.mark.slow

TRAIN = """
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NODEID", "MASTER_ADDR", "MARK")
with open(f"place.{os.environ['SLURM_PROCID']}", "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
"""


@pytest.mark.parametrize(("order", "ranks"), [("xyzd", [0, 1, 2, 3]), ("dxyz", [0, 2, 1, 3])])
def test_every_process_gets_its_place(slurm, tmp_path, order, ranks):
    """Order dxyz on 2x1x1x2: a node's two processes are replicas, in AxoNN's numbers 0 and 2."""
    search = build_search("tiny", 4, global_batch=4, micro_batch=1, order=order)
    script = JobScript(("--time=5",), ("--kill-on-bad-exit",), {"MARK": "here"})
    machine = replace(search.scenario.machine, ranks_per_node=2, job_script=script)
    files = launch_files(best_of_layout(search.on(machine), "2x1x1x2"))
    for name, text in files.items():
        # The test's nodes have no GPUs to ask for.
        lines = [line for line in text.splitlines() if "--gpus-per-node" not in line]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    (tmp_path / "train.py").write_text(TRAIN)
    command = ["sbatch", "--wait", "--output", "said", SCRIPT]
    done = subprocess.run(
        command, cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (tmp_path / "said").read_text() + done.stderr
    places = [(tmp_path / f"place.{process}").read_text().split() for process in range(4)]
    assert [int(place[0]) for place in places] == ranks
    assert [place[1:4] for place in places] == [
        ["4", "0", "0"],
        ["4", "1", "0"],
        ["4", "0", "1"],
        ["4", "1", "1"],
    ]
    assert {place[4] for place in places} == {"n1"} and {place[5] for place in places} == {"here"}
