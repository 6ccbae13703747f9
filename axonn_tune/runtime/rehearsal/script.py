"""Rehearse a training script that this package has never seen."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.io.programs import load_program
from axonn_tune.runtime.rehearsal.run import recording
from axonn_tune.runtime.rehearsal.tape import Tape
from axonn_tune.runtime.rehearsal.world import rehearsed
from axonn_tune.spec.rehearsal import Rehearsal

# The function of a script that makes one training step, if it has one.
STEP = "step"
# What to do where a script asks for a GPU that this torch does not have.
_DEVICE_HINT = (
    "; a rehearsal needs no GPU, and this torch has none: let the script take its device from "
    "'cuda' if torch.cuda.is_available() else 'cpu', and call torch.cuda in the first case only"
)


def rehearse_script(path: str, n_ranks: int, arguments: Sequence[str] = ()) -> Rehearsal:
    """Run a script as rank 0 of some ranks, and return what one training step does.

    The script runs as the main program, with fake tensors. If it defines a function `step`, this
    is called twice without arguments, and the second call is recorded; otherwise the whole run is.
    The script itself finds `arguments` behind its name in ``sys.argv``.

    Raises
    ------
    AxonnTuneError
        The script cannot be read, or it fails; the message names the line.
    """
    code = load_program(path)
    start = time.perf_counter()
    with rehearsed(n_ranks) as tape, _environment(path, n_ranks, arguments):
        is_one_step = False  # unless it runs to its end
        try:
            is_one_step = _run(code, path, tape)
        except (Exception, SystemExit) as error:
            if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                raise InputError(f"{path}{_line_of(error, path)}: {_said(error)}") from error
        if not tape.counts:
            raise InputError(
                f"{path}: it launches no kernel; a script trains for one step, or defines {STEP}()"
            )
        return replace(recording(tape, n_ranks, start), is_one_step=is_one_step)


def _run(code: CodeType, path: str, tape: Tape) -> bool:
    """Run a script, and return whether one step of it was recorded alone."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": path}
    tape.begin_step()
    exec(code, namespace)
    step = namespace.get(STEP)
    if callable(step):
        step()
        tape.begin_step()
        step()
        return True
    return False


@contextmanager
def _environment(path: str, n_ranks: int, arguments: Sequence[str]) -> Iterator[None]:
    """Let a script find what torchrun gives it; the process group is there already.

    What it prints goes to stderr, and torch.compile compiles nothing.
    """
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    with (
        mock.patch.dict(os.environ, variables),
        mock.patch.object(sys, "argv", [path, *arguments]),
        mock.patch.object(sys, "path", [str(Path(path).resolve().parent), *sys.path]),
        mock.patch.object(dist, "init_process_group", _nothing),
        mock.patch.object(dist, "destroy_process_group", _nothing),
        torch._dynamo.config.patch(disable=True),
        redirect_stdout(sys.stderr),
    ):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing, where there is nothing to do in a rehearsal."""


def _line_of(error: BaseException, path: str) -> str:
    """Return the line of the script that raised an error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
    return f": line {frames[-1].lineno}" if frames else ""


def _said(error: BaseException) -> str:
    """Return the kind of an error and the first line of what it says."""
    if isinstance(error, AxonnTuneError):
        return str(error)
    said = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text + _DEVICE_HINT if "cuda" in said.lower() and not torch.cuda.is_available() else text
