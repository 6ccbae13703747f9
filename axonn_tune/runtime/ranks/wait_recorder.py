"""Record the collectives of a program whose kernels have no names, and the waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from axonn_tune.runtime.ranks.recorder import PendingCollective, Recorder
from axonn_tune.spec.measurement import COMPUTATION, Operation
from axonn_tune.spec.plan import COMPUTE


class WaitRecorder:
    """Records collectives, and the time in which computation does not wait for one.

    Torch's own code does not name its kernels. It computes whenever nothing waits for a collective,
    so this time is recorded as computation. On a CPU the host waits; on a GPU the stream that
    computes does, between two events on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._recorder = Recorder(device)
        self._on_gpu = device.type == "cuda"
        self._computing: Any = None
        self._waits: list[tuple[Any, Any]] = []
        self._begin: Any = None

    @property
    def active(self) -> bool:
        """Whether anything is recorded."""
        return self._recorder.active

    @active.setter
    def active(self, wanted: bool) -> None:
        self._recorder.active = wanted

    def start_step(self) -> None:
        """Forget what was recorded, and let times count from now."""
        self._recorder.start_step()
        self._waits.clear()
        if self._on_gpu:
            self._computing = torch.cuda.current_stream()

    def collective(
        self,
        name: str,
        kind: str,
        nbytes: float,
        axis: str,
        issue: Callable[[], PendingCollective],
    ) -> _Awaited:
        """Issue a collective and record it, and how long computation waits for it."""
        return _Awaited(self._recorder.collective(name, kind, nbytes, axis, issue), self)

    def wait(self, pending: PendingCollective) -> None:
        """Wait for a collective, and note how long that takes.

        On a GPU, streams that communicate wait as well, which does not count.
        """
        elsewhere = self._on_gpu and torch.cuda.current_stream() != self._computing
        if elsewhere or not self.active:
            pending.wait()
            return
        self.begin_wait()
        pending.wait()
        self.end_wait()

    def wait_at_once(self, pending: PendingCollective) -> None:
        """Let computation wait for a collective that another stream may have issued."""
        if not self._on_gpu:
            self.wait(pending)
            return
        with torch.cuda.stream(self._computing):
            self.wait(pending)
        pending.wait()

    def begin_wait(self) -> None:
        """Note that computation waits from here on."""
        self._begin = self._recorder.clock.now()

    def end_wait(self) -> None:
        """Note that computation goes on."""
        self._waits.append((self._begin, self._recorder.clock.now()))

    def wait_ends_backward(self, loss: torch.Tensor) -> None:
        """Have a wait begin when all gradients are computed; the caller ends it.

        FSDP2 lets computation wait for its last reductions there. It queues this while the
        gradient of the logits is computed, after that of the loss.
        """
        engine = torch.autograd.Variable._execution_engine
        loss.register_hook(lambda _: engine.queue_callback(self.begin_wait))

    def take_step(self, seconds: float) -> list[Operation]:
        """Return the collectives and the computation of a step that took `seconds`."""
        if not self.active:
            return []
        at = self._recorder.seconds_of
        waits = [(at(begin), at(end)) for begin, end in self._waits]
        operations = [*self._recorder.take_step(), *_computation(waits, seconds)]
        return sorted(operations, key=lambda operation: operation.start_seconds)


class _Awaited:
    """A collective under way, each wait for which is noted."""

    def __init__(self, pending: PendingCollective, recorder: WaitRecorder) -> None:
        self._pending = pending
        self._recorder = recorder

    def wait(self) -> None:
        """Wait for the collective."""
        self._recorder.wait(self._pending)

    def wait_at_once(self) -> None:
        """Let computation wait for the collective, whoever issued it."""
        self._recorder.wait_at_once(self._pending)


def _computation(waits: list[tuple[float, float]], seconds: float) -> list[Operation]:
    """Return the spans of a step that lie between the waits."""
    computation = []
    free_from = 0.0
    for start, end in [*sorted(waits), (seconds, seconds)]:
        if start > free_from:
            computation.append(
                Operation(COMPUTATION, COMPUTE, COMPUTATION, 0.0, 0.0, free_from, start)
            )
        free_from = max(free_from, end)
    return computation
