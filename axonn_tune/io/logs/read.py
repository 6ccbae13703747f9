"""Turn logs of other benchmarks into the points of a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.files import read_text
from axonn_tune.io.logs.collective_log import CollectiveLog, CollectiveTiming
from axonn_tune.io.logs.gemm_csv import is_gemm_csv, parse_gemm_csv
from axonn_tune.io.logs.nccl_tests import is_nccl_tests, parse_nccl_tests
from axonn_tune.io.logs.osu import is_osu, parse_osu
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import GemmPoint, LinkPoint


@dataclass(frozen=True)
class ImportedPoints:
    """Points from logs, and a warning for every line that was left out."""

    link_points: tuple[LinkPoint, ...]
    gemm_points: tuple[GemmPoint, ...]
    warnings: tuple[str, ...]


def read_logs(
    paths: Sequence[str],
    machine: Machine,
    kind: str | None = None,
    n_ranks: int | None = None,
    ranks_per_node: int | None = None,
) -> ImportedPoints:
    """Return the points of all files.

    A collective that was timed several times gives one point, with the median and the spread.

    Parameters
    ----------
    machine : Machine
        The machine on which the logs were made.
    kind : str, optional
        The kind of collective, for a log that does not name it.
    n_ranks, ranks_per_node : int, optional
        The job's number of ranks, in all and per node, for a log that does not give them.

    Raises
    ------
    FileError
        A file is not a log of a known benchmark, or holds no timing.
    InputError
        The ranks of a log form groups that no axis of a grid can have.
    """
    seconds_of: dict[LinkPoint, list[float]] = defaultdict(list)
    gemm_points: list[GemmPoint] = []
    warnings: list[str] = []
    for path in paths:
        text = read_text(path)
        if is_gemm_csv(text):
            gemm_points += parse_gemm_csv(text, path)
            continue
        log = _parse_collective_log(text, path, kind, n_ranks)
        warnings += log.warnings
        if not log.timings:
            raise FileError(f"{path}: no whole row in it")
        for timing in log.timings:
            point = _untimed_point(timing, machine, ranks_per_node, path)
            seconds_of[point].append(timing.seconds)
    return ImportedPoints(
        tuple(_timed(point, seconds) for point, seconds in seconds_of.items()),
        tuple(gemm_points),
        tuple(warnings),
    )


def _parse_collective_log(
    text: str, path: str, kind: str | None, n_ranks: int | None
) -> CollectiveLog:
    if is_nccl_tests(text):
        return parse_nccl_tests(text, path, kind)
    if is_osu(text):
        return parse_osu(text, path, n_ranks)
    raise FileError(
        f"{path}: not a log that is known; allowed: output of nccl-tests, rccl-tests or OSU, or "
        "a CSV file with columns m, n, k and seconds"
    )


def _untimed_point(
    timing: CollectiveTiming, machine: Machine, ranks_per_node: int | None, path: str
) -> LinkPoint:
    """Return the point of a timing, with 1 second in place of its time.

    Its group of ranks is the group of an axis with the same number of ranks and nodes.
    """
    n_ranks = timing.n_ranks
    if timing.n_hosts:
        ranks_per_node = n_ranks // timing.n_hosts
    ranks_per_node = ranks_per_node or max(min(n_ranks, machine.ranks_per_node), 1)
    n_nodes = n_ranks // ranks_per_node
    if n_nodes * ranks_per_node != n_ranks or n_ranks < 2:
        raise InputError(
            f"{path}: {n_ranks} ranks with {ranks_per_node} per node; allowed: nodes with equally "
            "many, and two ranks or more"
        )
    if ranks_per_node == machine.ranks_per_node or n_nodes == 1:
        stride = 1
    elif ranks_per_node == 1:
        stride = machine.ranks_per_node
    else:
        raise InputError(
            f"{path}: {ranks_per_node} of {machine.ranks_per_node} ranks per node; allowed: one of "
            "them, or all, since groups of an axis are evenly spaced"
        )
    return LinkPoint(
        kind=timing.kind,
        stride=stride,
        size=n_ranks,
        n_rings=1,
        everywhere=n_ranks >= machine.ranks_per_node,
        nbytes=timing.nbytes,
        seconds=1.0,
    )


def _timed(point: LinkPoint, seconds: Sequence[float]) -> LinkPoint:
    """Return the point with the median of its times and their relative standard deviation."""
    middle = median(seconds)
    spread = min(stdev(seconds) / middle, 1.0) if len(seconds) > 1 else 0.0
    return replace(point, seconds=middle, spread_fraction=spread)
