"""Why a grid is not among the results."""

from __future__ import annotations

import numpy as np

from axonn_tune.search.candidates import broken_rules, with_micro_batches
from axonn_tune.search.evaluate import memory_bytes
from axonn_tune.search.problem import Search
from axonn_tune.search.rank import run
from axonn_tune.spec.grid import Grid, Placements
from axonn_tune.units import gib


def broken_by(search: Search, grid: Grid) -> list[str]:
    """Every reason for which a grid is not allowed; empty if it is."""
    if grid.n_ranks != search.job.n_gpus:
        return [f"it has {grid.n_ranks} ranks, not {search.job.n_gpus}"]
    placements = Placements.of([grid], search.constraints.orders)
    broken = broken_rules(placements, search.constraints, search.rules)
    reasons = [reason for reason, mask in broken.items() if mask.all()]
    if not reasons:
        _, rejected = with_micro_batches(placements, search.job.global_batch, search.constraints)
        reasons = list(rejected)
    return reasons


def why_not(search: Search, grid: Grid) -> str:
    """Why a grid is not among the results, with the GiB that it is short; or its rank."""
    reasons = broken_by(search, grid)
    if reasons:
        return f"{grid}: {'; '.join(reasons)}"
    short = _short_of_memory(search, grid)
    if short is not None:
        return short
    ranking = run(search)
    wanted = np.array([[grid.x], [grid.y], [grid.z], [grid.data]])
    is_grid = (ranking.table.placements.sizes == wanted).all(axis=0)
    own = ranking.prediction(int(np.flatnonzero(is_grid[ranking.table.placement])[0]))
    slower = own.step_seconds / ranking.prediction(0).step_seconds
    return (
        f"{grid}: allowed; with its best configuration (micro-batch {own.micro_batch}, recompute "
        f"{own.recompute}) it ranks {own.rank} of {len(ranking)}, {slower:.3f} times the best step"
    )


def _short_of_memory(search: Search, grid: Grid) -> str | None:
    """How much memory the grid's leanest configuration lacks; None if it fits."""
    placements = Placements.of([grid], search.constraints.orders)
    table, _ = with_micro_batches(placements, search.job.global_batch, search.constraints)
    capacity = search.memory_capacity_bytes
    leanest = []
    for recompute in search.recomputes:
        total, terms = memory_bytes(search, recompute, table)
        row = int(total.argmin())
        largest = max(terms, key=lambda term: float(terms[term][row]))
        leanest.append((float(total[row]), recompute, row, largest, float(terms[largest][row])))
    total_bytes, recompute, row, largest, largest_bytes = min(leanest)
    if total_bytes <= capacity:
        return None
    return (
        f"{grid}: out of memory; its leanest configuration (micro-batch "
        f"{int(table.micro_batch[row])}, recompute {recompute}) needs "
        f"{gib(total_bytes):.1f} GiB of {gib(capacity):.1f} GiB, "
        f"{gib(total_bytes - capacity):.1f} GiB short; largest term: "
        f"{largest}, {gib(largest_bytes):.1f} GiB"
    )
