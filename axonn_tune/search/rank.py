"""Search every candidate of a job and rank them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.cost import paper
from axonn_tune.cost.links import placement_links
from axonn_tune.cost.pricing import Links
from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.candidates import legal_placements, no_grid_error, with_micro_batches
from axonn_tune.search.evaluate import Evaluator, memory_bytes
from axonn_tune.search.prediction import Prediction
from axonn_tune.search.problem import Search
from axonn_tune.search.uncertainty import Uncertainty, uncertainty
from axonn_tune.spec.grid import ORDERS, CandidateTable, Ints, Placements
from axonn_tune.spec.model import RECOMPUTES
from axonn_tune.spec.plan import Array
from axonn_tune.units import gib

LARGEST_GPU_COUNT = 2**22
MEMORY_REASON = "out of memory"


@dataclass(frozen=True, eq=False)
class Ranking:
    """The result of a search in rank order; columns have one entry per candidate.

    A grid, in each rank order that was searched, stands for its best configuration, unless
    the search wanted every configuration.
    """

    search: Search
    table: CandidateTable
    recompute: Ints  # indexes RECOMPUTES
    step_seconds: Array
    exposed_seconds: Array
    memory_bytes: Array
    fits: np.ndarray
    paper_seconds: Array
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
        return uncertainty(self.search, self.table, self.recompute, self.step_seconds, self.fits)

    def prediction(self, row: int) -> Prediction:
        """The prediction at one row (row 0 is the best)."""
        search = self.search
        model, job, machine = search.model, search.job, search.machine
        recompute = RECOMPUTES[int(self.recompute[row])]
        single = self.table.take(slice(row, row + 1))
        _, terms = memory_bytes(search, recompute, single)
        seconds, exposed = float(self.step_seconds[row]), float(self.exposed_seconds[row])
        per_gpu = 1e-12 / (seconds * job.n_gpus)
        tflops = model.model_flops(job.tokens, job.seq_len) * per_gpu
        hardware_tflops = model.hardware_flops(job.tokens, job.seq_len, recompute) * per_gpu
        peak_tflops = machine.peak_flops_per_s(job.dtype) * 1e-12
        placement = int(self.table.placement[row])
        return Prediction(
            rank=row + 1,
            strategy=search.strategy.NAME,
            grid=self.table.placements.grid(placement),
            order=ORDERS[int(self.table.placements.order[placement])],
            micro_batch=int(self.table.micro_batch[row]),
            n_microsteps=int(single.n_microsteps(job.global_batch)[0]),
            recompute=recompute,
            step_seconds=seconds,
            compute_seconds=seconds - exposed,
            exposed_communication_seconds=exposed,
            tflops_per_gpu=tflops,
            hardware_tflops_per_gpu=hardware_tflops,
            mfu=tflops / peak_tflops,
            hfu=hardware_tflops / peak_tflops,
            tokens_per_second_per_gpu=job.tokens / (seconds * job.n_gpus),
            memory_bytes=float(self.memory_bytes[row]),
            memory_terms_bytes={term: float(values[0]) for term, values in terms.items()},
            memory_capacity_bytes=search.memory_capacity_bytes,
            fits=bool(self.fits[row]),
            paper_communication_seconds=float(self.paper_seconds[placement]),
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
        raise no_grid_error(search.job.n_gpus, search.constraints, search.rules, rejected)
    links = placement_links(search.machine, placements)
    parts = [_evaluate(search, table, links, recompute) for recompute in search.recomputes]
    n_oom = sum(int((~part.fits).sum()) for part in parts)
    if n_oom:
        rejected[MEMORY_REASON] = n_oom
    if n_oom == len(table) * len(parts) and not search.include_oom:
        raise _nothing_fits(search, min(float(part.memory.min()) for part in parts))
    paper_seconds = paper.communication_seconds(search.model, search.job, placements, links)
    return _ranked(search, table, parts, rejected, paper_seconds)


@dataclass(frozen=True, eq=False)
class _Part:
    """One recomputation: which rows of the table were timed, and with what result."""

    recompute: str
    rows: Ints
    step_seconds: Array
    exposed_seconds: Array
    memory: Array
    fits: np.ndarray


def _placements(search: Search) -> tuple[Placements, dict[str, int]]:
    n_gpus = search.job.n_gpus
    if n_gpus > LARGEST_GPU_COUNT:
        raise InputError(
            f"--gpus {n_gpus} is above {LARGEST_GPU_COUNT}, the largest count searched"
        )
    placements, rejected = legal_placements(n_gpus, search.constraints, search.rules)
    if not len(placements):
        raise no_grid_error(n_gpus, search.constraints, search.rules, rejected)
    return placements, rejected


def _evaluate(search: Search, table: CandidateTable, links: Links, recompute: str) -> _Part:
    memory, _ = memory_bytes(search, recompute, table)
    fits = memory <= search.memory_capacity_bytes
    rows = np.arange(len(table)) if search.include_oom else np.flatnonzero(fits)
    if not rows.size:
        return _Part(recompute, rows, np.zeros(0), np.zeros(0), memory, fits)
    times = Evaluator(search, recompute, table.take(rows), links).evaluate()
    return _Part(
        recompute, rows, times.step_seconds, times.exposed_communication_seconds, memory, fits
    )


def _ranked(
    search: Search,
    table: CandidateTable,
    parts: Sequence[_Part],
    rejected: Mapping[str, int],
    paper_seconds: Array,
) -> Ranking:
    rows = np.concatenate([part.rows for part in parts])
    recompute = np.concatenate(
        [np.full(part.rows.size, RECOMPUTES.index(part.recompute)) for part in parts]
    )
    step = np.concatenate([part.step_seconds for part in parts])
    exposed = np.concatenate([part.exposed_seconds for part in parts])
    memory = np.concatenate([part.memory[part.rows] for part in parts])
    fits = np.concatenate([part.fits[part.rows] for part in parts])
    candidates = table.take(rows)
    # What does not fit comes last, the leanest first.
    keys = [memory, np.where(fits, step, memory), ~fits]
    if search.cost_model == "paper":
        keys.insert(2, np.where(fits, paper_seconds[candidates.placement], 0.0))
    order = np.lexsort(keys)
    if not search.every_configuration:
        _, first = np.unique(candidates.placement[order], return_index=True)
        order = order[np.sort(first)]
    return Ranking(
        search,
        candidates.take(order),
        recompute[order],
        step[order],
        exposed[order],
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
        placements, _ = legal_placements(n_gpus, search.constraints, search.rules)
        table, _ = with_micro_batches(placements, search.job.global_batch, search.constraints)
        for recompute in search.recomputes if len(table) else ():
            memory, _ = memory_bytes(search, recompute, table)
            if (memory <= search.memory_capacity_bytes).any():
                return n_gpus
        n_gpus *= 2
    return None
