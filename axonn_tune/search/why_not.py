"""Why a grid is not among the results."""

from __future__ import annotations

import numpy as np

from axonn_tune.search.candidates import broken_rules, with_micro_batches
from axonn_tune.search.rank import run
from axonn_tune.search.search import Search
from axonn_tune.spec.grid import AnyGrid, Placements
from axonn_tune.step.evaluate import memory_bytes, rows_by_stages
from axonn_tune.units import gib


def broken_by(search: Search, grid: AnyGrid) -> list[str]:
    """Every reason for which a grid is not allowed; empty if it is."""
    if grid.n_ranks != search.job.n_gpus:
        return [f"it has {grid.n_ranks} ranks, not {search.job.n_gpus}"]
    placements = Placements.of([grid], search.constraints.orders, search.strategy.axes)
    broken = broken_rules(placements, search.constraints, search.rules)
    reasons = [reason for reason, mask in broken.items() if mask.all()]
    if not reasons:
        _, rejected = with_micro_batches(placements, search.job.global_batch, search.constraints)
        reasons = list(rejected)
    return reasons


def why_not(search: Search, grid: AnyGrid) -> str:
    """Why a grid is not among the results, with the GiB that it is short; or its rank."""
    reasons = broken_by(search, grid)
    if reasons:
        return f"{grid}: {'; '.join(reasons)}"
    short = _short_of_memory(search, grid)
    if short is not None:
        return short
    ranking = run(search)
    names = search.strategy.axes.names
    wanted = np.array([[grid.sizes.get(axis, 1)] for axis in names])
    is_grid = (ranking.table.placements.sizes == wanted).all(axis=0)
    own = ranking.prediction(int(np.flatnonzero(is_grid[ranking.table.placement])[0]))
    slower = own.step_seconds / ranking.prediction(0).step_seconds
    return (
        f"{grid}: allowed; with its best configuration (micro-batch {own.micro_batch}, recompute "
        f"{own.recompute}) it ranks {own.rank} of {len(ranking)}, {slower:.3f} times the best step"
    )


def _short_of_memory(search: Search, grid: AnyGrid) -> str | None:
    """How much memory the grid's leanest configuration lacks; None if it fits."""
    placements = Placements.of([grid], search.constraints.orders, search.strategy.axes)
    table, _ = with_micro_batches(placements, search.job.global_batch, search.constraints)
    capacity = search.memory_capacity_bytes
    leanest = []
    for variant in search.variants:
        for rows in rows_by_stages(search, variant, table):
            total, terms = memory_bytes(search, variant, table.take(rows))
            row = int(total.argmin())
            largest = max(terms, key=lambda term: float(terms[term][row]))
            found = (variant, int(rows[row]), largest, float(terms[largest][row]))
            leanest.append((float(total[row]), *found))
    total_bytes, variant, row, largest, largest_bytes = min(leanest)
    if total_bytes <= capacity:
        return None
    return (
        f"{grid}: out of memory; its leanest configuration (micro-batch "
        f"{int(table.micro_batch[row])}, recompute {variant.recompute}) needs "
        f"{gib(total_bytes):.1f} GiB of {gib(capacity):.1f} GiB, "
        f"{gib(total_bytes - capacity):.1f} GiB short; largest term: "
        f"{largest}, {gib(largest_bytes):.1f} GiB"
    )
