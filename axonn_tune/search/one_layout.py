"""The result of a search for one layout: its best configuration, or why it has none."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.candidates import (
    batch_hint,
    broken_rules,
    executions,
    nearest_batches,
    with_micro_batches,
    with_shared_batch,
)
from axonn_tune.search.rank import (
    VARIANT_REASON,
    Ranking,
    rank_best,
    rank_candidates,
    with_best_batch,
)
from axonn_tune.search.search import Search
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import Layout, parse_ordered_layout
from axonn_tune.spec.recomputation import MODULES
from axonn_tune.step.memory import host_memory_bytes, memory_bytes, memory_interval_bytes
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import counted, gib


def held_to(search: Search, text: str) -> tuple[Search, Layout]:
    """Read a layout and hold the search to the rank order that its text may name.

    Raises
    ------
    InputError
        The text is not a layout of the search's strategy.
    """
    layout, order = parse_ordered_layout(text, search.scenario.strategy.axes)
    if order is not None:
        search = replace(search, constraints=replace(search.constraints, orders=(order,)))
    return search, layout


def best_of_layout(search: Search, layout: Layout | str) -> Prediction:
    """Return the best configuration of a layout, whether it fits in memory or not.

    Raises
    ------
    InputError
        The layout breaks a rule of the algorithm; the message says which.
    """
    if isinstance(layout, str):
        search, layout = held_to(search, layout)
    reasons = [objections(search.on_batches([batch]), layout) for batch in search.batches]
    if all(reasons):
        hint = _batch_hint(search, layout)
        raise InputError(f"grid {layout} is not allowed: {'; '.join(reasons[0])}{hint}")
    return rank_candidates(search.of_layout(layout)).prediction(0)


def layout_or_best(search: Search, layout: Layout | str | None) -> Prediction:
    """Return the best configuration of a layout, or of all layouts where none is given."""
    return rank_best(search, 1).prediction(0) if layout is None else best_of_layout(search, layout)


def _batch_hint(search: Search, layout: Layout) -> str:
    """Return a phrase that names the nearest global batches that a layout can share.

    The phrase is empty if the layout is not allowed with any batch.
    """
    if objections(with_shared_batch(search), layout):
        return ""
    return batch_hint(search, nearest_batches(search, _placements_of(search, layout)))


def objections(search: Search, layout: Layout) -> list[str]:
    """Return every reason why a layout is not allowed; the list is empty if it is."""
    scenario = search.scenario
    if layout.n_ranks != scenario.job.n_gpus:
        return [f"it has {counted(layout.n_ranks, 'rank')}, not {scenario.job.n_gpus}"]
    placements = _placements_of(search, layout)
    broken = broken_rules(search, placements)
    reasons = [reason for reason, mask in broken.items() if mask.all()]
    if reasons:
        return reasons
    table, rejected = with_micro_batches(search, placements)
    if not rejected and next(executions(search, table), None) is None:
        return [VARIANT_REASON]
    return list(rejected)


def why_not(search: Search, layout: Layout | str) -> str:
    """Say why a layout is not among the results, or at which place of the ranking it is.

    A rank order that its text names decides which of its rows is meant.
    """
    with suppress(NoCandidateError):  # Nothing fits; what the layout lacks is the answer.
        search = with_best_batch(search)
    held = search
    if isinstance(layout, str):
        held, layout = held_to(search, layout)
    reasons = objections(held, layout)
    if reasons:
        return f"{layout}: {'; '.join(reasons)}"
    shortage = None if search.include_oom else _memory_shortage(held, layout)
    if shortage is not None:
        return shortage
    ranking = rank_candidates(search)
    row = _row_of(ranking, _placements_of(held, layout))
    if row is None:
        prediction = best_of_layout(held, layout)
        order = prediction.configuration.order
        place = f"it is not ranked, as no --order asks for {order}; it would take"
    else:
        prediction = ranking.prediction(row)
        place = f"it ranks {row + 1} of {len(ranking)} and takes"
    best = prediction.configuration
    if len(held.constraints.orders) == 1:  # The row may have another order that places ranks alike.
        best = replace(best, order=held.constraints.orders[0])
    slower = float(prediction.step_seconds / ranking.step_seconds[0])
    return (
        f"{best.ordered_layout}: allowed; with its best configuration (micro-batch "
        f"{best.micro_batch}, recompute {best.recompute}) {place} {slower:.3f} times as long "
        f"as the best{_untried_remark(search, best)}"
    )


def _untried_remark(search: Search, best: Configuration) -> str:
    """Name recomputations that a search leaves out, if they may make a layout faster.

    Mixtures are trained with these modules recomputed where memory is short (DeepSeek-V3, arXiv
    2412.19437, section 3.2.3).
    """
    model = search.scenario.model
    can_recompute = set(search.scenario.strategy.recomputed_modules)
    if not search.partial_recompute or best.recompute == "none" or model.is_dense:
        return ""
    of_model = {"layernorm", "moe_act"} | ({"mla_up_proj"} if model.latent_attention else set())
    modules = ",".join(name for name in MODULES if name in of_model & can_recompute)
    return f"; --recompute selective:{modules} was not tried" if modules else ""


def _row_of(ranking: Ranking, wanted: Placements) -> int | None:
    """Return the first row that places ranks as a wanted layout does; None if there is none."""
    ranked = ranking.table.placements
    is_layout = (ranked.sizes == wanted.sizes[:, :1]).all(axis=0)
    is_split = wanted.sizes[: len(wanted.strides), 0] > 1  # The folded axis has no stride.
    strides = ranked.strides[is_split, :, np.newaxis]
    is_alike = (strides == wanted.strides[is_split, np.newaxis]).all(axis=0).any(axis=1)
    rows = np.flatnonzero((is_layout & is_alike)[ranking.table.placement])
    return int(rows[0]) if rows.size else None


def _placements_of(search: Search, layout: Layout) -> Placements:
    """Return the layout in every rank order that the search tries."""
    return Placements.of([layout], search.constraints.orders, search.scenario.strategy.axes)


def _memory_shortage(search: Search, layout: Layout) -> str | None:
    """Say how much memory the layout's leanest configuration lacks; return None if it fits."""
    capacity = search.scenario.memory_capacity_bytes
    table, _ = with_micro_batches(search, _placements_of(search, layout))
    leanest_bytes, host_bytes = np.inf, 0.0
    for part in executions(search, table):
        total, terms = memory_bytes(search.scenario, part)
        row = int(total.argmin())
        if total[row] < leanest_bytes:
            leanest_bytes = float(total[row])
            leanest = part.configuration(row)
            host_bytes = float(host_memory_bytes(search.scenario, part)[row])
            low, _ = memory_interval_bytes(search.scenario, total, terms)
            state = "nearly fits" if low[row] <= capacity else "out of memory"
            largest = max(terms, key=lambda term: float(terms[term][row]))
            largest_bytes = float(terms[largest][row])
    host_capacity = search.scenario.host_memory_capacity_bytes
    if host_bytes > host_capacity:
        return (
            f"{layout}: out of the host's memory; a node needs {gib(host_bytes):.1f} GiB of "
            f"{gib(host_capacity):.1f} GiB"
        )
    if leanest_bytes <= capacity:
        return None
    return (
        f"{layout}: {state}; its leanest configuration (micro-batch {leanest.micro_batch}, "
        f"recompute {leanest.recompute}) needs {gib(leanest_bytes):.1f} GiB of "
        f"{gib(capacity):.1f} GiB, {gib(leanest_bytes - capacity):.1f} GiB short; largest term: "
        f"{largest}, {gib(largest_bytes):.1f} GiB"
    )
