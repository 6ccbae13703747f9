"""AxoNN: a training program on AxoNN's own layers, and the ranks of other rank orders."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import RANK_IS_PLACE, Program, Start, training_start
from axonn_tune.spec.layout import AXES, LETTERS, PAPER_ORDER, PIPELINE
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.axonn.axonn4d import Axonn4D

PROGRAM = Program(
    "train_axonn.py",
    ("axonn_gpt.py", "pipeline.py", "layers.py", "training.py"),
    "axonn",
    " and axonn 0.2.0",
    has_stages=True,
)
# The axes of a layout that the program reads.
_AXES = (*AXES, PIPELINE)
# Kernels then run in the order in which they were issued, as the overlaps assume
# (Megatron-AxoNN, examples/run_axonn_perlmutter.sh).
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how AxoNN is started; its calls follow axonn/axonn.py and axonn/intra_layer/."""
    if train is None:
        _require_executed(prediction)
    program = PROGRAM
    if prediction.scenario.strategy.name != "axonn":
        program = replace(PROGRAM, engine="")  # No engine has facts of AxoNN with a pipeline.
    begun = training_start(prediction, program, _AXES, train)
    return replace(begun, environment=_ENVIRONMENT, rank_lines=rank_lines(prediction))


def _require_executed(prediction: Prediction) -> None:
    """Raise InputError if the prediction overlaps, shards or splits what the program does not."""
    strategy = prediction.scenario.strategy
    if prediction.scenario.job.overlap.grad_reduce:
        raise InputError(
            f"--overlap-grad-reduce: {PROGRAM.name} reduces gradients over data after the backward "
            "pass, as AxoNN 0.2.0 does; allowed: --train with a program that does not, or no such "
            "option"
        )
    if isinstance(strategy, Axonn4D) and strategy.sharded_optimizer:
        given = "--shard-gradients" if strategy.sharded_gradients else "--distributed-optimizer"
        raise InputError(
            f"{given}: {PROGRAM.name} keeps whole optimizer states on every replica, as AxoNN "
            "0.2.0 does; allowed: --train with a program that shards them, or neither option"
        )
    if prediction.layout.n_ranks > prod(map(prediction.layout.size, _AXES)):
        raise InputError(
            f"{PROGRAM.name} splits no sequences, nor does AxoNN 0.2.0, and {prediction.layout} "
            "does; allowed: --train with a program that does, or a layout in which no ranks share "
            "one"
        )


def rank_lines(prediction: Prediction) -> tuple[str, ...]:
    """Return shell lines that compute AxoNN's rank of each process.

    AxoNN numbers X first, then Y, Z, data. The place of a process in the order of the prediction
    gives its coordinates, and these give its rank.
    """
    order = prediction.configuration.order
    if order == PAPER_ORDER:
        return RANK_IS_PLACE
    sizes = {letter: prediction.layout.size(axis) for axis, letter in LETTERS.items()}
    return (
        f"# The prediction has rank order {order}; AxoNN numbers xyzd.",
        "place=$SLURM_PROCID",
        *(f"{axis}=$((place % {sizes[axis]})); place=$((place / {sizes[axis]}))" for axis in order),
        f"export RANK=$((x + {sizes['x']} * (y + {sizes['y']} * (z + {sizes['z']} * d))))",
    )
