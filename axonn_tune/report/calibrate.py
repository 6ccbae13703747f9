"""What ``calibrate`` and ``machines show`` say of a calibration: topology, rates, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axonn_tune.calibration.expected import Expected, expected, groups_of
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth
from axonn_tune.report.phrases import percent
from axonn_tune.report.table import key_values, table
from axonn_tune.spec.links import LinkLevel
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.precision import BYTES_PER_ELEMENT
from axonn_tune.units import counted, format_quantity, format_seconds

# Number of measured products that are shown, from small to large.
SHOWN_PRODUCTS = 12
# A rank that multiplies at less than this share of the median rank's rate is named.
SLOW_FRACTION = 0.95
BAR = "########################"


def calibration_text(machine: Machine) -> str:
    """Return what a reader of a calibration wants to see first; nothing for other profiles."""
    calibration = machine.calibration
    if calibration is None:
        return ""
    software = ", ".join(f"{name} {version}" for name, version in calibration.software.items())
    parts = [
        key_values(
            [
                ("measured", f"{calibration.date}, {calibration.seconds:.0f} s"),
                ("on", f"{calibration.n_ranks} x {calibration.device_name}"),
                ("hosts", ", ".join(calibration.hosts)),
                ("with", software),
                ("by", calibration.command_line),
            ]
        ),
        tree_text(machine.links, calibration.n_ranks, calibration.device_name),
        _rates_text(machine),
        _levels_text(machine.links),
        products_text(machine),
        collectives_text(machine),
        *(f"Note: {note}." for note in calibration.notes),
        *(
            f"Slow: rank {speed.rank} on {speed.host} multiplies at "
            f"{percent(speed.speed_fraction, 0)} % of the median rank's rate."
            for speed in calibration.speeds
            if speed.speed_fraction < SLOW_FRACTION
        ),
    ]
    return "\n\n".join(part for part in parts if part)


def tree_text(links: Sequence[LinkLevel], n_ranks: int, device_name: str) -> str:
    """Draw the link levels as a small tree, outermost first."""
    sizes = [*(link.unit_ranks for link in links[1:]), n_ranks]
    lines = [counted(n_ranks, "rank")]
    for depth, (link, size) in enumerate(zip(reversed(links), reversed(sizes), strict=True)):
        inner = link.unit_ranks
        what = device_name if inner == 1 else f"units of {inner} ranks"
        lines.append(f"{'   ' * depth}└─ {link.name}: joins {max(size // inner, 1)} x {what}")
    return "\n".join(lines)


def _rates_text(machine: Machine) -> str:
    kernels = machine.kernels
    gemm = machine.gemm
    rows = [
        [
            f"large products, {dtype}",
            format_quantity(peak.value * gemm.sustained_fraction.value, "rate_flops_per_s"),
            percent(gemm.sustained_fraction.spread_fraction),
        ]
        for dtype, peak in machine.gpu.peak_flops_per_s.items()
    ]
    rows += [
        [
            "copies",
            format_quantity(achieved_memory_bandwidth(machine), "copy_bytes_per_s"),
            percent(kernels.memory_fraction.spread_fraction),
        ],
        [
            "kernels beside a collective take longer by",
            f"{percent(kernels.slowdown_fraction.value, 0)} %",
            percent(kernels.slowdown_fraction.spread_fraction),
        ],
        [
            "collectives beside kernels take longer by",
            f"{percent(kernels.collective_slowdown_fraction.value, 0)} %",
            percent(kernels.collective_slowdown_fraction.spread_fraction),
        ],
    ]
    strided = kernels.strided_bytes_per_s
    if strided is not None:
        rate = format_quantity(strided.value, "strided_bytes_per_s")
        rows.append(["copies, one element at a time", rate, percent(strided.spread_fraction)])
    return table(rows, ["rate", "value", "spread %"])


def _levels_text(links: Sequence[LinkLevel]) -> str:
    rows = []
    for link in links:
        kinds = dict.fromkeys([*link.kind_fraction, *link.kind_latency_seconds])
        rows.append([link.name, "all_reduce" if kinds else "all", *_level_row(link, 1.0, None)])
        for kind in kinds:
            fraction = link.kind_fraction[kind].value if kind in link.kind_fraction else 1.0
            rows.append(["", kind, *_level_row(link, fraction, kind)])
    headers = ["link level", "collective", "bandwidth of a unit", "spread %"]
    return table(rows, [*headers, "latency of a hop", "spread %"])


def _level_row(link: LinkLevel, fraction: float, kind: str | None) -> list[str]:
    bandwidth = link.kind_fraction.get(kind or "", link.bandwidth_bytes_per_s)
    latency = link.latency_of(kind or "")
    rate = link.bandwidth_bytes_per_s.value * fraction
    return [
        format_quantity(rate, "rate_bytes_per_s"),
        percent(bandwidth.spread_fraction),
        format_seconds(latency.value),
        percent(latency.spread_fraction),
    ]


def products_text(machine: Machine) -> str:
    """Return rates of some measured products, from small to large, by mode, and the roofline."""
    by_shape: dict[tuple[str, int, int, int], dict[str, float]] = {}
    for p in machine.gemm.points:
        flops = 2.0 * p.m * p.n * p.k
        by_shape.setdefault((p.dtype, p.m, p.n, p.k), {})[p.mode] = flops / p.seconds
    parts = []
    for dtype in dict.fromkeys(shape[0] for shape in by_shape):
        shapes = sorted(
            (s for s in by_shape if s[0] == dtype), key=lambda s: (s[1] * s[2] * s[3], s)
        )
        rows = [_product_row(machine, shape, by_shape[shape]) for shape in _some(shapes)]
        headers = [f"{dtype}: m x n x k", "FLOP/byte", *(f"{mode} TFLOP/s" for mode in MODES)]
        parts.append(table(rows, [*headers, "roofline", "% of it", ""]))
    return "\n\n".join(parts)


def _product_row(
    machine: Machine, shape: tuple[str, int, int, int], rates: Mapping[str, float]
) -> list[str]:
    """Return the row of a product; `rates` holds its FLOP/s by mode."""
    dtype, m, n, k = shape
    moved_bytes = BYTES_PER_ELEMENT[dtype] * (m * k + k * n + m * n)
    intensity = 2.0 * m * n * k / moved_bytes
    roof = min(machine.peak_flops_per_s(dtype), intensity * achieved_memory_bandwidth(machine))
    share = max(rates.values()) / roof
    return [
        f"{m} x {n} x {k}",
        f"{intensity:.0f}",
        *(f"{rates[mode] * 1e-12:.4g}" if mode in rates else "-" for mode in MODES),
        f"{roof * 1e-12:.4g}",
        percent(share, 0),
        _bar(share),
    ]


def _some(shapes: Sequence[Any]) -> list[Any]:
    if len(shapes) <= SHOWN_PRODUCTS:
        return list(shapes)
    step = (len(shapes) - 1) / (SHOWN_PRODUCTS - 1)
    return [shapes[round(i * step)] for i in range(SHOWN_PRODUCTS)]


def _bar(share: float) -> str:
    return BAR[: max(round(min(share, 1.0) * len(BAR)), 1)]


def collectives_text(machine: Machine) -> str:
    """Return measured bus bandwidth over message size, one row per collective and kind of group."""
    measured = [expected(machine, *group, []) for group in groups_of(machine.link_points)]
    if not measured:
        return ""
    sizes_bytes = sorted({_power_of_two(e.nbytes) for entries in measured for e in entries})
    best = max(e.measured_busbw_bytes_per_s or 0.0 for entries in measured for e in entries)
    rows = [_collective_row(entries, sizes_bytes, best) for entries in measured]
    headers = ["bus bandwidth, GB/s", "stride", "size"]
    headers += [_short_bytes(nbytes) for nbytes in sizes_bytes]
    return table(rows, [*headers, "largest"])


def _collective_row(
    entries: Sequence[Expected], sizes_bytes: Sequence[int], best: float
) -> list[Any]:
    first = entries[0]
    rates = {_power_of_two(e.nbytes): (e.measured_busbw_bytes_per_s or 0.0) for e in entries}
    cells = [f"{rates[n] * 1e-9:.3g}" if n in rates else "-" for n in sizes_bytes]
    return [first.kind, first.stride, first.size, *cells, _bar(max(rates.values()) / best)]


def _power_of_two(nbytes: int) -> int:
    """Return the power of two below a buffer, which is rounded up to whole elements per rank."""
    return 1 << (nbytes.bit_length() - 1)


def _short_bytes(nbytes: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >> shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
