"""Find the kernels and messages of a search, so that a calibration can measure just these."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from axonn_tune.cost import paper
from axonn_tune.cost.placements import placement_links
from axonn_tune.search.candidates import executions, legal_placements, with_micro_batches
from axonn_tune.search.search import Search
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.plan import MODES, Attention, Collective, Gemm
from axonn_tune.step.memory import memory_bytes

# m, n, k and mode of a product; sequences, heads, length and head size of attention.
Product: TypeAlias = tuple[int, int, int, str]
AttentionSizes: TypeAlias = tuple[int, int, int, int]


def kernels_of(search: Search) -> tuple[list[Product], list[AttentionSizes]]:
    """Return every product and every attention of every candidate of the search.

    The candidates that move least between GPUs come first, by AxoNN's own communication model,
    so that a caller that stops early has the kernels that matter.
    """
    placements, _ = legal_placements(search)
    scenario = search.scenario
    links = placement_links(scenario.machine, placements, scenario.sent_once)
    seconds = paper.communication_seconds(scenario.model, scenario.job, placements, links)
    best_first = placements.take(np.argsort(seconds, kind="stable"))
    table, _ = with_micro_batches(search, best_first)
    table = table.take(_fits(search, table))
    products: dict[Product, int] = {}
    attentions: dict[AttentionSizes, int] = {}
    for operation in _operations(search, table):
        if isinstance(operation, Gemm):
            modes = MODES if scenario.job.kernel_tuning else (operation.mode,)
            for row, (m, n, k) in _first_rows(len(table), operation.m, operation.n, operation.k):
                for mode in modes:
                    products[m, n, k, mode] = min(row, products.get((m, n, k, mode), row))
        elif operation.fused:
            sizes = (operation.n_sequences, operation.n_heads, operation.seq_len)
            for row, (n_sequences, n_heads, seq_len) in _first_rows(len(table), *sizes):
                attentions[n_sequences, n_heads, seq_len, operation.head_dim] = row
    return sorted(products, key=products.__getitem__), sorted(
        attentions, key=attentions.__getitem__
    )


# Kind of collective, stride and size of the groups.
GroupKind: TypeAlias = tuple[str, int, int]


def largest_messages(search: Search) -> dict[GroupKind, int]:
    """Return the bytes of the largest message of every kind over every choice of groups."""
    scenario = search.scenario
    placements, _ = legal_placements(search)
    table, _ = with_micro_batches(search, placements)
    table = table.take(_fits(search, table))
    largest: dict[GroupKind, int] = {}
    for part in executions(search, table):
        plan = scenario.plan(part)
        for operation in plan.operations:
            if isinstance(operation, Collective):
                _note_largest(largest, operation, part)
    return largest


def _note_largest(
    largest: dict[GroupKind, int], operation: Collective, table: CandidateTable
) -> None:
    placements = table.placements
    stride, size = (
        of_group(operation.axis)[table.placement]
        for of_group in (placements.stride, placements.size)
    )
    each = np.broadcast_to(operation.nbytes / np.asarray(operation.n_calls), size.shape)
    for of_stride, of_size in np.unique(np.stack([stride, size]), axis=1).T.tolist():
        rows = (stride == of_stride) & (size == of_size)
        if of_size > 1:
            key = (operation.kind, of_stride, of_size)
            largest[key] = max(int(each[rows].max()), largest.get(key, 0))


def _fits(search: Search, table: CandidateTable) -> np.ndarray:
    """Return whether a candidate fits with its leanest recomputation, shape (C,)."""
    if search.include_oom:
        return np.ones(len(table), dtype=bool)
    fits = np.zeros(len(table), dtype=bool)
    for recompute in search.recomputes:
        for n_virtual in search.scenario.strategy.n_virtual:
            executed = table.executed(recompute, n_virtual)
            for rows in executed.alike():
                part = executed.take(rows)
                total, _ = memory_bytes(search.scenario, part)
                fits[rows] |= total <= search.scenario.memory_capacity_bytes
    return fits


def _operations(search: Search, table: CandidateTable) -> list[Gemm | Attention]:
    scenario = search.scenario
    executed = table.executed(search.recomputes[0], scenario.strategy.n_virtual[0])
    plan = scenario.plan(executed)
    by_name = {op.name: op for op in plan.operations}
    return [op for op in by_name.values() if isinstance(op, Gemm | Attention)]


def _first_rows(n_rows: int, *columns: object) -> list[tuple[int, tuple[int, ...]]]:
    """Return each distinct combination of values with the first row that has it."""
    stacked = np.stack([np.broadcast_to(np.asarray(c), n_rows) for c in columns], axis=1)
    values, rows = np.unique(stacked.round().astype(np.int64), axis=0, return_index=True)
    return list(zip(rows.tolist(), map(tuple, values.tolist()), strict=True))
