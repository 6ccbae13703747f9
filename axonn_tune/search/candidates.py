"""Enumerate every layout of a number of GPUs, and say why layouts are rejected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.batches import nearest_multiples, nearest_shared_batch
from axonn_tune.search.factors import divisors, factorisations
from axonn_tune.search.search import Search
from axonn_tune.spec.candidates import CandidateTable, Ints, Placements
from axonn_tune.spec.layout import AXES, Axes
from axonn_tune.spec.model import Model

# Largest distance at which another number of GPUs is looked for, if this one admits no grid.
NEAREST_TRIED = 1024
# So many numbers on each side are tried one by one, and half as many over each doubling of the
# distance from there on: a search that fails takes milliseconds, and 100,000 of them minutes.
TRIED_ONE_BY_ONE = 64

# The axes that split the products of one token.
TENSOR_AXES = ("x", "y", "z", "tensor")


def legal_placements(search: Search) -> tuple[Placements, dict[str, int]]:
    """Return the placements that keep every rule, and how many were rejected for each reason.

    A placement that breaks several rules counts for the first.
    """
    layouts, rejected = legal_layouts(search)
    return layouts.in_orders(search.constraints.orders), rejected


def legal_layouts(search: Search) -> tuple[Placements, dict[str, int]]:
    """Return the same as `legal_placements`, but each layout only in the first order.

    Whether a layout is legal, and which batches it can share, does not depend on its order.
    """
    axes = search.scenario.strategy.axes
    sizes = factorisations(search.scenario.job.n_gpus, len(axes.names))
    if axes.folded:
        sizes = _with_folded(sizes, axes, search.scenario.model)
    orders = search.constraints.orders
    layouts = Placements.of_sizes(sizes, orders[:1], axes)
    n_orders = layouts.n_orders(orders)
    legal = np.ones(len(layouts), dtype=bool)
    rejected: dict[str, int] = {}
    for reason, mask in broken_rules(search, layouts).items():
        n_rejected = int(n_orders[mask & legal].sum())
        if n_rejected:
            rejected[reason] = n_rejected
        legal &= ~mask
    return layouts.take(legal), rejected


def _with_folded(sizes: Ints, axes: Axes, model: Model) -> Ints:
    """Return each column with every size of the folded axis that divides the model's experts."""
    choices = divisors(model.n_experts)
    rows = [axes.names.index(axis) for axis in axes.folded.split("*")]
    all_sizes = np.concatenate(
        [np.repeat(sizes, choices.size, axis=1), np.tile(choices, sizes.shape[1])[None]]
    )
    return all_sizes[:, all_sizes[rows].prod(axis=0) % all_sizes[-1] == 0]


def broken_rules(search: Search, placements: Placements) -> Mapping[str, np.ndarray]:
    """Return for each reason the placements that it rejects, the user's constraints first."""
    constraints = search.constraints
    scenario = search.scenario
    masks: dict[str, np.ndarray] = {}
    for axis, size in constraints.axes.items():
        masks[f"{_shown(axis)} fixed to {size}"] = placements.size(axis) != size
    split = [axis for axis in placements.axes.names if axis in TENSOR_AXES]
    if constraints.max_tp is not None and split:
        masks[f"{'*'.join(map(_shown, split))} above --max-tp {constraints.max_tp}"] = (
            placements.size("*".join(split)) > constraints.max_tp
        )
    return masks | scenario.rejections(placements)


def _shown(axis: str) -> str:
    """Return the name of an axis as messages show it."""
    return f"G_{axis}" if axis in AXES else axis


def with_micro_batches(
    search: Search, placements: Placements, n_orders: Ints | None = None
) -> tuple[CandidateTable, dict[str, int]]:
    """Return each placement with every micro-batch that divides its share of the global batch.

    The second result counts the placements that have none, by reason. Each stands for `n_orders`
    placements where that is given, shape (P,).
    """
    wanted = search.constraints.micro_batch
    global_batch = search.scenario.job.global_batch
    share = global_batch // placements.size("*".join(placements.axes.batch))
    shares, share_index = np.unique(share, return_inverse=True)
    choices = [divisors(int(local)) for local in shares]
    if wanted is not None:
        choices = [sizes[sizes == wanted] for sizes in choices]
    counts = np.array([sizes.size for sizes in choices], dtype=np.int64)[share_index]
    rows = np.repeat(np.arange(len(placements)), counts)
    empty = np.zeros(0, dtype=np.int64)
    micro_batch = np.concatenate([empty, *(choices[index] for index in share_index)])
    rejected = {}
    if wanted is not None and (counts == 0).any():
        reason = f"micro-batch {wanted} does not divide the share of the batch"
        n_each = np.ones(len(placements), np.int64) if n_orders is None else n_orders
        rejected[reason] = int(n_each[counts == 0].sum())
    return CandidateTable(placements, rows, micro_batch), rejected


def executions(search: Search, table: CandidateTable) -> Iterator[CandidateTable]:
    """Yield the table with every recomputation and number of virtual stages that is tried.

    Each of these tables holds candidates that are alike (`CandidateTable.alike`). Candidates that
    cannot be cut into the virtual stages are left out.
    """
    scenario = search.scenario
    for recompute in search.recomputes:
        for n_virtual in scenario.strategy.n_virtual:
            executed = table.executed(recompute, n_virtual)
            for rows in executed.alike():
                part = executed.take(rows)
                admitted = scenario.strategy.admits(scenario.model, scenario.job, part)
                if admitted.any():
                    yield part.take(admitted)


def no_grid_error(search: Search, rejected: Mapping[str, int]) -> NoCandidateError:
    """Return an error that says why grids were rejected, and which batches and GPUs admit one."""
    reasons = "; ".join(
        f"{count} {'layouts' if count > 1 else 'layout'}: {reason}"
        for reason, count in rejected.items()
    )
    n_gpus = search.scenario.job.n_gpus
    global_batch = search.scenario.job.global_batch

    def admits(n: int) -> bool:
        other = search.on_gpus(n)
        table, _ = with_micro_batches(other, legal_layouts(other)[0])
        return len(table) > 0 and next(executions(other, table), None) is not None

    batches = nearest_batches(search, legal_layouts(with_shared_batch(search))[0])
    hint = batch_hint(search, batches)
    counts = nearest_counts(n_gpus, admits)
    if counts:
        hint += f"; counts of GPUs nearby that do: {', '.join(map(str, counts))}"
    return NoCandidateError(
        f"no grid for {n_gpus} GPUs and a global batch of {global_batch} ({reasons}){hint}"
    )


def batch_hint(search: Search, batches: Sequence[int]) -> str:
    """Return a phrase that names global batches that are possible; it is empty without any.

    Some GPUs may have no share of these batches, and so the phrase also names a batch of which all
    GPUs have a share.
    """
    if not batches:
        return ""
    job = search.scenario.job
    micro_batch = search.constraints.micro_batch or 1
    shared = nearest_shared_batch(job.global_batch, job.n_gpus, False, micro_batch)
    named = f"; nearest global batches that do: {', '.join(map(str, batches))} sequences"
    if job.n_gpus == 1:
        return named
    return f"{named}, and all {job.n_gpus} GPUs can share {shared} evenly"


def with_shared_batch(search: Search) -> Search:
    """Return the same search with a global batch that every layout can share."""
    job = search.scenario.job
    return search.on_batches([job.n_gpus * (search.constraints.micro_batch or 1)])


def nearest_batches(search: Search, placements: Placements) -> list[int]:
    """Return the nearest smaller and the nearest larger global batch that a placement can share.

    There is none without placements, or if some placement can share the search's batch.
    """
    wanted = search.scenario.job.global_batch
    if not len(placements):
        return []
    ranks = placements.size("*".join(placements.axes.batch))
    nearest = nearest_multiples(wanted, ranks * (search.constraints.micro_batch or 1))
    return [] if wanted in nearest else [batch for batch in nearest if batch]


def nearest_counts(
    n_gpus: int, admits: Callable[[int], bool], farthest: int = NEAREST_TRIED, step: int = 1
) -> Sequence[int]:
    """Return a near smaller and a near larger number of GPUs that `admits` accepts.

    Numbers at multiples of a step from this one are tried, and none as far as `farthest`. They are
    the nearest ones up to `TRIED_ONE_BY_ONE` steps away; farther away, only multiples of growing
    powers of two are tried.
    """
    sides = (_counts_tried(n_gpus, side, farthest, step) for side in (-1, 1))
    nearest = (next((n for n in counts if admits(n)), None) for counts in sides)
    return [n for n in nearest if n is not None]


def _counts_tried(n_gpus: int, side: int, farthest: int, step: int) -> Iterator[int]:
    """Yield numbers above zero on one side of a number, -1 or 1, each farther away than before."""
    count = n_gpus + side * step
    while count > 0 and abs(count - n_gpus) < farthest:
        yield count
        while step * TRIED_ONE_BY_ONE <= abs(count - n_gpus):
            step *= 2
        count += side * step
        count -= side * (side * count % step)
