"""Turn logs of other benchmarks into the points of a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, stdev

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.logs.gemm_csv import is_gemm_csv, parse_gemm_csv
from axonn_tune.io.logs.nccl_tests import is_nccl_tests, parse_nccl_tests
from axonn_tune.io.logs.osu import is_osu, parse_osu
from axonn_tune.io.logs.record import Log, LogRecord
from axonn_tune.io.yaml_files import read_text
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import GemmPoint, LinkPoint


@dataclass(frozen=True)
class Imported:
    """Points from logs, and what was left out of them."""

    link_points: tuple[LinkPoint, ...]
    gemm_points: tuple[GemmPoint, ...]
    warnings: tuple[str, ...]


def read_logs(
    paths: Sequence[str],
    machine: Machine,
    kind: str | None = None,
    n_ranks: int | None = None,
    ranks_per_node: int | None = None,
) -> Imported:
    """Points of all files; the same collective several times gives a median and a spread.

    Parameters
    ----------
    machine : Machine
        On which the logs were made.
    kind, n_ranks, ranks_per_node : optional
        What logs do not tell of themselves.

    Raises
    ------
    FileError
        A file that is no such log, or that holds nothing.
    InputError
        Groups of ranks that no axis of a grid can have.
    """
    links: dict[LinkPoint, list[float]] = defaultdict(list)
    products: list[GemmPoint] = []
    warnings: list[str] = []
    for path in paths:
        text = read_text(path)
        if is_gemm_csv(text):
            products += parse_gemm_csv(text, path)
            continue
        log = _parse(text, path, kind, n_ranks)
        warnings += log.warnings
        if not log.records:
            raise FileError(f"{path}: no whole row in it")
        for record in log.records:
            links[_point(record, machine, ranks_per_node, path)].append(record.seconds)
    return Imported(
        tuple(_summarised(point, seconds) for point, seconds in links.items()),
        tuple(products),
        tuple(warnings),
    )


def _parse(text: str, path: str, kind: str | None, n_ranks: int | None) -> Log:
    if is_nccl_tests(text):
        return parse_nccl_tests(text, path, kind)
    if is_osu(text):
        return parse_osu(text, path, n_ranks)
    raise FileError(
        f"{path}: not a log that is known; allowed: output of nccl-tests, rccl-tests or OSU, or "
        "a CSV file with columns m, n, k and seconds"
    )


def _point(record: LogRecord, machine: Machine, ranks_per_node: int | None, path: str) -> LinkPoint:
    """The groups of ranks that a job of so many ranks on so many hosts is."""
    node, n_ranks = machine.ranks_per_node, record.n_ranks
    told = n_ranks // record.n_hosts if record.n_hosts else ranks_per_node
    each = told or min(n_ranks, node)
    n_hosts = n_ranks // each
    if n_hosts * each != n_ranks or n_ranks < 2:
        raise InputError(
            f"{path}: {n_ranks} ranks with {each} per node; allowed: nodes with equally many, and "
            "two ranks or more"
        )
    if each == node or n_hosts == 1:
        stride, size = 1, n_ranks
    elif each == 1:
        stride, size = node, n_ranks
    else:
        raise InputError(
            f"{path}: {each} of {node} ranks per node; allowed: one of them, or all, since groups "
            "of an axis are evenly spaced"
        )
    everywhere = n_ranks >= node
    return LinkPoint(record.kind, stride, size, 1, everywhere, record.nbytes, 1.0)


def _summarised(point: LinkPoint, seconds: Sequence[float]) -> LinkPoint:
    middle = median(seconds)
    spread = min(stdev(seconds) / middle, 1.0) if len(seconds) > 1 else 0.0
    return replace(point, seconds=middle, spread_fraction=spread)
