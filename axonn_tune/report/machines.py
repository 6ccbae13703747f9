"""What ``machines`` shows: profiles, their differences, and collectives that they imply.

Everything is returned as text and as plain data; one profile also as a figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from axonn_tune.calibration.difference import Change, Difference
from axonn_tune.calibration.expected import Expected, groups_of
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth
from axonn_tune.cost.prices import group_seconds
from axonn_tune.report.figure import new_figure
from axonn_tune.report.learn import factors_text
from axonn_tune.report.phrases import percent, size_remark
from axonn_tune.report.records import SCHEMA_VERSION
from axonn_tune.report.table import Column, cited_table, cited_values, fitted_table_of, table
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.precision import operand_bytes, result_bytes
from axonn_tune.spec.provenance import quantities
from axonn_tune.units import counted, format_quantity, format_seconds, gib

# Message sizes of curves for a profile that holds no measured collectives.
CURVE_BYTES = 2.0 ** np.arange(10, 31, dtype=np.float64)


def machines_table(machines: Sequence[Machine]) -> str:
    """Return a table with one row per machine."""
    columns: tuple[Column[Machine], ...] = (
        ("machine", lambda machine: machine.name),
        ("GPU", lambda machine: machine.gpu.name),
        ("GiB", lambda machine: f"{gib(machine.gpu.memory_bytes.value):.0f}"),
        ("TFLOP/s", lambda machine: f"{_half_precision_peak(machine) * 1e-12:.1f}"),
        ("per node", lambda machine: machine.ranks_per_node),
        ("links in GB/s, outwards", _links_text),
    )
    return fitted_table_of(machines, columns, ("TFLOP/s", "GiB"))


def _half_precision_peak(machine: Machine) -> float:
    peaks = machine.gpu.peak_flops_per_s
    return max((peaks[dtype].value for dtype in ("bf16", "fp16") if dtype in peaks), default=0.0)


def _links_text(machine: Machine) -> str:
    return ", ".join(
        f"{link.name} {link.bandwidth_bytes_per_s.value * 1e-9:.4g}" for link in machine.links
    )


def machine_text(machine: Machine) -> str:
    """Return every number of a profile with its origin and source."""
    tiles = ", ".join(
        f"{tile.rows}x{tile.columns} at {tile.speed_fraction:g}" for tile in machine.gemm.tiles
    )
    head = cited_values(
        [
            ("machine", machine.name),
            ("description", machine.description),
            ("GPU", f"{machine.gpu.name}, {machine.gpu.n_multiprocessors} multiprocessors"),
            ("GPUs per node", str(machine.ranks_per_node)),
            ("GEMM tiles", tiles),
            ("measured GEMM points", str(len(machine.gemm.points))),
            ("measured collectives", str(len(machine.link_points))),
        ]
    )
    rows = [
        [name, format_quantity(quantity.value, name), quantity.origin, quantity.source]
        for name, quantity in quantities(machine)
    ]
    rows += [
        [
            f"links.{link.name}.{name}",
            counted(len(steps.points), "point"),
            steps.origin,
            steps.source,
        ]
        for link in machine.links
        for name, steps in link.measured_steps.items()
    ]
    return f"{head}\n\n{cited_table(rows, ['quantity', 'value', 'origin', 'source'])}"


def difference_text(
    before: Machine, after: Machine, difference: Difference, show_all: bool = False
) -> str:
    """Say what changed, the most significant first, and count what did not."""
    changes = difference.changes
    shown = changes if show_all else [*difference.significant, *difference.restated]
    parts = [f"{before.name} -> {after.name}"]
    if before.gpu.name != after.gpu.name:
        parts.append("Warning: these are different machines.")
    if shown:
        headers = ["what", "before", "after", "change %", "z", "points", ""]
        parts.append(table([_change_row(change) for change in shown], headers))
    n_significant = len(difference.significant)
    n_restated = len(difference.restated)
    n_alike = len(changes) - n_significant - n_restated
    parts.append(
        f"Significant changes: {n_significant}; changed numbers that state no spread: "
        f"{n_restated}; numbers and groups of points that are equal, or within their spread: "
        f"{n_alike}."
    )
    if difference.only_in_one:
        parts.append("Only in one of them: " + ", ".join(difference.only_in_one) + ".")
    if difference.provenance:
        rows = [[name, old, new] for name, (old, new) in difference.provenance.items()]
        parts.append(table(rows, ["measured with", "before", "after"]))
    for slow in difference.slow_ranks:
        earlier = "" if slow.before is None else f", {percent(slow.before, 0)} % before"
        parts.append(
            f"Slow: rank {slow.rank} on {slow.host} multiplies at {percent(slow.after, 0)} % of "
            f"the median rank's rate{earlier}."
        )
    if after.learned is not None and after.learned != before.learned:
        parts.append(factors_text(after))
    return "\n\n".join(parts)


def _change_row(change: Change) -> list[Any]:
    if change.n_points:
        values = [format_seconds(change.before), format_seconds(change.after)]
    else:
        values = [format_quantity(v, change.name) for v in (change.before, change.after)]
    verdict = ""
    if change.is_significant or change.is_restated:
        verdict = "worse" if change.is_worse else "better"
    return [
        change.name,
        *values,
        "-" if change.change_fraction is None else percent(change.change_fraction),
        "-" if change.z is None else f"{change.z:.1f}",
        change.n_points or "-",
        verdict,
    ]


def difference_document(before: Machine, after: Machine, difference: Difference) -> dict[str, Any]:
    """Return what ``machines diff --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "before": before.name,
        "after": after.name,
        "changes": [
            {**asdict(change), "change_fraction": change.change_fraction}
            for change in difference.changes
        ],
        "only_in_one": list(difference.only_in_one),
        "provenance": {name: list(pair) for name, pair in difference.provenance.items()},
        "slow_ranks": [asdict(slow) for slow in difference.slow_ranks],
    }


def expected_text(machine: Machine, entries: Sequence[Expected]) -> str:
    """Return size, time, algbw and busbw as nccl-tests prints them, with what was measured."""
    rows = [
        [
            e.nbytes,
            f"{1e6 * e.seconds:.1f}",
            _gb_per_s(e.algbw_bytes_per_s),
            _gb_per_s(e.busbw_bytes_per_s),
            "-" if e.measured_seconds is None else f"{1e6 * e.measured_seconds:.1f}",
            _gb_per_s(e.measured_busbw_bytes_per_s),
            "slower than the levels imply: a sick fabric?" if e.is_sick else "",
        ]
        for e in entries
    ]
    first = entries[0]
    title = (
        f"{machine.name}: {first.kind} over groups of {counted(first.size, 'rank')}, "
        f"stride {first.stride}, all groups at once"
    )
    headers = ["size B", "time us", "algbw GB/s", "busbw GB/s", "measured us", "measured busbw", ""]
    n_nodes = math.ceil(first.size * first.stride / machine.ranks_per_node)
    remark = size_remark(machine, n_nodes)
    return f"{title}\n\n{table(rows, headers)}" + (f"\n\n{remark}" if remark else "")


def _gb_per_s(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{1e-9 * bytes_per_s:.2f}"


def expected_document(machine: Machine, entries: Sequence[Expected]) -> dict[str, Any]:
    """Return what ``machines expect --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": machine.name,
        "collectives": [
            {
                **asdict(e),
                "algbw_bytes_per_s": e.algbw_bytes_per_s,
                "busbw_bytes_per_s": e.busbw_bytes_per_s,
                "measured_busbw_bytes_per_s": e.measured_busbw_bytes_per_s,
                "is_sick": e.is_sick,
            }
            for e in entries
        ],
    }


def machine_figure(machine: Machine) -> Any:
    """Draw products under the roofline, and bus bandwidth over message size."""
    figure, (left, right) = new_figure(1, 2)
    _draw_products(left, machine)
    _draw_collectives(right, machine)
    figure.suptitle(f"{machine.name}: {machine.description or machine.gpu.name}")
    return figure


def _draw_products(axes: Any, machine: Machine) -> None:
    """Draw rate over arithmetic intensity, and the roofline of each dtype that was measured."""
    dtypes = list(dict.fromkeys(p.dtype for p in machine.gemm.points))
    if not dtypes:
        dtypes = list(machine.gpu.peak_flops_per_s)
    memory_bytes_per_s = achieved_memory_bandwidth(machine)
    intensities = np.geomspace(1.0, 1e4, 200)
    for color, dtype in enumerate(dtypes):
        roof = np.minimum(machine.peak_flops_per_s(dtype), intensities * memory_bytes_per_s)
        axes.plot(intensities, roof * 1e-12, color=f"C{color}", label=f"{dtype} roofline")
        for marker, mode in zip("ov^", MODES, strict=True):
            points = [p for p in machine.gemm.points if (p.dtype, p.mode) == (dtype, mode)]
            flops = np.array([2.0 * p.m * p.n * p.k for p in points])
            read = np.array([p.m * p.k + p.k * p.n for p in points]) * operand_bytes(dtype)
            written = np.array([p.m * p.n for p in points]) * result_bytes(dtype)
            seconds = np.array([p.seconds for p in points])
            axes.plot(
                flops / (read + written),
                flops / seconds * 1e-12,
                marker,
                color=f"C{color}",
                markersize=3,
                alpha=0.6,
                label=f"{dtype} {mode}" if points else None,
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="arithmetic intensity, FLOP/byte",
        ylabel="TFLOP/s",
        title="Products",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_collectives(axes: Any, machine: Machine) -> None:
    """Draw measured bus bandwidth, and a line for what the levels of the profile imply."""
    without_points = replace(machine, link_points=())
    for color, (kind, stride, size) in enumerate(_drawn_groups(machine)):
        points = [
            p
            for p in machine.link_points
            if (p.kind, p.stride, p.size) == (kind, stride, size) and p.is_of_whole_axis
        ]
        nbytes = np.array([p.nbytes for p in points]) if points else CURVE_BYTES
        moved = float(moved_fraction(kind, size)) * nbytes
        color_name = f"C{color % 10}"
        label: str | None = f"{kind} ({stride}, {size})"
        if points:
            seconds = np.array([p.seconds for p in points])
            rate = moved / seconds * 1e-9
            axes.plot(nbytes, rate, "o", markersize=3, color=color_name, label=label)
            label = None
        law = group_seconds(without_points, kind, stride, size, nbytes)
        axes.plot(nbytes, moved / law * 1e-9, color=color_name, label=label, linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="message, bytes",
        ylabel="bus bandwidth, GB/s",
        title="Collectives (stride, size): measured, and as the levels imply",
    )
    axes.legend(fontsize="x-small", ncols=2)
    axes.grid(alpha=0.3)


def _drawn_groups(machine: Machine) -> list[tuple[str, int, int]]:
    """Return kind, stride and size of the measured groups, or of a node and of a pair of nodes."""
    measured = groups_of(machine.link_points)
    if measured:
        return measured
    two_nodes = ("all_reduce", machine.ranks_per_node, 2)
    if machine.ranks_per_node == 1:
        return [two_nodes]
    return [("all_reduce", 1, machine.ranks_per_node), two_nodes]
