"""The errors of searches in which nothing fits: what is missing, and what would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.candidates import (
    executions,
    legal_layouts,
    nearest_counts,
    with_micro_batches,
)
from axonn_tune.search.search import Search
from axonn_tune.spec.job import Job
from axonn_tune.step.memory import (
    fits_in_memory,
    memory_bytes,
)
from axonn_tune.units import gib

LARGEST_GPU_COUNT = 2**22
# If a model does not fit, numbers of GPUs that differ by at most this fraction are tried first.
NEAR_FRACTION = 0.1
# If there are many such numbers, only the multiples of a power of two are tried. It is the largest
# power that divides the number of GPUs and leaves at least this many numbers on each side.
LEAST_NEAR_COUNTS = 32


def nothing_fits(search: Search, least_bytes: float, may_fit: bool) -> NoCandidateError:
    """Return an error that says how much memory is needed and how many GPUs suffice.

    `may_fit` says whether some configuration nearly fits.
    """
    scenario = search.scenario
    capacity = scenario.memory_capacity_bytes
    message = (
        f"model '{scenario.model.name}' fits on no grid of {scenario.job.n_gpus} "
        f"{scenario.machine.gpu.name}{_with_micro_batch(search)}: the smallest needs "
        f"{gib(least_bytes):.1f} GiB per GPU, which has {gib(capacity):.1f} GiB"
    )
    if may_fit:
        message += ", which may fit: explain says which --memory-margin accepts it"
    return NoCandidateError(message + _offload_hint(search) + _gpus_hint(search))


def nothing_fits_in_host(search: Search, least_host_bytes: float) -> NoCandidateError:
    """Return an error that says how much memory of the host is needed, and on how many GPUs."""
    scenario = search.scenario
    return NoCandidateError(
        f"model '{scenario.model.name}' fits on no grid of {scenario.job.n_gpus} "
        f"{scenario.machine.gpu.name}{_with_micro_batch(search)} with "
        f"{_offload_options(scenario.job)}: the smallest needs {gib(least_host_bytes):.1f} GiB of "
        f"the {gib(scenario.host_memory_capacity_bytes):.1f} GiB of a node's host"
        f"{_gpus_hint(search)}"
    )


def _offload_options(job: Job) -> str:
    """Return the options that fill the host's memory."""
    modules = f"--offload-modules {job.offload_modules}" if job.offload_modules else ""
    optimizer = f"--offload {job.offload}" if job.offloads_optimizer else ""
    return " ".join(filter(None, (optimizer, modules)))


def _offload_hint(search: Search) -> str:
    """Return a phrase that says so if the model fits once optimizer states are offloaded."""
    scenario = search.scenario
    can_offload = scenario.strategy.engine.offload and scenario.machine.host
    if scenario.job.offloads_optimizer or not can_offload:
        return ""
    try:
        job = replace(scenario.job, offload="optimizer")
    except InputError:  # The job has something that no engine offloads with.
        return ""
    offloading = replace(search, scenario=replace(scenario, job=job))
    return "; with --offload optimizer it fits" if _something_fits(offloading) else ""


def _gpus_hint(search: Search) -> str:
    """Return a phrase that says on how many GPUs the model fits."""

    def fits(n_gpus: int) -> bool:
        return _something_fits(search.on_gpus(n_gpus))

    n_gpus = search.scenario.job.n_gpus
    farthest = int(NEAR_FRACTION * n_gpus)
    near = nearest_counts(n_gpus, fits, farthest, near_step(n_gpus, farthest))
    if near:
        return f"; it fits on {' or '.join(map(str, near))} GPUs"
    enough = next(filter(fits, _larger_powers_of_two(n_gpus)), None)
    if enough is None:
        return "; no larger number of GPUs that was tried is enough"
    return f"; it fits from {enough} GPUs"


def near_step(n_gpus: int, farthest: int) -> int:
    """Return the largest power of two that divides a number and has enough multiples near it."""
    step = n_gpus & -n_gpus
    while step > 1 and step * LEAST_NEAR_COUNTS > farthest:
        step //= 2
    return step


def _larger_powers_of_two(n_gpus: int) -> Iterator[int]:
    """Yield the powers of two above a count, as far as counts are searched."""
    power = 1 << n_gpus.bit_length()
    while power <= LARGEST_GPU_COUNT:
        yield power
        power *= 2


def _something_fits(search: Search) -> bool:
    """Return whether some candidate fits.

    A recomputation of a part of the layers is not tried: that of all layers takes less memory.
    """
    table, _ = with_micro_batches(search, legal_layouts(search)[0])
    return any(
        fits_in_memory(search.scenario, part, memory_bytes(search.scenario, part)[0]).any()
        for part in executions(search, table)
    )


def _with_micro_batch(search: Search) -> str:
    """Return a phrase that names the micro-batch, if the user has fixed it."""
    wanted = search.constraints.micro_batch
    return "" if wanted is None else f" with micro-batch {wanted}"
