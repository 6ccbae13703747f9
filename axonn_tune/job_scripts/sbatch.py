"""The job script for Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from axonn_tune.job_scripts import rank
from axonn_tune.job_scripts.framework import Start
from axonn_tune.job_scripts.quoting import command, comment, directive, export, words
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

NAME = "launch.sbatch"
# What no prediction knows; the line stays a comment until the user has completed it.
_PLACEHOLDERS = {"--account": "YOUR_ACCOUNT", "--time": "01:00:00"}
_COMPLETE = "Complete the lines that begin with ##SBATCH, and remove one # of each."
_SHORT_NAMES = {"-A": "--account", "-t": "--time", "-o": "--output", "-c": "--cpus-per-task"}
_CONTINUED = " \\\n  "


def job_script(prediction: Prediction, start: Start, sbatch: Sequence[str]) -> str:
    """Return the script.

    Parameters
    ----------
    sbatch : sequence of str
        Further options of sbatch, such as ``--account=abc``.
    """
    scenario = prediction.scenario
    host = scenario.machine.job_script
    given = [words(text, "option of sbatch") for text in (*host.sbatch, *sbatch)]
    names = _option_names(word for words in given for word in words)
    missing = [f"{name}={text}" for name, text in _PLACEHOLDERS.items() if name not in names]
    environment = {**start.environment, **host.environment}
    lines = [
        "#!/bin/bash",
        *(comment(text) for text in _header(prediction, start, missing)),
        *(directive(option) for option in [*_options(scenario), *given]),
        *(f"#{directive([option])}" for option in missing),
        "",
        *(command(["module", "load", module]) for module in host.modules),
        "set -euo pipefail",
        'read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        "export MASTER_ADDR",
        "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
        "export WORLD_SIZE=$SLURM_NTASKS",
        *(export(name, value) for name, value in environment.items()),
        "",
        comment("Ranks fill one node after the other, as the prediction assumed."),
        _CONTINUED.join([_srun(scenario), *_program(scenario, start)]),
    ]
    return "\n".join(lines) + "\n"


def memory_warning(prediction: Prediction) -> list[str]:
    """Return a sentence about a configuration that is predicted not to fit, and none for others."""
    if prediction.fits:
        return []
    if not prediction.fits_in_host:
        needed = gib(prediction.host_memory_bytes)
        capacity = gib(prediction.host_memory_capacity_bytes)
        return [
            f"Predicted to run out of the host's memory: {needed:.1f} GiB of {capacity:.1f} GiB "
            "per node."
        ]
    needed = gib(prediction.memory_bytes)
    capacity = gib(prediction.memory_capacity_bytes)
    return [f"Predicted to run out of memory: {needed:.1f} GiB of {capacity:.1f} GiB per GPU."]


def _header(prediction: Prediction, start: Start, missing: Sequence[str]) -> list[str]:
    """Return what the script runs, what was predicted, and what the user must fill in."""
    scenario = prediction.scenario
    engine = scenario.strategy.engine.title
    of_engine = f", with the engine {engine}" if engine else ""
    to_fill_in = [_COMPLETE, *start.to_fill_in] if missing else start.to_fill_in
    return [
        f"{scenario.model.name} on {scenario.job.n_gpus} {scenario.machine.gpu.name}: "
        f"{scenario.strategy.name}, {prediction.configuration.in_words}.",
        f"Predicted: {prediction.step_seconds:.3f} s a step, "
        f"{prediction.tflops_per_gpu:.1f} TFLOP/s per GPU{of_engine}.",
        *start.remarks,
        *_router_warning(scenario),
        *memory_warning(prediction),
        "Fill in before you submit this script in its own folder:",
        *(f"- {text}" for text in to_fill_in),
    ]


def _router_warning(scenario: Scenario) -> list[str]:
    """Return a sentence about a router that has to learn first, where experts are equally busy."""
    if scenario.model.is_dense or scenario.job.expert_imbalance != 1.0:
        return []
    return [
        "Predicted for equally busy experts: a router that is not trained yet, and mock data, may "
        "keep some busier and make the step slower (--expert-imbalance predicts it)."
    ]


def _options(scenario: Scenario) -> list[list[str]]:
    """Return the options of the job, which those of the machine and the user may override."""
    tasks = scenario.ranks_on_node
    return [
        [f"--job-name={scenario.model.name}"],
        [f"--nodes={scenario.n_nodes}"],
        [f"--ntasks={scenario.job.n_gpus}"],
        [f"--ntasks-per-node={tasks}"],
        [f"--gpus-per-node={tasks}"],
        ["--exclusive"],
        ["--output=%x-%j.log"],
    ]


def _srun(scenario: Scenario) -> str:
    """Return the command that starts the ranks of the job."""
    given = [
        word for text in scenario.machine.job_script.srun for word in words(text, "option of srun")
    ]
    begun = ["srun", "--distribution=block:block", "--kill-on-bad-exit=1"]
    if "--cpus-per-task" in _option_names(given):
        return command([*begun, *given])
    # All processors of a node, which the job has for itself, are shared by its ranks.
    share = f"--cpus-per-task=$((SLURM_CPUS_ON_NODE / {scenario.ranks_on_node}))"
    return f"{command(begun)} {share} {command(given)}".rstrip()


def _program(scenario: Scenario, start: Start) -> list[str]:
    """Return the lines of the command that every rank runs."""
    first, *others = start.command
    container = scenario.machine.job_script.container
    return [command(["bash", rank.NAME, *container, *first]), *(command(line) for line in others)]


def _option_names(given: Iterable[str]) -> set[str]:
    """Return the long names of the options among words, such as ``--time`` for ``-t``."""
    names = (word.partition("=")[0] for word in given)
    return {_SHORT_NAMES.get(name, name) for name in names}
