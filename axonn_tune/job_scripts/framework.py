"""What a framework needs in order to train: files, a command, variables, and the user's help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axonn_tune.errors import InputError
from axonn_tune.io.package_data import training_program
from axonn_tune.job_scripts.settings import NAME as SETTINGS
from axonn_tune.job_scripts.settings import settings_text
from axonn_tune.spec.layout import CONTEXT, PIPELINE, TENSOR
from axonn_tune.step.prediction import Prediction

RANK_IS_PLACE = ("export RANK=$SLURM_PROCID",)
N_STEPS = 20


@dataclass(frozen=True)
class Start:
    """How one configuration is started by its framework.

    files
        Texts by the names of the files that stand next to the job script.
    command
        The lines of the command that every rank runs, each a list of words.
    to_fill_in
        What the user still has to do, in whole sentences.
    environment
        Variables of every rank that the framework, and not the machine, asks for.
    remarks
        What the user should know of the prediction, in whole sentences.
    rank_lines
        Shell lines that set RANK from the place of a process in the job.
    """

    files: Mapping[str, str]
    command: tuple[tuple[str, ...], ...]
    to_fill_in: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    rank_lines: tuple[str, ...] = RANK_IS_PLACE


@dataclass(frozen=True)
class Program:
    """A training program of this package.

    name, modules
        Its file, and those of the modules that it imports.
    engine
        Name of the engine that it runs, which is without torch.compile; empty if none has facts.
    packages
        What it needs besides torch, as the end of a sentence.
    has_stages
        Whether it trains the stages of a pipeline.
    """

    name: str
    modules: tuple[str, ...]
    engine: str
    packages: str = ""
    has_stages: bool = False


def training_start(
    prediction: Prediction, program: Program, axes: tuple[str, ...], train: str | None
) -> Start:
    """Return how a training program of this package is started.

    Parameters
    ----------
    axes : tuple of str
        The axes of the layout that the program reads.
    train : str or None
        A program of the user that is started instead.

    Raises
    ------
    InputError
        The layout splits layers or sequences, or has stages, and the program does not.
    """
    layout = prediction.layout
    lacks = {TENSOR: "splits no layers", CONTEXT: "splits no sequences"}
    if not program.has_stages:
        lacks[PIPELINE] = "puts no layers into stages"
    for axis, lack in lacks.items():
        if train is None and layout.size(axis) > 1:
            raise InputError(
                f"{program.name} {lack}, and {layout} does; allowed: --train with a program that "
                f"does, or a layout with {axis}=1"
            )
    files = {name: training_program(name) for name in (program.name, *program.modules)}
    files[SETTINGS] = settings_text(prediction, program.engine, axes)
    to_fill_in = [
        f"Activate an environment in which python finds torch (2.6 or newer){program.packages}."
    ]
    if train is not None:
        return Start(files, (("python", train),), tuple(to_fill_in))
    to_fill_in.append(
        f"{program.name} trains on random tokens; write --data FILE behind it for your own."
    )
    command = ("python", program.name, "--steps", str(N_STEPS))
    remarks = _engine_remarks(program, prediction.scenario.strategy.engine.name)
    return Start(files, (command,), tuple(to_fill_in), remarks=remarks)


def _engine_remarks(program: Program, predicted: str) -> tuple[str, ...]:
    """Say that a program does not run the engine that was predicted, if it is so."""
    if program.engine in ("", predicted):
        return ()
    return (
        f"But {program.name} runs the engine {program.engine}; "
        f"--engine {program.engine} predicts it.",
    )
