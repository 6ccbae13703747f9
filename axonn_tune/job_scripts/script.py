"""The job script, and all other files that start a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from axonn_tune.errors import InputError
from axonn_tune.job_scripts import axonn, deepspeed, fsdp2, megatron
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

SCRIPT = "launch.sbatch"
# Frameworks that run each strategy, the usual one first.
FRAMEWORKS = {
    "axonn": ("axonn",),
    "axonn-pipeline": ("axonn",),
    "megatron": ("megatron",),
    "zero3": ("fsdp2", "deepspeed"),
    "zeropp": ("deepspeed",),
    "zero-topo": (),
}
_FILES: dict[str, Callable[[Prediction], dict[str, str]]] = {
    "axonn": axonn.files,
    "deepspeed": deepspeed.files,
    "fsdp2": fsdp2.files,
    "megatron": lambda prediction: {},
}


def launch_files(
    prediction: Prediction,
    framework: str | None = None,
    train: str | None = None,
    sbatch: Sequence[str] = (),
) -> dict[str, str]:
    """Return the text of every file by its name: the job script and what the framework reads.

    Parameters
    ----------
    framework : str or None
        One of `FRAMEWORKS` of the strategy; None takes the first.
    train : str or None
        The training script, for frameworks that bring none.
    sbatch : sequence of str
        Further options of sbatch, such as ``--account=abc``.

    Raises
    ------
    InputError
        No released framework runs the strategy, or this one does not run it.
    """
    name = prediction.scenario.strategy.name
    allowed = FRAMEWORKS.get(name, ())
    if not allowed:
        raise InputError(f"strategy {name} has no released implementation to launch")
    framework = allowed[0] if framework is None else framework
    if framework not in allowed:
        raise InputError(
            f"--framework {framework} does not run {name}; allowed: {', '.join(allowed)}"
        )
    return {
        SCRIPT: _script(prediction, framework, train or "train.py", sbatch),
        **_FILES[framework](prediction),
    }


def _engine_text(scenario: Scenario) -> str:
    """Return which engine a prediction is of, if it is of a certain one."""
    engine = scenario.strategy.engine.title
    return f", with the engine {engine}" if engine else ""


def memory_warning(prediction: Prediction) -> list[str]:
    """Return a line for a configuration that is predicted not to fit, and none for others."""
    if prediction.fits:
        return []
    needed = gib(prediction.memory_bytes)
    capacity = gib(prediction.memory_capacity_bytes)
    return [f"# Predicted to run out of memory: {needed:.1f} GiB of {capacity:.1f} GiB per GPU."]


def _script(prediction: Prediction, framework: str, train: str, sbatch: Sequence[str]) -> str:
    scenario = prediction.scenario
    configuration = prediction.configuration
    model = scenario.model
    job = scenario.job
    machine = scenario.machine
    tasks = min(machine.ranks_per_node, job.n_gpus)
    host = machine.job_script
    ranks = axonn.rank_lines(prediction) if framework == "axonn" else []
    command = _command(prediction, framework, train)
    lines = [
        "#!/bin/bash",
        f"# {model.name} on {job.n_gpus} {machine.gpu.name}: {scenario.strategy.name}, "
        f"{prediction.layout}, micro-batch {configuration.micro_batch}, "
        f"recompute {configuration.recompute}.",
        f"# Predicted: {prediction.step_seconds:.3f} s a step, "
        f"{prediction.tflops_per_gpu:.1f} TFLOP/s per GPU{_engine_text(scenario)}.",
        *memory_warning(prediction),
        f"#SBATCH --job-name={model.name}",
        f"#SBATCH --nodes={scenario.n_nodes}",
        f"#SBATCH --ntasks={job.n_gpus}",
        f"#SBATCH --ntasks-per-node={tasks}",
        f"#SBATCH --gpus-per-node={tasks}",
        *(f"#SBATCH {option}" for option in (*host.sbatch, *sbatch)),
        "",
        "set -euo pipefail",
        *(f"module load {module}" for module in host.modules),
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export MASTER_PORT=29500",
        "export WORLD_SIZE=$SLURM_NTASKS",
        *(f"export {variable}={value}" for variable, value in host.environment.items()),
        "",
        "# Ranks fill one node after the other, as the prediction assumed.",
        f"srun {' '.join(['--distribution=block:block', *host.srun])} bash -c '",
        *(f"  {line}" for line in ranks or ["export RANK=$SLURM_PROCID"]),
        "  export LOCAL_RANK=$SLURM_LOCALID",
        f"  exec {command}",
        "'",
    ]
    return "\n".join(lines) + "\n"


def _command(prediction: Prediction, framework: str, train: str) -> str:
    if framework == "megatron":
        flags = " \\\n    ".join(megatron.flags(prediction))
        return f"python {megatron.SCRIPT} \\\n    {flags}"
    if framework == "deepspeed":
        return f"python {train} --deepspeed --deepspeed_config {deepspeed.NAME}"
    return f"python {train}"
