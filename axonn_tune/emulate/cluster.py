"""Run a command on every rank of an emulated cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO

from axonn_tune.emulate import network
from axonn_tune.emulate.stale import guard
from axonn_tune.errors import AxonnTuneError
from axonn_tune.spec.cluster import Cluster

MASTER_PORT = 29400
POLL_SECONDS = 0.05
# When one rank has failed, the others get this long to notice it and to end by themselves.
GRACE_SECONDS = 10.0
# The last lines that a silent rank wrote are kept.
LINES_KEPT = 20
# These signals end this process as Ctrl-C does.
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class EmulatedCluster:
    """A cluster that exists while the context lasts.

    However this process ends, its namespaces are removed and what runs in them is killed.

    Examples
    --------
    >>> from axonn_tune.emulate.cluster import EmulatedCluster
    >>> from axonn_tune.io.presets import load_cluster
    >>> with EmulatedCluster(load_cluster("frontier-mini")) as cluster:  # doctest: +SKIP
    ...     cluster.run(["axonn-tune", "calibrate", "--output", "mini.yaml"])
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._prefix = network.own_prefix()
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmulatedCluster:
        network.check_ability()
        self._guard = guard(network.all_namespaces(self.cluster, self._prefix))
        try:
            network.build(self.cluster, self._prefix)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Tear the cluster down."""
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None

    def namespace(self, rank: int) -> str:
        """Return the network namespace of a rank, for ``ip netns exec``."""
        return network.rank_namespace(self._prefix, rank)

    def environment(self, rank: int) -> dict[str, str]:
        """Return the variables that torchrun would set for a rank, for torch and gloo."""
        n_local = self.cluster.ranks_per_node
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.cluster.n_ranks),
            "LOCAL_RANK": str(rank % n_local),
            "LOCAL_WORLD_SIZE": str(n_local),
            "GROUP_RANK": str(rank // n_local),
            "MASTER_ADDR": network.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": network.INTERFACE,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # the ranks' addresses have no names
        }

    def run(self, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
        """Run a command on every rank and show the output of rank 0.

        If another rank fails first, its last lines are shown, too.

        Returns
        -------
        The exit code of the first rank that failed, 0 if none did.

        Raises
        ------
        AxonnTuneError
            The command cannot be started, or a signal ended a rank.
        """
        ranks: list[_Rank] = []
        with _noted_signals() as noted:
            try:
                for rank in range(self.cluster.n_ranks):
                    variables = {**environment, **self.environment(rank)}
                    ranks.append(_Rank(rank, self.namespace(rank), command, variables))
                failed = _first_failure(ranks, noted)
            finally:
                for started in ranks:
                    started.kill()
        return 0 if failed is None else failed.report()


class _Rank:
    """The process of one rank."""

    def __init__(
        self, rank: int, namespace: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.rank = rank
        is_shown = rank == 0
        try:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=None if is_shown else subprocess.DEVNULL,
                stderr=None if is_shown else subprocess.PIPE,
            )
        except OSError as error:
            raise AxonnTuneError(f"{command[0]} cannot be started: {error.strerror}") from None
        self._last_lines: deque[bytes] = deque(maxlen=LINES_KEPT)
        self._reader: threading.Thread | None = None
        if self.process.stderr is not None:
            self._reader = threading.Thread(
                target=self._keep_last_lines, args=(self.process.stderr,), daemon=True
            )
            self._reader.start()

    def _keep_last_lines(self, stream: IO[bytes]) -> None:
        with stream:
            self._last_lines.extend(stream)

    def kill(self) -> None:
        """End the process, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def report(self) -> int:
        """Print the last lines that the rank wrote; return its exit code.

        Raises
        ------
        AxonnTuneError
            A signal ended the rank.
        """
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        for line in self._last_lines:
            text = line.decode(errors="replace").rstrip()
            print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        code = self.process.returncode
        if code < 0:
            raise AxonnTuneError(f"rank {self.rank} was ended by {signal.Signals(-code).name}")
        return code


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Let the signals that raise KeyboardInterrupt be noted in a list instead.

    An exception inside `Popen.poll` would leave the lock there taken, and `Popen.wait` would wait
    for it for ever.
    """
    noted: list[int] = []
    raising = [number for number in (signal.SIGINT, *_ENDING_SIGNALS) if _raises(number)]
    before = {number: signal.signal(number, lambda n, _: noted.append(n)) for number in raising}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raises(number: int) -> bool:
    """Return whether Python code handles a signal; only the main thread can change that."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and callable(signal.getsignal(number))


def _first_failure(ranks: Sequence[_Rank], noted: Sequence[int]) -> _Rank | None:
    """Wait for all ranks, but not long after one has failed; return the first that failed.

    Raises
    ------
    KeyboardInterrupt
        A signal was noted.
    """
    failed: _Rank | None = None
    deadline = float("inf")
    while time.monotonic() < deadline:
        if noted:
            raise KeyboardInterrupt
        codes = [rank.process.poll() for rank in ranks]
        if failed is None:
            failed = next((rank for rank, code in zip(ranks, codes, strict=True) if code), None)
            if failed is not None:
                deadline = time.monotonic() + GRACE_SECONDS
        if None not in codes:
            break
        time.sleep(POLL_SECONDS)
    return failed


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that clusters are torn down."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
