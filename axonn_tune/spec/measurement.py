"""A measured training run: what the runtime records, under the names of the step plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import ClassVar

from axonn_tune.spec.layout import Layout
from axonn_tune.spec.plan import COMPUTE

WARM_UP_STEPS = 2  # the papers time the last eight of ten


@dataclass(frozen=True)
class Operation:
    """One operation as it ran on one rank.

    name
        Name of the operation in the step plan.
    stream
        ``"compute"``, or the axis of a collective.
    kind
        ``gemm``, ``attention``, ``memory_bound``, or the kind of collective.
    nbytes
        Bytes that it moved.
    flops
        FLOPs that it computed.
    start_seconds, end_seconds
        Times since the start of the step.
    """

    name: str
    stream: str
    kind: str
    nbytes: float
    flops: float
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """The duration of the operation."""
        return self.end_seconds - self.start_seconds


# The name of everything that is not a recorded collective, where kernels are not distinguished.
COMPUTATION = "computation"
# The name of what the compute stream waits for when no collective is under way.
HOST = "host"


def exposed_seconds(operations: Sequence[Operation], step_seconds: float) -> dict[str, float]:
    """Return how long the compute stream stood still for each collective, by its name.

    A standstill is charged to the collective that ended last in it, for as long as that
    collective ran in it, then to the collective that ended last before the first one began, and
    so on. What remains is charged to the host, under `HOST`. Together with the kernels these
    times make up the step.
    """
    kernels = sorted(
        (op for op in operations if op.stream == COMPUTE), key=lambda op: op.start_seconds
    )
    collectives = sorted(
        (op for op in operations if op.stream != COMPUTE), key=lambda op: op.end_seconds
    )
    exposed: dict[str, float] = defaultdict(float)
    idle_from = 0.0
    busy = [*((k.start_seconds, k.end_seconds) for k in kernels), (step_seconds, step_seconds)]
    for kernel_start, kernel_end in busy:
        if kernel_start > idle_from:
            ended = [op for op in collectives if idle_from < op.end_seconds <= kernel_start]
            _charge(exposed, ended, idle_from, kernel_start)
        idle_from = max(idle_from, kernel_end)
    return dict(exposed)


def _charge(
    exposed: dict[str, float], ended: list[Operation], idle_from: float, idle_until: float
) -> None:
    """Charge one standstill, in place, to the collectives that ended in it, sorted by end."""
    while idle_until > idle_from:
        while ended and ended[-1].end_seconds > idle_until:
            ended.pop()
        held_until = ended[-1].end_seconds if ended else idle_from
        exposed[HOST] += idle_until - held_until
        if not ended:
            return
        operation = ended.pop()
        idle_until = min(max(operation.start_seconds, idle_from), held_until)
        exposed[operation.name] += held_until - idle_until


@dataclass(frozen=True)
class Step:
    """One training step that ran.

    seconds
        Duration of the step.
    loss
        Loss of the global batch.
    gradient_norm
        Norm of all gradients.
    operation_seconds
        Time of each operation, by name, summed over the step.
    exposed_seconds
        Standstills of the compute stream by cause, as the function `exposed_seconds` finds them.
    """

    seconds: float
    loss: float
    gradient_norm: float
    operation_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Measurement:
    """A run of some training steps with one configuration.

    layout, order, micro_batch, recompute
        Configuration that was run.
    steps
        All steps, the warm-up first.
    last_step
        Operations of the last step on rank 0, in the order of issue.
    peak_memory_bytes
        Peak memory of the rank that used most, in the timed steps.
    memory_is_of_process
        Whether the memory of the whole process was counted, because the device counts none.
    gemm_modes
        Mode that kernel tuning chose for each product.
    device_name
        Name of the GPU.
    backend
        Name of the communication backend.
    software
        Versions by name.
    first_peak_memory_bytes
        The same peak from the building of the model on; None in old files.
    recorded_step
        A further step, which was recorded; None where the timed steps were.
    held_memory_bytes
        Most memory that torch's allocator held on a GPU, with what fragmentation took; None on a
        CPU.
    """

    # Files name the layout by its oldest form.
    FILE_KEYS: ClassVar[Mapping[str, str]] = {"layout": "grid"}

    layout: Layout
    order: str
    micro_batch: int
    recompute: str
    steps: tuple[Step, ...]
    last_step: tuple[Operation, ...]
    peak_memory_bytes: float
    memory_is_of_process: bool
    gemm_modes: Mapping[str, str]
    device_name: str
    backend: str
    software: Mapping[str, str]
    first_peak_memory_bytes: float | None = None
    held_memory_bytes: float | None = None
    recorded_step: Step | None = None

    @property
    def timed_steps(self) -> tuple[Step, ...]:
        """The steps after the warm-up, or all steps of a run that is no longer than the warm-up."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @property
    def recorded_steps(self) -> tuple[Step, ...]:
        """The steps of which each operation was recorded: a further one, or the timed steps."""
        return self.timed_steps if self.recorded_step is None else (self.recorded_step,)

    @property
    def mean_step_seconds(self) -> float:
        """The mean time of the timed steps."""
        return fmean(step.seconds for step in self.timed_steps)

    @property
    def median_step_seconds(self) -> float:
        """The median time of the timed steps."""
        return median(step.seconds for step in self.timed_steps)

    @property
    def operation_seconds(self) -> dict[str, float]:
        """The median over the recorded steps of each operation's seconds in a step."""
        return _medians([step.operation_seconds for step in self.recorded_steps])

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """The median over the recorded steps of the standstill by cause, in seconds."""
        return _medians([step.exposed_seconds for step in self.recorded_steps])


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each name's seconds, which are zero in a step without the name."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: median(step.get(name, 0.0) for step in steps) for name in names}
