"""Rehearse a request: build the real trainer on fake tensors, and record one of its steps."""

from __future__ import annotations

import time

import torch

from axonn_tune.runtime.rehearsal.tape import Tape
from axonn_tune.runtime.rehearsal.world import rehearsed
from axonn_tune.runtime.request import RunRequest
from axonn_tune.runtime.run import build_trainer
from axonn_tune.spec.rehearsal import Rehearsal


def rehearse(request: RunRequest, rank: int = 0) -> Rehearsal:
    """Run two steps of a rank, and return what the second one did.

    In the first step the trainer learns in which order weights are used, and makes its buffers.

    Raises
    ------
    AxonnTuneError
        The program does not run in this configuration.
    """
    start = time.perf_counter()
    with rehearsed(request.job.n_gpus, rank) as tape:
        trainer = build_trainer(request, torch.device("cpu"))
        trainer.step(0)
        tape.begin_step()
        trainer.step(1)
        return recording(tape, request.job.n_gpus, start)


def recording(tape: Tape, n_ranks: int, start: float) -> Rehearsal:
    """Return what was recorded of a rehearsal that began at `start` (``time.perf_counter``)."""
    peak_bytes, held_bytes = tape.memory.peak()
    seconds = time.perf_counter() - start
    return Rehearsal(dict(tape.counts), peak_bytes, held_bytes, n_ranks, seconds)
