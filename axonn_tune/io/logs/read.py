"""Turn logs of other benchmarks into the points of a profile."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median, stdev
from typing import TypeVar

from axonn_tune.errors import FileError, InputError, choices_hint
from axonn_tune.io.files import read_text
from axonn_tune.io.logs.collective_csv import is_collective_table, parse_collectives
from axonn_tune.io.logs.collective_log import CollectiveLog, CollectiveTiming
from axonn_tune.io.logs.gemm_csv import gemm_points, is_gemm_table
from axonn_tune.io.logs.nccl_tests import is_nccl_tests, parse_nccl_tests
from axonn_tune.io.logs.osu import is_osu, parse_osu
from axonn_tune.io.logs.table import parse_table
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import GemmPoint, LinkPoint
from axonn_tune.units import rounded

P = TypeVar("P", GemmPoint, LinkPoint)


@dataclass(frozen=True)
class LogOptions:
    """What logs do not tell of themselves.

    Parameters
    ----------
    kind : str, optional
        The kind of collective, for a log that does not name it.
    n_ranks, ranks_per_node : int, optional
        The job's number of ranks, in all and per node, for a log that does not give them.
    where : mapping
        The rows of tables to read: values by the name of their column.
    """

    kind: str | None = None
    n_ranks: int | None = None
    ranks_per_node: int | None = None
    where: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ImportedPoints:
    """Holds points from logs, and a warning for every line that was left out."""

    link_points: tuple[LinkPoint, ...]
    gemm_points: tuple[GemmPoint, ...]
    warnings: tuple[str, ...]


def read_logs(paths: Sequence[str], machine: Machine, options: LogOptions) -> ImportedPoints:
    """Return the points of all files.

    What was timed several times gives one point, with the median and the spread.

    Parameters
    ----------
    machine : Machine
        The machine on which the logs were made.

    Raises
    ------
    FileError
        A file is not a log of a known benchmark, or holds no timing.
    InputError
        The ranks of a log form groups that no axis of a grid can have, a table holds several
        machines, or no row has what `where` asks for.
    """
    seconds_of_link: dict[LinkPoint, list[float]] = defaultdict(list)
    seconds_of_gemm: dict[GemmPoint, list[float]] = defaultdict(list)
    warnings: list[str] = []
    known_columns: set[str] = set()
    for path in paths:
        with _problems_of(path):
            text = read_text(path)
            table = parse_table(text, path)
            known_columns.update(table.columns)
            if is_gemm_table(table):
                products = gemm_points(table.of_one_system(options.where))
                warnings += _too_fast(products, machine, path)
                for product in products:
                    product.check_possible()
                    seconds_of_gemm[replace(product, seconds=1.0)].append(product.seconds)
                continue
            if is_collective_table(table):
                log = parse_collectives(table.of_one_system(options.where))
            else:
                log = _parse_collective_log(text, path, options)
            warnings += log.warnings
            if not log.timings:
                raise FileError(f"{path}: {_why_unread(log)}")
            for timing in log.timings:
                point = _untimed_point(timing, machine, options.ranks_per_node, path)
                replace(point, seconds=timing.seconds).check_possible()
                seconds_of_link[point].append(timing.seconds)
    for column, value in options.where.items():
        if column not in known_columns:
            raise InputError(
                f"--where {column}={value}: no table has such a column"
                f"{choices_hint(column, sorted(known_columns))}"
            )
    return ImportedPoints(_timed(seconds_of_link), _timed(seconds_of_gemm), tuple(warnings))


def _too_fast(products: Sequence[GemmPoint], machine: Machine, path: str) -> list[str]:
    """Return a warning for each number type whose products beat the peak of the machine's GPU."""
    warnings = []
    for dtype, peak in machine.gpu.peak_flops_per_s.items():
        rates = [2.0 * p.m * p.n * p.k / p.seconds for p in products if p.dtype == dtype]
        n_too_fast = sum(rate > peak.value for rate in rates)
        if n_too_fast:
            warnings.append(
                f"{path}: {n_too_fast} of {len(rates)} products in {dtype} are faster than the "
                f"peak of {machine.gpu.name}, the fastest {max(rates) / peak.value:.3g} times as "
                "fast; check the unit of the times, and --machine"
            )
    return warnings


def _why_unread(log: CollectiveLog) -> str:
    """Say why no row of a log can be used: what is wrong with the first, or that there is none."""
    if not log.warnings:
        return "no whole row in it"
    return f"no row can be used; {log.warnings[0].removesuffix('; left out')}"


@contextmanager
def _problems_of(path: str) -> Iterator[None]:
    """Name the file in every error that its content causes, such as a number of 5,000 digits."""
    try:
        yield
    except InputError as error:
        raise InputError(_with_path(path, error)) from None
    except (ArithmeticError, ValueError, csv.Error) as error:
        raise FileError(_with_path(path, error)) from None


def _with_path(path: str, error: Exception) -> str:
    text = str(error)
    return text if path in text else f"{path}: {text}"


def _parse_collective_log(text: str, path: str, options: LogOptions) -> CollectiveLog:
    if is_nccl_tests(text):
        return parse_nccl_tests(text, path, options.kind)
    if is_osu(text):
        return parse_osu(text, path, options.n_ranks)
    raise FileError(
        f"{path}: not a log of a known format; allowed: output of nccl-tests, rccl-tests or OSU, "
        "or a CSV file with columns m, n, k and seconds, or kind, n_ranks, nbytes and seconds"
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
    if ranks_per_node > machine.ranks_per_node:
        raise InputError(
            f"{path}: {ranks_per_node} ranks per node; allowed: up to {machine.ranks_per_node}, as "
            f"many as a node of machine '{machine.name}' has"
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


def _timed(seconds_of: Mapping[P, Sequence[float]]) -> tuple[P, ...]:
    """Return the points with the median of their times and their relative standard deviation."""
    points = []
    for point, seconds in seconds_of.items():
        middle = median(seconds)
        spread = min(stdev(seconds) / middle, 1.0) if len(seconds) > 1 else 0.0
        points.append(
            replace(point, seconds=rounded(middle, 6), spread_fraction=rounded(spread, 3))
        )
    return tuple(points)
