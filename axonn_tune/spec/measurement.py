"""What the runtime records, in the names of the step plan."""

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

    stream: ``"compute"``, or the grid axis of a collective. kind: gemm, attention,
    memory_bound, or the kind of collective. Seconds count from the start of the step.
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
        """Duration."""
        return self.end_seconds - self.start_seconds


# All that is not a recorded collective, where kernels are not told apart.
COMPUTATION = "computation"
HOST = "host"  # what the compute stream waits for when no collective is under way


def exposed_seconds(operations: Sequence[Operation], step_seconds: float) -> dict[str, float]:
    """For what the compute stream stood still, by name of the collective, and how long.

    A standstill is charged to the collective that ended last in it, as far as that ran
    meanwhile, then to the one that ended last before that one began, and so on; what remains
    is the host's, under `HOST`. With the kernels these make up the step.
    """
    kernels = sorted((op for op in operations if op.stream == COMPUTE), key=_start)
    collectives = sorted((op for op in operations if op.stream != COMPUTE), key=_end)
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


def _start(operation: Operation) -> float:
    return operation.start_seconds


def _end(operation: Operation) -> float:
    return operation.end_seconds


@dataclass(frozen=True)
class Step:
    """One training step.

    operation_seconds: by name, summed over the step. exposed_seconds: as the function tells.
    """

    seconds: float
    loss: float
    gradient_norm: float
    operation_seconds: Mapping[str, float]
    exposed_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Measurement:
    """A run of some training steps with one configuration.

    Attributes
    ----------
    layout, order, micro_batch, recompute : what was run
    steps : every step, the warm-up first
    last_step : the operations of the last step in the order of issue, on rank 0
    peak_memory_bytes : of the rank that used most
    memory_is_of_process : True where no device counts memory and the whole process does
    gemm_modes : mode that kernel tuning chose, by product
    software : versions by name
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

    @property
    def timed_steps(self) -> tuple[Step, ...]:
        """All but the warm-up; all of a run that is no longer than it."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @property
    def mean_step_seconds(self) -> float:
        """Mean of the timed steps."""
        return fmean(step.seconds for step in self.timed_steps)

    @property
    def median_step_seconds(self) -> float:
        """Median of the timed steps."""
        return median(step.seconds for step in self.timed_steps)

    @property
    def operation_seconds(self) -> dict[str, float]:
        """Median over the timed steps of each operation's seconds in a step."""
        return _medians([step.operation_seconds for step in self.timed_steps])

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """Median over the timed steps of how long a step stood still for each."""
        return _medians([step.exposed_seconds for step in self.timed_steps])


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: median(step.get(name, 0.0) for step in steps) for name in names}
