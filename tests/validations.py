"""Validations by hand: predicted configurations with steps that nobody ran."""

import numpy as np

from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import parse_layout
from axonn_tune.spec.validation import (
    OperationTime,
    Outcome,
    Predicted,
    Validation,
)

GRIDS = ("1x1x1x8", "1x1x8x1", "1x8x1x1", "8x1x1x1", "2x2x2x1", "2x2x1x2")


def operation(name, axis, measured, predicted, measured_exposed=0.0, predicted_exposed=0.0):
    kind = "all_reduce" if axis else "gemm"
    return OperationTime(
        name, kind, axis, 1, 8.0, 0.0, measured, measured_exposed, predicted, predicted_exposed
    )


def outcome(grid, rank, predicted, steps, failure="", operations=(), memory=None):
    configuration = Configuration(parse_layout(grid), "xyzd", 1, "none")
    said = Predicted(rank, predicted, 2.0**30, 0.9 * predicted, 1.1 * predicted)
    return Outcome(configuration, said, tuple(steps), memory, tuple(operations), failure)


def validation(*outcomes):
    return Validation(
        model="tiny",
        machine="mini",
        n_ranks=8,
        global_batch=8,
        seq_len=64,
        dtype="fp32",
        attention="flash",
        overlap="OAR",
        device="CPU",
        backend="gloo",
        date="2026-11-21T00:00:00+00:00",
        command_line="axonn-tune validate",
        n_ranked=20,
        outcomes=outcomes,
    )


def noisy(seconds, spread=0.01, n=20, seed=0):
    random = np.random.default_rng(seed)
    return (seconds * np.exp(spread * random.standard_normal(n))).tolist()


THREE = validation(
    outcome("1x1x1x8", 1, 1.0, [1.0, 1.25, 1.5], memory=2.0**31),
    outcome("1x1x8x1", 2, 1.1, [1.0]),
    outcome("1x8x1x1", 3, 3.0, [2.0]),
    outcome("8x1x1x1", 4, 4.0, [], failure="rank 3 failed: out of memory"),
)
