"""A simulator of Slurm: where each process of a job stands, and which GPUs it sees.

It reads the options of a job script, as sbatch and srun do, and lets bash run the script of a rank
once for each process.
"""

import shlex
import subprocess
from dataclasses import dataclass

from axonn_tune.job_scripts import rank, sbatch

# Ways in which Slurm shows GPUs to the processes of a node: all of them, or one that is named by
# its number on the node, or one that a control group renumbers as 0, or all without a variable.
SIGHTS = ("all", "one", "renumbered", "unnamed")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")


@dataclass(frozen=True)
class Place:
    """A process that the script of a rank has prepared.

    node, gpu
        The node, and the number on the node of the GPU that the process would take.
    """

    rank: int
    node: int
    gpu: int


def options(script):
    """The options of sbatch and of srun in a job script; later ones count."""
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in directives for word in shlex.split(line)[1:]]
    (command,) = (line for line in script.splitlines() if line.startswith("srun "))
    words += command.removesuffix("\\").split()
    return dict(word.partition("=")[::2] for word in words if word.startswith("--"))


def places(files, sight, variables, takes):
    """The place of every process, in the order of Slurm's numbers.

    Parameters
    ----------
    files : dict of str to str
        What `launch` writes.
    variables : tuple of str
        The variables in which Slurm names the GPUs that a process sees.
    takes : callable
        The number of the GPU that a framework takes, from the rank, LOCAL_RANK and the number of
        GPUs that the process sees.
    """
    given = options(files[sbatch.NAME])
    assert given["--distribution"] == "block:block"
    n_processes, per_node = int(given["--ntasks"]), int(given["--ntasks-per-node"])
    n_gpus = int(given["--gpus-per-node"])
    assert n_processes <= per_node * int(given["--nodes"])
    shown, lines = [], ['exec() { "$@"; }', REPORT]
    for process in range(n_processes):
        local = process % per_node
        # The nearest GPU to a process need not have its number, as on Frontier.
        own = (local + n_gpus // 2) % n_gpus
        names = {"all": range(n_gpus), "one": [own], "renumbered": [0], "unnamed": []}[sight]
        shown.append([own] if sight in ("one", "renumbered") else list(range(n_gpus)))
        lines.append(f"SLURM_PROCID={process} SLURM_LOCALID={local} SLURM_NTASKS={n_processes}")
        lines.append(f"unset {' '.join(VARIABLES)} HIP_VISIBLE_DEVICES")
        if sight != "unnamed":
            lines += [f"export {name}={','.join(map(str, names))}" for name in variables]
        lines.append('source /dev/fd/3 report 3< <(printf %s "$script")')
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={"script": files[rank.NAME]},
        capture_output=True,
        text=True,
        check=True,
    )
    result = []
    for process, said in enumerate(done.stdout.splitlines()):
        own_rank, local_rank, visible = said.split()
        # The process sees what its variable names; a control group has renumbered its only GPU.
        seen = [0] if sight == "renumbered" else [int(name) for name in visible.split(",")]
        number = seen[takes(int(own_rank), int(local_rank), len(seen))]
        gpu = shown[process][number] if sight == "renumbered" else number
        result.append(Place(int(own_rank), process // per_node, gpu))
    assert len(result) == n_processes, done.stderr
    return result


REPORT = 'report() { echo "$RANK $LOCAL_RANK ${CUDA_VISIBLE_DEVICES-}${ROCR_VISIBLE_DEVICES-}"; }'
