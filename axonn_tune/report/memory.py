"""How the memory of a configuration is shown: what it takes, how sure that is, what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from axonn_tune.search.rank import Ranking
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

# Rows that nearly fit are shown up to this number.
MOST_NEAR = 3


def memory_mark(prediction: Prediction) -> str:
    """Return a word on a configuration that does not fit, or may not; it is empty for others."""
    if prediction.fits:
        return "tight" if prediction.fits_tightly else ""
    return "near" if prediction.nearly_fits else "OOM"


def memory_text(prediction: Prediction) -> str:
    """Return the GiB that a rank needs, with its mark, and what takes most if it does not fit."""
    mark = memory_mark(prediction)
    largest = f": {_lacking(prediction)}" if mark == "OOM" else ""
    return f"{gib(prediction.memory_bytes):.1f} {mark}{largest}".rstrip()


def _lacking(prediction: Prediction) -> str:
    """Name the largest memory term of a configuration that does not fit, or the host's memory."""
    return prediction.largest_memory_term if prediction.fits_in_host else "host memory"


def host_memory_text(prediction: Prediction) -> str:
    """Say how much the ranks of a node take of its host's memory, and whether that fits."""
    needed = gib(prediction.host_memory_bytes)
    capacity = gib(prediction.host_memory_capacity_bytes)
    state = "fits" if prediction.fits_in_host else "out of the host's memory"
    return f"{needed:.1f} GiB of the {capacity:.1f} GiB of a node's host: {state}"


def memory_interval_text(prediction: Prediction) -> str:
    """Return the ends of the interval of the peak memory."""
    low, high = prediction.memory_bytes_interval
    return f"{gib(low):.1f}-{gib(high):.1f}"


def memory_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Explain the marks of `memory_text`, if some prediction has one."""
    tight = next((p for p in predictions if p.fits_tightly), None)
    near = next((p for p in predictions if p.nearly_fits), None)
    lines = []
    if tight is not None:
        lines.append(
            "tight: it may not fit, since fragmentation and reserved memory are known only roughly "
            f"(90 % interval of the first such row: {memory_interval_text(tight)} GiB); "
            "--memory-margin 2GiB keeps more memory free."
        )
    if near is not None:
        lines.append(
            "near: it is expected not to fit, but may, since fragmentation and reserved memory are "
            "known only roughly (90 % interval of the first such row: "
            f"{memory_interval_text(near)} GiB)."
        )
    return lines


def near_lines(ranking: Ranking, predictions: Sequence[Prediction]) -> list[str]:
    """Name the fastest layouts that nearly fit and beat a shown row, and what makes them fit."""
    if ranking.near is None:
        return []
    slowest_seconds = predictions[-1].step_seconds
    nearest = map(ranking.near.prediction, range(min(MOST_NEAR, len(ranking.near))))
    near = [p for p in nearest if p.step_seconds < slowest_seconds]
    if not near:
        return []
    return [
        "Nearly fits: it fits if fragmentation and reserved memory take less than the profile's "
        f"{_rough_gib(near[0]):.1f} GiB, and --memory-margin as below accepts it:",
        *(f"  {_near_text(p)}" for p in near),
    ]


def _rough_gib(prediction: Prediction) -> float:
    """Return the GiB of the terms that are known roughly."""
    terms = prediction.memory_terms_bytes
    return gib(terms["fragmentation"] + terms["reserved"])


def _near_text(prediction: Prediction) -> str:
    """Say what a configuration that nearly fits would bring, and which margin lets it in."""
    configuration = prediction.configuration
    virtual = f", virtual {configuration.n_virtual}" if configuration.n_virtual > 1 else ""
    return (
        f"{configuration.ordered_layout}{virtual}, micro-batch {configuration.micro_batch}, "
        f"recompute {configuration.recompute}: {prediction.step_seconds:.3f} s, "
        f"{gib(prediction.memory_bytes):.1f} GiB ({memory_interval_text(prediction)}), "
        f"--memory-margin {_accepting(prediction)}"
    )


def verdict(prediction: Prediction) -> str:
    """Say whether a configuration fits in its GPUs, and what makes it fit if it nearly does."""
    free = gib(prediction.memory_capacity_bytes - prediction.memory_bytes)
    if prediction.fits_in_gpu:
        remark = ", tight: it may not" if prediction.fits_tightly else ""
        return f"fits, {free:.2f} GiB free{remark}"
    if not prediction.nearly_fits:
        return (
            f"out of memory, {-free:.2f} GiB short; largest term {prediction.largest_memory_term}"
        )
    rough = _rough_gib(prediction)
    return (
        f"nearly fits, {-free:.2f} GiB short: it fits if fragmentation and reserved memory take "
        f"{100 * -free / rough:.0f} % less than the profile's {rough:.1f} GiB "
        f"(--memory-margin {_accepting(prediction)} accepts it)"
    )


def _accepting(prediction: Prediction) -> str:
    """Return the margin of memory with which a configuration that nearly fits counts as fitting."""
    missing = prediction.memory_bytes - prediction.scenario.machine.gpu.memory_bytes.value
    return f"{-math.ceil(100 * gib(missing)) / 100:.2f}GiB"
