"""The end of a training step, which all strategies share: norm, clipping, optimizer.

The optimizer is AdamW, or AdEMAMix (Pagliardini et al., arXiv 2409.03137), which keeps a third
moment; `muon` has what Muon does to matrices.

Offloaded optimizer states are in the host's memory, with fp32 weights and fp32 gradients, and the
host's cores run the optimizer (Ren et al., arXiv 2101.06840).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from axonn_tune.spec import names
from axonn_tune.spec.engine import HOST_COPIES, OffloadProgram
from axonn_tune.spec.job import ADEMAMIX, MOMENT_BYTES, Job
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Array, Size
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES

# AdamW keeps two moments of each parameter, by default in fp32.
N_MOMENTS = 2
# What the host reads and writes of each parameter that it updates: the weight and its moments.
HOST_STATE_BYTES = (1 + N_MOMENTS) * FP32_BYTES


# AdEMAMix keeps a slow mean of gradients, too. It has no common kernel: torch's kernels of one
# operation each read and write 148 bytes of a parameter in fp32 (swiss-ai/Megatron-LM at 81d44dbe,
# core/optimizer/ademamix.py), where one kernel would read the gradient, and read and write three
# moments and the weight (36 bytes).
_ADEMAMIX_MOMENTS = 3
_ADEMAMIX_BYTES = 148.0


class States(NamedTuple):
    """What an optimizer keeps of each parameter.

    moment_bytes
        Bytes of each of the moments.
    master_bytes
        Bytes of a master weight: 4 where all of it is kept in fp32, 2 where only the part is kept
        that the weight in bf16 lacks, and 0 where there is none.
    has_copies
        Whether the model's weights are other tensors, which the optimizer writes, too.
    n_moments
        Number of moments.
    passed_bytes
        Bytes that kernels read and write of a parameter where no common kernel updates it, beyond
        those of a common one.
    """

    moment_bytes: float
    master_bytes: float
    has_copies: bool = True
    n_moments: int = N_MOMENTS
    passed_bytes: float = 0.0

    @property
    def nbytes(self) -> float:
        """The bytes of one parameter's moments and of its master weight."""
        return self.moments_bytes + self.master_bytes

    @property
    def moments_bytes(self) -> float:
        """The bytes of one parameter's moments."""
        return self.n_moments * self.moment_bytes

    @property
    def are_mixed(self) -> bool:
        """Whether these are states of mixed precision: a master weight and moments in fp32."""
        return self.moment_bytes == self.master_bytes == FP32_BYTES and self.has_copies


def has_master_copy(job: Job) -> bool:
    """Return whether the optimizer keeps an fp32 copy of each weight, as in mixed precision."""
    return job.element_bytes < FP32_BYTES


def states_of(job: Job, low_states: bool = False, has_copies: bool = True) -> States:
    """Return what the optimizer keeps of each parameter.

    With `low_states` (see `Engine`) it has no master copy, and moments of the type of the weights.
    Without copies (see `States`) the weights themselves are in fp32.
    """
    if not (low_states or has_copies):
        return States(MOMENT_BYTES[job.moments], FP32_BYTES, has_copies=False)
    if low_states:
        return States(job.element_bytes, 0.0)
    states = States(MOMENT_BYTES[job.moments], FP32_BYTES if has_master_copy(job) else 0.0)
    return _of_ademamix(states) if job.optimizer == ADEMAMIX else states


def _of_ademamix(states: States) -> States:
    """Return what AdEMAMix keeps where AdamW would keep `states`."""
    of_one_kernel = FP32_BYTES * (1.0 + 2.0 * (_ADEMAMIX_MOMENTS + 1.0))
    return states._replace(
        n_moments=_ADEMAMIX_MOMENTS,
        passed_bytes=_ADEMAMIX_BYTES - of_one_kernel,
    )


def sharded_text(states: bool, gradients: bool) -> str:
    """Return what is sharded, in words; where gradients are sharded, states are, too."""
    if gradients:
        return "optimizer states and gradients"
    return "optimizer states" if states else ""


def host_copies(job: Job, offload: OffloadProgram | None, owned: Array) -> dict[str, Array]:
    """Return what offload adds to the memory of a rank, as a term; nothing without offload.

    The host holds the fp32 gradients that the optimizer reads, and fp32 weights where the optimizer
    has no master copy on the GPU. Where weights and gradients themselves are kept in the host's
    memory, no copies are needed.
    """
    if offload is None:
        return {}
    n_copies = 0.0 if offload.weights else 1.0 if has_master_copy(job) else 2.0
    return {HOST_COPIES: owned * (n_copies * FP32_BYTES)}


class Gradients(NamedTuple):
    """What a rank has of the reduced gradients when a step ends; numbers have the shape (C,).

    owned
        Number of parameters whose optimizer states the rank holds.
    clipped
        Number of elements whose norm the GPU forms, and which it clips.
    cleared
        Number of elements that are cleared for the next step.
    element_bytes
        Bytes of one element.
    """

    owned: Array
    clipped: Array
    cleared: Array
    element_bytes: float

    @property
    def cleared_bytes(self) -> Array:
        """The bytes that are cleared for the next step."""
        return self.element_bytes * self.cleared


class Optimizer(NamedTuple):
    """What an optimizer keeps, and how it clips gradients and updates weights.

    states
        What it keeps of each parameter on the GPU.
    offload
        How the states are offloaded, if they are.
    clips
        Whether the kernel that updates weights on the GPU clips the gradient as it reads it.
    has_main_gradients
        Whether an optimizer on the GPU with fp32 states has fp32 gradients of its own, too, and
        other kernels copy gradients to it and weights from it.
    n_tensors
        Number of tensors that each have kernels of their own for norm, clipping and update, shape
        (C,) or a number.
    n_pieces
        Number of the rank's pieces of tensors, which an optimizer without a common kernel updates
        one by one, shape (C,) or a number.
    """

    states: States
    offload: OffloadProgram | None = None
    clips: bool = False
    has_main_gradients: bool = False
    n_tensors: Size = 1.0
    n_pieces: Size = 1.0

    @property
    def forms_main_gradients(self) -> bool:
        """Whether gradients are copied to fp32 gradients of the optimizer's own."""
        return self.has_main_gradients and self.offload is None and self.states.are_mixed


def clip_and_update(
    host: HostProgram,
    job: Job,
    gradients: Gradients,
    norm_sums: Mapping[str, str],
    optimizer: Optimizer,
) -> tuple[str, ...]:
    """Form the norm of the gradients, clip them, and let the optimizer update the weights.

    Parameters
    ----------
    norm_sums : mapping of str to str
        Groups over which the square of the norm is summed, by the name of the all-reduce.

    Returns
    -------
    tuple of str
        Names of the copies that end before the updated weights can be gathered.
    """
    cleared_bytes = gradients.cleared_bytes
    if optimizer.forms_main_gradients:
        _form_main_gradients(host, job, gradients)
        gradients = gradients._replace(element_bytes=FP32_BYTES)
    _clip(host, gradients, norm_sums, optimizer)
    if optimizer.offload is not None:
        return _update_on_host(host, job, gradients.owned, cleared_bytes, optimizer.offload)
    _update_on_gpu(host, job, gradients, cleared_bytes, optimizer)
    return ()


def _clip(
    host: HostProgram, gradients: Gradients, norm_sums: Mapping[str, str], optimizer: Optimizer
) -> None:
    """Form the norm of the gradients and scale them, on the host where it has the gradients."""
    offload = optimizer.offload
    clipped_bytes = gradients.clipped * gradients.element_bytes
    if offload is not None and offload.weights:
        host.host_kernel(names.GRADIENT_NORM, gradients.owned * FP32_BYTES)
    else:
        host.memory_bound(names.GRADIENT_NORM, clipped_bytes, "reduce", optimizer.n_tensors)
    for name, group in norm_sums.items():
        host.run(name, "all_reduce", FP32_BYTES, group)
    if offload is not None and offload.gradients:
        host.host_kernel(names.GRADIENT_CLIP, 2.0 * gradients.owned * FP32_BYTES)
    elif offload is not None or not optimizer.clips:
        host.memory_bound(names.GRADIENT_CLIP, 2.0 * clipped_bytes, "scale", optimizer.n_tensors)


def _update_on_gpu(
    host: HostProgram, job: Job, gradients: Gradients, cleared_bytes: Array, optimizer: Optimizer
) -> None:
    """Update the states and the weights, and clear the gradients.

    The optimizer reads the gradient, reads and writes the states and writes the weight; without a
    whole master copy it reads the weight too, and where it clips it writes the gradient.
    """
    states, is_main = optimizer.states, optimizer.forms_main_gradients
    weight_bytes = job.element_bytes * (1.0 if states.master_bytes == FP32_BYTES else 2.0)
    if not states.has_copies:
        weight_bytes = 0.0
    update_bytes = gradients.element_bytes * (2.0 if optimizer.clips else 1.0)
    update_bytes += 2.0 * states.nbytes + (0.0 if is_main else weight_bytes) + states.passed_bytes
    nbytes = gradients.owned * update_bytes + cleared_bytes
    n_launches = optimizer.n_pieces if states.passed_bytes else optimizer.n_tensors
    host.memory_bound(names.OPTIMIZER_STEP, nbytes, "optimizer", n_launches)
    if is_main:
        main_bytes = gradients.owned * (FP32_BYTES + weight_bytes)
        host.memory_bound(names.WEIGHTS_MAIN, main_bytes, "copy")


def _form_main_gradients(host: HostProgram, job: Job, gradients: Gradients) -> None:
    """Copy gradients to those of the optimizer unless they are in fp32; in fp16 undo their scale.

    The kernel that undoes the scale also looks for what is no number.
    """
    if gradients.element_bytes < FP32_BYTES:
        copied_bytes = gradients.owned * (gradients.element_bytes + FP32_BYTES)
        host.memory_bound(names.GRADIENT_MAIN, copied_bytes, "cast")
    if job.dtype == "fp16":
        host.memory_bound(names.GRADIENT_UNSCALE, gradients.owned * 2.0 * FP32_BYTES, "scale")


def _update_on_host(
    host: HostProgram, job: Job, owned: Array, cleared_bytes: Array, offload: OffloadProgram
) -> tuple[str, ...]:
    """Copy the gradients to the host, update the weights there, and copy them back.

    Gradients and weights that live in the host's memory are not copied. The optimizer reads the
    gradient, and reads and writes the states; if there is another copy of the weight, it writes
    that one too.
    """
    if not offload.gradients:
        host.copy(names.GRADIENT_TO_HOST, owned * FP32_BYTES, TO_HOST)
        host.wait(names.GRADIENT_TO_HOST)
    weight_bytes = 0.0 if offload.weights else job.element_bytes
    update_bytes = FP32_BYTES + 2.0 * HOST_STATE_BYTES + weight_bytes
    host.host_kernel(names.OPTIMIZER_STEP, owned * update_bytes)
    if not offload.gradients:
        host.memory_bound(names.GRADIENT_CLEAR, cleared_bytes, "scale")
    if offload.weights:
        return ()
    host.copy(names.WEIGHTS_FROM_HOST, owned * job.element_bytes, FROM_HOST)
    return (names.WEIGHTS_FROM_HOST,)
