"""The host program of one rank, recorded as operations that name what they wait for.

The host issues work in order. A collective starts after all computation that was issued before it
(as in torch's process groups) and runs while the host issues more; ``wait`` makes the computation
that follows wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.spec.plan import (
    COMPUTE,
    Collective,
    Compute,
    Gemm,
    HostCopy,
    HostKernel,
    HostWork,
    MemoryBound,
    Operation,
    Phase,
    Size,
)


class HostProgram:
    """A recorder of the operations of one phase."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._awaited: tuple[str, ...] = ()

    def gemm(
        self, name: str, m: Size, n: Size, k: Size, mode: str, number_format: str = ""
    ) -> None:
        """Launch an (m x k) times (k x n) product; every kernel follows the kernels before it."""
        awaited = self._take_awaited()
        self._operations.append(Gemm(name, m, n, k, mode, awaited, number_format))

    def launch(self, operation: Compute) -> None:
        """Launch a given operation, which waits for what has been awaited since the last one."""
        awaited = self._take_awaited()
        self._operations.append(replace(operation, waits_for=awaited) if awaited else operation)

    def memory_bound(
        self,
        name: str,
        nbytes: Size,
        kernel: str,
        n_launches: Size = 1.0,
        strided_bytes: Size = 0.0,
        n_issues: Size | None = None,
    ) -> None:
        """Launch a kernel, one of `MEMORY_KERNELS`, that reads and writes `nbytes` in all.

        The bytes may be shared by several launches of it, and some may be `strided_bytes`. The host
        may issue these launches as `n_issues` operations.
        """
        awaited = self._take_awaited()
        kernels = MemoryBound(name, nbytes, kernel, awaited, n_launches, strided_bytes, n_issues)
        self._operations.append(kernels)

    def idle(self, name: str, seconds: Size) -> None:
        """Let the device stand still while the host works."""
        self._operations.append(HostWork(name, seconds, self._take_awaited()))

    def host_kernel(self, name: str, nbytes: Size) -> None:
        """Let the host's cores read and write `nbytes` of its memory, while the device waits."""
        self._operations.append(HostKernel(name, nbytes, self._take_awaited()))

    def copy(self, name: str, nbytes: Size, direction: str, after: tuple[str, ...] = ()) -> None:
        """Start a copy between GPU and host, which waits for the messages named in `after`, too."""
        waits_for = (COMPUTE, *self._awaited, *after)
        self._operations.append(HostCopy(name, nbytes, direction, waits_for))

    def issue(
        self,
        name: str,
        kind: str,
        nbytes: Size,
        axis: str,
        n_calls: Size = 1.0,
        after: tuple[str, ...] = (),
    ) -> None:
        """Start a collective, which runs next to the computation that is issued after it.

        It waits for the collectives named in `after`, without holding computation up. Nothing is
        issued where `axis` is empty, since nothing is split then.
        """
        if not axis:
            return
        waits_for = (COMPUTE, *self._awaited, *after)
        self._operations.append(Collective(name, kind, nbytes, axis, n_calls, waits_for))

    def wait(self, name: str) -> None:
        """Let the next kernel wait for the latest collective or copy of that name."""
        self._awaited = (*self._awaited, name)

    def run(self, name: str, kind: str, nbytes: Size, axis: str, n_calls: Size = 1.0) -> None:
        """Issue a collective and wait for it; do nothing where `axis` is empty."""
        if axis:
            self.issue(name, kind, nbytes, axis, n_calls)
            self.wait(name)

    def phase(self, name: str, repeats: int = 1) -> Phase:
        """Return the recorded operations as a phase; a kernel must have followed every wait."""
        assert not self._awaited, f"phase {name} ends before it has waited for {self._awaited}"
        return Phase(name, tuple(self._operations), repeats)

    def _take_awaited(self) -> tuple[str, ...]:
        """Return the names that the next kernel waits for, and forget them."""
        awaited = self._awaited
        self._awaited = ()
        return awaited
