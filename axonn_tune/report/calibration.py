"""What a calibration has found, as text."""

from __future__ import annotations

from axonn_tune.report.text import table
from axonn_tune.spec.machine import LinkLevel, Machine
from axonn_tune.units import format_quantity, format_seconds


def calibration_text(machine: Machine, tree: str, path: str) -> str:
    """The topology, the main rates with their spreads, what to know, and what to type next."""
    calibration = machine.calibration
    assert calibration is not None
    parts = [
        f"{machine.name}: {machine.description}, {calibration.backend}, "
        f"{calibration.seconds:.0f} s",
        tree,
        _rates_text(machine),
        _levels_text(machine.links),
        *(f"Note: {note}." for note in calibration.notes),
        f"Written to {path}. Next: axonn-tune machines show {path}; axonn-tune suggest "
        f"--machine {path} --gpus ... --model ...",
    ]
    return "\n\n".join(parts)


def _rates_text(machine: Machine) -> str:
    kernels, gpu = machine.kernels, machine.gpu
    copies = gpu.memory_bandwidth_bytes_per_s.value * kernels.memory_fraction.value
    sustained = machine.gemm.sustained_fraction
    rows = [
        [
            f"products, {dtype}, large",
            format_quantity(peak.value * sustained.value, "rate_flops_per_s"),
            f"{100 * sustained.spread_fraction:.1f}",
        ]
        for dtype, peak in gpu.peak_flops_per_s.items()
    ]
    rows += [
        [
            "copies",
            format_quantity(copies, "copy_bytes_per_s"),
            f"{100 * kernels.memory_fraction.spread_fraction:.1f}",
        ],
        [
            "kernels beside a collective take longer by",
            f"{100 * kernels.slowdown_fraction.value:.0f} %",
            f"{100 * kernels.slowdown_fraction.spread_fraction:.1f}",
        ],
        [
            "collectives beside kernels take longer by",
            f"{100 * kernels.collective_slowdown_fraction.value:.0f} %",
            f"{100 * kernels.collective_slowdown_fraction.spread_fraction:.1f}",
        ],
    ]
    return table(rows, ["rate", "value", "spread %"])


def _levels_text(links: tuple[LinkLevel, ...]) -> str:
    rows = [
        [
            link.name,
            format_quantity(link.bandwidth_bytes_per_s.value, "bandwidth_bytes_per_s"),
            f"{100 * link.bandwidth_bytes_per_s.spread_fraction:.1f}",
            format_seconds(link.latency_seconds.value),
            f"{100 * link.latency_seconds.spread_fraction:.1f}",
        ]
        for link in links
    ]
    headers = ["link level", "bandwidth of a unit", "spread %", "latency of a hop", "spread %"]
    return table(rows, headers)
