"""The same command on every rank under a real srun, on two nodes."""

import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.io.presets import load_machine

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SRUN = ["srun", "--nodes", "2", "--ntasks-per-node", "2", sys.executable]
RUN = ["-m", "axonn_tune.cli.main", "run", "--model", "tiny", "--seq-len", "16", "--steps", "3"]
BRIEF_CALIBRATION = str(Path(__file__).parents[1] / "cli" / "brief_calibration.py")


def srun(slurm, *arguments, command=RUN, **variables):
    return subprocess.run(
        [*SRUN, *command, *arguments],
        env={**slurm, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_ranks_of_two_nodes_train_together(slurm):
    done = srun(slurm, "--grid", "1x2x1x2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("grid 1x2x1x2 (x, y, z, data)") == 1
    assert "on 4 x CPU" in done.stdout and done.stderr.count("step 3 of 3") == 1


def test_the_grid_must_have_as_many_ranks_as_the_job(slurm):
    done = srun(slurm, "--grid", "1x2x1x1")
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("axonn-tune")]
    assert said == ["axonn-tune: the task needs 2 ranks; this job has 4"]


def test_a_meeting_point_without_an_address_is_named(slurm):
    done = srun(slurm, "--grid", "1x2x1x2", MASTER_ADDR="")
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("axonn-tune")]
    assert len(said) == 1 and "MASTER_ADDR is 'n1', which is unknown here; allowed: " in said[0]


@pytest.mark.sweep
def test_two_nodes_are_calibrated(slurm, tmp_path):
    """Both nodes share the host's name; Slurm's own variables tell them apart."""
    profile = tmp_path / "cluster.yaml"
    command = [BRIEF_CALIBRATION, "calibrate", "--output", str(profile), "--quick"]
    done = srun(slurm, command=command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("└─ inter-node: joins 2 x units of 2 ranks") == 1
    machine = load_machine(profile)
    assert machine.calibration.hosts == ("n1:0", "n2:1")
    assert (machine.ranks_per_node, [link.unit_ranks for link in machine.links]) == (2, [1, 2])
    across = {p.n_rings for p in machine.link_points if (p.stride, p.size) == (2, 2)}
    assert across == {1, 2}
    assert not (tmp_path / "cluster.yaml.partial").exists()
