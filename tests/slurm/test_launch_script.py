"""The job script that `launch` writes, under a real sbatch on two nodes with two GPUs each."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.job_scripts.quoting import directive
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.machine import JobScript

pytestmark = pytest.mark.slow

TRAIN = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK SLURM_NODEID CUDA_VISIBLE_DEVICES MASTER_ADDR MARK"
names += " SLURM_CPUS_PER_TASK"
with open(f"place.{os.environ['SLURM_PROCID']}", "w") as file:
    file.write(" ".join(os.environ.get(name, "-") for name in names.split()))
"""


def submit(slurm, folder, files):
    """Submit a job as a user would, in the folder of its files; what it has said is returned."""
    for name, text in files.items():
        (folder / name).write_text(text)
    command = ["sbatch", "--wait", "--output=said", "launch.sbatch"]
    # The job finds the python of the tests, as that of an activated environment.
    environment = {**slurm, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{slurm['PATH']}"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    said = (folder / "said").read_text()
    assert done.returncode == 0, said + done.stderr
    return said


def files_of(strategy, layout, srun=(), order="xyzd", train=None, **options):
    search = build_search(
        "tiny", 4, global_batch=4, micro_batch=1, strategy=strategy, order=order, **options
    )
    script = JobScript(("--time=5",), srun, {"MARK": "it's $HOME"})
    machine = replace(search.scenario.machine, ranks_per_node=2, job_script=script)
    return launch_files(best_of_layout(search.on(machine), layout), train=train)


@pytest.mark.parametrize("srun", [(), ("--gpus-per-task=1",)])
@pytest.mark.parametrize(
    ("order", "ranks"),
    [
        pytest.param("xyzd", [0, 1, 2, 3], marks=pytest.mark.sweep),
        ("dxyz", [0, 2, 1, 3]),
    ],
)
def test_every_process_gets_its_place_and_a_gpu(slurm, tmp_path, order, ranks, srun):
    """Order dxyz on 2x1x1x2: a node's two processes are replicas, in AxoNN's numbers 0 and 2."""
    files = files_of("axonn", "2x1x1x2", srun, order, train="place.py")
    submit(slurm, tmp_path, {**files, "place.py": TRAIN})
    places = [(tmp_path / f"place.{process}").read_text() for process in range(4)]
    assert places == [
        f"{rank} 4 0 {process // 2} {process % 2} n1 it's $HOME 2"
        for process, rank in enumerate(ranks)
    ]


def test_the_written_program_trains(slurm, tmp_path):
    """It is submitted as it is written; only a node's name has no address on this machine."""
    pytest.importorskip("torch")
    files = files_of("zero3", "shard=2,replica=2", dtype="fp32", seq_len=16)
    script = files["launch.sbatch"].replace("--steps 20", "--steps 3")
    files["launch.sbatch"] = script.replace(
        "export MASTER_ADDR\n", "export MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1\n"
    )
    said = submit(slurm, tmp_path, files)
    assert "step 3: loss" in said and "predicted" in said


@pytest.mark.parametrize("text", ["it's", 'a "b"', "$(id)", "a\\b", "a #b", "`id`;&|"])
def test_sbatch_reads_a_directive_as_it_is(slurm, tmp_path, text):
    script = tmp_path / "job"
    script.write_text(f"#!/bin/bash\n{directive([f'--job-name={text}'])}\n")
    command = ["sbatch", "--parsable", "--hold", "--output=/dev/null", str(script)]
    job = subprocess.run(command, env=slurm, capture_output=True, text=True, check=True).stdout
    shown = subprocess.run(
        ["squeue", "--noheader", "--format=%j", f"--jobs={job.strip()}"],
        env=slurm,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.rstrip("\n") == text
    subprocess.run(["scancel", *shlex.split(job)], env=slurm, check=True)
