"""The end of a training step, which all strategies share: norm, clipping, optimizer (AdamW)."""

from __future__ import annotations

from collections.abc import Mapping

from axonn_tune.spec import names
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES

# AdamW keeps two fp32 moments of each parameter.
MOMENT_BYTES = 2 * FP32_BYTES


def has_master_copy(job: Job) -> bool:
    """Return whether the optimizer keeps an fp32 copy of each weight, as in mixed precision."""
    return job.element_bytes < FP32_BYTES


def state_bytes(job: Job) -> float:
    """Return the bytes of one parameter's optimizer states: the moments and any master copy."""
    return MOMENT_BYTES + (FP32_BYTES if has_master_copy(job) else 0.0)


def clip_and_update(
    host: HostProgram,
    job: Job,
    owned: Array,
    gradient_bytes: float,
    norm_sums: Mapping[str, str],
    cleared: Array | None = None,
) -> None:
    """Form the norm of the gradients, clip them, and let the optimizer update the weights.

    Parameters
    ----------
    owned : array, shape (C,)
        Number of parameters whose optimizer states the rank holds.
    gradient_bytes : float
        Bytes of one element of the reduced gradients.
    norm_sums : mapping of str to str
        Groups over which the square of the norm is summed, by the name of the all-reduce.
    cleared : array, shape (C,), optional
        Number of gradient elements that the optimizer clears; by default it clears the gradients
        of the parameters whose states the rank holds.
    """
    host.memory_bound(names.GRADIENT_NORM, owned * gradient_bytes, "reduce")
    for name, group in norm_sums.items():
        host.run(name, "all_reduce", FP32_BYTES, group)
    host.memory_bound(names.GRADIENT_CLIP, 2.0 * owned * gradient_bytes, "scale")
    # The optimizer reads the gradient, reads and writes the states and writes the weight;
    # without a master copy it reads the weight too.
    weight_bytes = job.element_bytes * (1.0 if has_master_copy(job) else 2.0)
    update_bytes = gradient_bytes + 2.0 * state_bytes(job) + weight_bytes
    if cleared is None:
        nbytes = owned * (update_bytes + gradient_bytes)
    else:
        nbytes = owned * update_bytes + cleared * gradient_bytes
    host.memory_bound(names.OPTIMIZER_STEP, nbytes, "optimizer")
