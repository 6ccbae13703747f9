"""Figures of machines, validations and published results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from axonn_tune.calibrate.expected import groups_of
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth
from axonn_tune.cost.prices import group_seconds
from axonn_tune.report.figure import check_plot, new_figure, saved
from axonn_tune.reproduce.comparison import grouped
from axonn_tune.reproduce.everything import Reproduction
from axonn_tune.spec.job import BYTES_PER_ELEMENT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.validation import Outcome, Validation

# Message sizes of curves for a profile that holds no measured collectives.
CURVE_BYTES = 2.0 ** np.arange(10, 31)


def machine_figure(machine: Machine, path: str) -> bytes:
    """Products under the roofline, and bus bandwidth over message size, as the path's format.

    Raises
    ------
    InputError
        matplotlib is not installed, or the path ends in none of `FORMATS`.
    """
    ending = check_plot(path)
    figure, (left, right) = new_figure(1, 2)
    _draw_products(left, machine)
    _draw_collectives(right, machine)
    figure.suptitle(f"{machine.name}: {machine.description or machine.gpu.name}")
    return saved(figure, ending)


def validation_figure(validation: Validation, path: str) -> bytes:
    """Predicted over measured steps, and the signed error of each configuration.

    Raises
    ------
    InputError
        matplotlib is not installed, or the path ends in none of `FORMATS`.
    """
    ending = check_plot(path)
    figure, (left, right) = new_figure(1, 2)
    ran = sorted(validation.measured, key=lambda outcome: outcome.measured_seconds)
    _draw_agreement(left, ran)
    _draw_errors(right, ran)
    figure.suptitle(
        f"{validation.model} on {validation.machine}, {validation.n_ranks} ranks, "
        f"overlap {validation.overlap}"
    )
    return saved(figure, ending)


def published_figure(reproduction: Reproduction, path: str) -> bytes:
    """Predicted over published: end results relative to the machine's peak, and measured steps.

    Raises
    ------
    InputError
        matplotlib is not installed, or the path ends in none of `FORMATS`.
    """
    ending = check_plot(path)
    figure, (left, right) = new_figure(1, 2)
    results = [c for c in reproduction.results if c.error_fraction is not None]
    systems = grouped(results, lambda c: c.system)
    for color, group in enumerate(systems.values()):
        ratios = [1.0 + (c.error_fraction or 0.0) for c in group]
        left.plot(ratios, [color] * len(group), "o", color=f"C{color % 10}", alpha=0.6)
    left.set_yticks(range(len(systems)), list(systems), fontsize="small")
    left.invert_yaxis()
    left.set(xscale="log", xlabel="predicted over published", title="End results")
    _draw_band(left, [0.5, 2.0])
    left.minorticks_off()
    ratio_ticks = ["0.2", "0.3", "0.5", "0.8", "1", "1.25", "2", "3"]
    left.set_xticks([float(tick) for tick in ratio_ticks], ratio_ticks)
    for color, (name, timed) in enumerate(reproduction.steps.items()):
        measured = [t.measured_seconds for t in timed]
        predicted = [t.predicted_seconds for t in timed]
        right.plot(measured, predicted, "o", color=f"C{color}", markersize=3, alpha=0.6, label=name)
    ends = np.array(right.get_xlim())
    right.plot(ends, ends, color="black", linewidth=0.8)
    right.fill_between(ends, 0.9 * ends, 1.1 * ends, alpha=0.15, label="within 10 %")
    right.set(
        xscale="log",
        yscale="log",
        xlabel="measured step, s",
        ylabel="predicted step, s",
        title="Steps of Megatron-LM on A100 (vTrain)",
    )
    right.legend(fontsize="small")
    return saved(figure, ending)


def _draw_band(axes: Any, ends: Sequence[float]) -> None:
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.axvspan(0.9, 1.1, alpha=0.15)
    axes.set_xlim(min(ends[0], axes.get_xlim()[0]), max(ends[1], axes.get_xlim()[1]))
    axes.grid(alpha=0.3, axis="x")


def _draw_agreement(axes: Any, ran: Sequence[Outcome]) -> None:
    measured = np.array([outcome.measured_seconds for outcome in ran])
    predicted = np.array([outcome.predicted.step_seconds for outcome in ran])
    below = measured - np.array([min(outcome.step_seconds) for outcome in ran])
    above = np.array([max(outcome.step_seconds) for outcome in ran]) - measured
    ends = np.array([min(*measured, *predicted), max(*measured, *predicted)])
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, alpha=0.15, label="within 10 %")
    axes.errorbar(measured, predicted, xerr=np.stack([below, above]), fmt="o", markersize=4)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured step, s (median; from the fastest to the slowest)",
        ylabel="predicted step, s",
        title="Predicted over measured",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, which="both")


def _draw_errors(axes: Any, ran: Sequence[Outcome]) -> None:
    names = [str(outcome.configuration.layout) for outcome in ran]
    errors = [100.0 * outcome.error_fraction for outcome in ran]
    axes.barh(range(len(ran)), errors, color=["C3" if error < 0 else "C0" for error in errors])
    axes.set_yticks(range(len(ran)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="predicted over measured, less one, %", title="Error, the fastest grid first")
    axes.grid(alpha=0.3, axis="x")


def _draw_products(axes: Any, machine: Machine) -> None:
    """Rate over arithmetic intensity; the roofline of each dtype that was measured."""
    dtypes = dict.fromkeys(p.dtype for p in machine.gemm.points) or machine.gpu.peak_flops_per_s
    intensities = np.geomspace(1.0, 1e4, 200)
    for color, dtype in enumerate(dtypes):
        roof = np.minimum(
            machine.peak_flops_per_s(dtype), intensities * achieved_memory_bandwidth(machine)
        )
        axes.plot(intensities, roof * 1e-12, color=f"C{color}", label=f"{dtype} roofline")
        for marker, mode in zip("ov^", ("NN", "NT", "TN"), strict=True):
            points = [p for p in machine.gemm.points if (p.dtype, p.mode) == (dtype, mode)]
            flops = np.array([2.0 * p.m * p.n * p.k for p in points])
            elements = np.array([p.m * p.k + p.k * p.n + p.m * p.n for p in points])
            seconds = np.array([p.seconds for p in points])
            axes.plot(
                flops / (elements * BYTES_PER_ELEMENT[dtype]),
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
    """Measured bus bandwidth, and a line for what the levels of the profile imply."""
    measured = groups_of(machine.link_points)
    without_points = replace(machine, link_points=())
    whole_node = ("all_reduce", 1, machine.ranks_per_node)
    two_nodes = ("all_reduce", machine.ranks_per_node, 2)
    shown = measured or [g for g in (whole_node, two_nodes) if g[2] > 1]
    for color, (kind, stride, size) in enumerate(shown):
        points = [
            p
            for p in machine.link_points
            if (p.kind, p.stride, p.size) == (kind, stride, size) and p.is_of_whole_axis
        ]
        nbytes = np.array([p.nbytes for p in points]) if points else CURVE_BYTES
        moved = float(moved_fraction(kind, size)) * nbytes
        style = {"color": f"C{color % 10}", "label": f"{kind} ({stride}, {size})"}
        if points:
            seconds = np.array([p.seconds for p in points])
            axes.plot(nbytes, moved / seconds * 1e-9, "o", markersize=3, **style)
            style.pop("label")
        law = group_seconds(without_points, kind, stride, size, nbytes)
        axes.plot(nbytes, moved / law * 1e-9, **style, linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="message, bytes",
        ylabel="bus bandwidth, GB/s",
        title="Collectives (stride, size): measured, and as the levels imply",
    )
    axes.legend(fontsize="x-small", ncols=2)
    axes.grid(alpha=0.3)
