"""Search every candidate of a job and rank them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.cost import paper
from axonn_tune.cost.links import placement_links
from axonn_tune.cost.prices import Links
from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.candidates import with_micro_batches
from axonn_tune.search.search import Search
from axonn_tune.search.uncertainty import Uncertainty, uncertainty
from axonn_tune.spec.grid import ORDERS, CandidateTable, Ints, Placements
from axonn_tune.spec.plan import Array
from axonn_tune.step.evaluate import Evaluation, Evaluator, memory_bytes, rows_by_stages
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

LARGEST_GPU_COUNT = 2**22
MEMORY_REASON = "out of memory"
VARIANT_REASON = "not to be cut into so many virtual stages"


@dataclass(frozen=True, eq=False)
class Ranking:
    """The result of a search in rank order; columns have one entry per candidate.

    A grid, in each rank order that was searched, stands for its best configuration, unless
    the search wanted every configuration.
    """

    search: Search
    table: CandidateTable
    variant: Ints  # indexes the search's variants
    step_seconds: Array
    exposed_seconds: Array
    bubble_seconds: Array
    memory_bytes: Array
    fits: np.ndarray
    paper_seconds: Array | None
    rejected: Mapping[str, int]
    n_evaluated: int  # configurations

    def __len__(self) -> int:
        return len(self.table)

    def top(self, n: int | None = None) -> list[Prediction]:
        """The first n predictions, or all, with how far the fastest of them can be trusted."""
        count = len(self) if n is None else min(n, len(self))
        known = self.uncertainty
        index = {int(row): i for i, row in enumerate(known.rows)}
        return [
            replace(
                self.prediction(row),
                spread_fraction=float(known.spread[index[row]]) if row in index else None,
                p_best=float(known.p_best[index[row]]) if row in index else None,
            )
            for row in range(count)
        ]

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """Of the fastest rows that fit."""
        return uncertainty(self.search, self.table, self.variant, self.step_seconds, self.fits)

    def prediction(self, row: int) -> Prediction:
        """The prediction at one row (row 0 is the best)."""
        search = self.search
        model, job, machine = search.model, search.job, search.machine
        variant = search.variants[int(self.variant[row])]
        single = self.table.take(slice(row, row + 1))
        _, terms = memory_bytes(search, variant, single)
        seconds, exposed, bubble = (
            float(column[row])
            for column in (self.step_seconds, self.exposed_seconds, self.bubble_seconds)
        )
        per_gpu = 1e-12 / (seconds * job.n_gpus)
        tflops = model.model_flops(job.tokens, job.seq_len) * per_gpu
        hardware_flops = model.hardware_flops(job.tokens, job.seq_len, variant.recompute)
        hardware_tflops = hardware_flops * per_gpu
        peak_tflops = machine.peak_flops_per_s(job.dtype) * 1e-12
        placement = int(self.table.placement[row])
        return Prediction(
            rank=row + 1,
            strategy=search.strategy.name,
            grid=self.table.placements.grid(placement),
            order=ORDERS[int(self.table.placements.order[placement])],
            micro_batch=int(self.table.micro_batch[row]),
            n_microsteps=int(single.n_microsteps(job.global_batch)[0]),
            variant=variant,
            step_seconds=seconds,
            compute_seconds=seconds - exposed - bubble,
            exposed_communication_seconds=exposed,
            bubble_seconds=bubble,
            tflops_per_gpu=tflops,
            hardware_tflops_per_gpu=hardware_tflops,
            mfu=tflops / peak_tflops,
            hfu=hardware_tflops / peak_tflops,
            tokens_per_second_per_gpu=job.tokens / (seconds * job.n_gpus),
            memory_bytes=float(self.memory_bytes[row]),
            memory_terms_bytes={term: float(values[0]) for term, values in terms.items()},
            memory_capacity_bytes=search.memory_capacity_bytes,
            fits=bool(self.fits[row]),
            paper_communication_seconds=None
            if self.paper_seconds is None
            else float(self.paper_seconds[placement]),
        )


def run(search: Search) -> Ranking:
    """Evaluate every candidate that fits (with `include_oom` all) and rank them.

    Raises
    ------
    NoCandidateError
        No grid is legal, or none fits; the message says which GPU count would do.
    """
    placements, rejected = _placements(search)
    table, without_micro_batch = with_micro_batches(
        placements, search.job.global_batch, search.constraints
    )
    rejected |= without_micro_batch
    if not len(table):
        raise search.no_grid_error(rejected)
    links = placement_links(search.machine, placements)
    parts = [
        _evaluate(search, table, rows, links, index)
        for index, variant in enumerate(search.variants)
        for rows in rows_by_stages(search, variant, table)
    ]
    if not parts:
        raise search.no_grid_error({**rejected, VARIANT_REASON: len(table)})
    n_oom = sum(part.n_oom for part in parts)
    if n_oom:
        rejected[MEMORY_REASON] = n_oom
    if not sum(part.rows.size for part in parts):
        raise _nothing_fits(search, min(part.least_bytes for part in parts))
    paper_seconds = None
    if placements.axes.is_grid:
        paper_seconds = paper.communication_seconds(search.model, search.job, placements, links)
    return _ranked(search, table, parts, rejected, paper_seconds)


@dataclass(frozen=True, eq=False)
class _Part:
    """One variant: which rows of the table were timed, and with what result."""

    variant: int
    rows: Ints
    times: Evaluation
    memory: Array
    fits: np.ndarray
    n_oom: int
    least_bytes: float


def _placements(search: Search) -> tuple[Placements, dict[str, int]]:
    n_gpus = search.job.n_gpus
    if n_gpus > LARGEST_GPU_COUNT:
        raise InputError(
            f"--gpus {n_gpus} is above {LARGEST_GPU_COUNT}, the largest count searched"
        )
    placements, rejected = search.legal_placements(n_gpus)
    if not len(placements):
        raise search.no_grid_error(rejected)
    return placements, rejected


def _evaluate(search: Search, table: CandidateTable, rows: Ints, links: Links, index: int) -> _Part:
    """Time those of the rows that fit, or all of them, in the variant with that index."""
    variant = search.variants[index]
    memory, _ = memory_bytes(search, variant, table.take(rows))
    fits = memory <= search.memory_capacity_bytes
    n_oom, least = int((~fits).sum()), float(memory.min())
    if not search.include_oom:
        rows, memory, fits = rows[fits], memory[fits], fits[fits]
    times = Evaluation(*np.zeros((3, 0)))
    if rows.size:
        times = Evaluator(search, variant, table.take(rows), links).evaluate()
    return _Part(index, rows, times, memory, fits, n_oom, least)


def _ranked(
    search: Search,
    table: CandidateTable,
    parts: Sequence[_Part],
    rejected: Mapping[str, int],
    paper_seconds: Array | None,
) -> Ranking:
    rows = np.concatenate([part.rows for part in parts])
    variant = np.concatenate([np.full(part.rows.size, part.variant) for part in parts])
    step = np.concatenate([part.times.step_seconds for part in parts])
    exposed = np.concatenate([part.times.exposed_communication_seconds for part in parts])
    bubble = np.concatenate([part.times.bubble_seconds for part in parts])
    memory = np.concatenate([part.memory for part in parts])
    fits = np.concatenate([part.fits for part in parts])
    candidates = table.take(rows)
    # What does not fit comes last, the leanest first.
    keys = [memory, np.where(fits, step, memory), ~fits]
    if search.cost_model == "paper" and paper_seconds is not None:
        keys.insert(2, np.where(fits, paper_seconds[candidates.placement], 0.0))
    order = np.lexsort(keys)
    if not search.every_configuration:
        _, first = np.unique(candidates.placement[order], return_index=True)
        order = order[np.sort(first)]
    return Ranking(
        search,
        candidates.take(order),
        variant[order],
        step[order],
        exposed[order],
        bubble[order],
        memory[order],
        fits[order],
        paper_seconds,
        rejected,
        rows.size,
    )


def _nothing_fits(search: Search, least_bytes: float) -> NoCandidateError:
    job, capacity = search.job, search.memory_capacity_bytes
    message = (
        f"model '{search.model.name}' fits on no grid of {job.n_gpus} {search.machine.gpu.name}: "
        f"the smallest needs {gib(least_bytes):.1f} GiB of {gib(capacity):.1f} GiB per GPU"
    )
    enough = _gpus_that_fit(search)
    hint = f"; it fits from {enough} GPUs" if enough else "; no count of GPUs tried fits it"
    return NoCandidateError(message + hint)


def _gpus_that_fit(search: Search) -> int | None:
    """The first doubling of the GPU count on which some candidate fits."""
    n_gpus = 2 * search.job.n_gpus
    while n_gpus <= LARGEST_GPU_COUNT:
        placements, _ = search.legal_placements(n_gpus)
        table, _ = with_micro_batches(placements, search.job.global_batch, search.constraints)
        for variant in search.variants if len(table) else ():
            for rows in rows_by_stages(search, variant, table):
                memory, _ = memory_bytes(search, variant, table.take(rows))
                if (memory <= search.memory_capacity_bytes).any():
                    return n_gpus
        n_gpus *= 2
    return None
