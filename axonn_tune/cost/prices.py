"""The cost of the operations of a step plan on a machine.

Everything that plays a plan takes its prices from here: kernels, collectives, the host's share,
and the least time in which links can carry all messages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from axonn_tune.cost.attention import AttentionPrices
from axonn_tune.cost.collectives import call_bytes, collective_seconds, moved_fraction
from axonn_tune.cost.formats import priced_formats
from axonn_tune.cost.grouped import GroupedProducts
from axonn_tune.cost.host import copy_seconds, update_seconds
from axonn_tune.cost.links import AxisLinks, KindLinks, axis_links
from axonn_tune.cost.memory_bound import memory_bound_seconds, strided_excess_seconds
from axonn_tune.spec.candidates import CandidateTable, Ints, Rows, distinct
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import (
    Array,
    Attention,
    Collective,
    Compute,
    Gemm,
    GroupedGemm,
    HostCopy,
    HostKernel,
    HostWork,
    MemoryBound,
    Phase,
    RepeatedGemm,
    Size,
    sized,
)
from axonn_tune.spec.scenario import Scenario

Links: TypeAlias = Mapping[str, AxisLinks]


def slowest_rank_factor(machine: Machine, n_ranks: Size) -> Size:
    """Return how much slower than the mean the slowest of N equal GPUs computes.

    The expected largest of N normal deviates is about sigma sqrt(2 ln N) (Galambos, "The
    Asymptotic Theory of Extreme Order Statistics"); a synchronous step waits for it.
    """
    deviations = np.sqrt(2.0 * np.log(np.maximum(n_ranks, 1.0)))
    return 1.0 + machine.jitter_fraction.value * deviations


class KernelPrices:
    """The prices of a job's kernels on a machine.

    `attention_share` is attention's share of the FLOPs, on which the clock of the GPUs depends.
    """

    @classmethod
    def of(cls, scenario: Scenario) -> KernelPrices:
        """Return the prices in a scenario."""
        return cls(scenario.machine, scenario.job, scenario.attention_share)

    def __init__(self, machine: Machine, job: Job, attention_share: float = 0.0) -> None:
        self._machine = machine
        self._job = job
        self._formats = priced_formats(machine, job)
        self._grouped: dict[str, GroupedProducts] = {}
        self._attention = AttentionPrices(machine, job.dtype, self._formats[""].products)
        self._clock_fraction = machine.gpu.training_clock(attention_share)
        self._slowest_rank = slowest_rank_factor(machine, job.n_gpus)
        self._n_on_node = min(machine.ranks_per_node, job.n_gpus)
        self._known: dict[Hashable, Array] = {}

    def seconds_once(self, operation: Compute) -> Array:
        """Return the same as `seconds`, which may be known: kernels of other names may be alike."""
        work = _work_of(operation)
        if work not in self._known:
            self._known[work] = self.seconds(operation)
        return self._known[work]

    def seconds(self, operation: Compute) -> Array:
        """Return the time of a kernel on the slowest rank, in the shape of its sizes.

        The time includes the host's gap before the next kernel; a kernel over nothing takes no
        time. The host's own work takes as long on every rank.
        """
        if isinstance(operation, HostWork):
            return np.asarray(operation.seconds * self._machine.kernels.issue_factor.value)
        if isinstance(operation, HostKernel):
            return update_seconds(operation.nbytes, self._machine, self._n_on_node)
        seconds = self._device_seconds(operation) * self._slowest_rank
        return seconds + np.where(seconds > 0, self._machine.kernels.gap_seconds.value, 0.0)

    def wait_for_issues(self, product: Gemm) -> np.ndarray:
        """Return whether the host takes longer to issue grouped products than the GPU to form them.

        The result has the shape of their sizes; it is false for any other product.
        """
        if not isinstance(product, GroupedGemm):
            return np.asarray(False)
        issued_at_once = replace(product, issue_seconds=0.0)
        return self.seconds(issued_at_once) < self.seconds(product)

    def last_stage_factor(self, table: CandidateTable) -> Array:
        """Return how long kernels of the last stage take in terms of `seconds`, shape (C,).

        The slowest of all GPUs need not be among those of this one stage. It is among those of the
        others, at the pace of which a pipeline runs whose stages have equal work.
        """
        return self.pace_among(self._job.n_gpus / table.stages)

    def pace_among(self, n_ranks: Size) -> Array:
        """Return how long kernels take on the slowest of some ranks in terms of `seconds`."""
        return np.asarray(slowest_rank_factor(self._machine, n_ranks) / self._slowest_rank)

    def copy_seconds(self, copy: HostCopy) -> Array:
        """Return the time of a copy between GPU and host, in the shape of its sizes."""
        return copy_seconds(copy.nbytes, self._machine, self._n_on_node)

    def _device_seconds(self, operation: Gemm | Attention | MemoryBound) -> Array:
        """Return the time of a kernel on a mean GPU, without the host's gap."""
        if isinstance(operation, GroupedGemm):
            products = self._grouped_products(operation.number_format)
            seconds = self._in_training(products.seconds(operation), operation)
            issue_seconds = operation.issue_seconds * self._machine.kernels.issue_factor.value
            n_issues = operation.n_launches * operation.n_issues
            return np.maximum(seconds, n_issues * issue_seconds)
        if isinstance(operation, Gemm):
            launch_seconds = self._machine.kernels.launch_seconds.value
            seconds = self._formats[operation.number_format].seconds(operation, launch_seconds)
            if isinstance(operation, RepeatedGemm):
                seconds = seconds * operation.n_times
            return self._in_training(seconds, operation)
        if isinstance(operation, Attention):
            seconds = self._attention.seconds(operation)
            # Memory traffic bounds attention that is not fused, and the clock does not slow it.
            return seconds / self._clock_fraction if operation.fused else seconds
        return self._memory_bound_seconds(operation)

    def _memory_bound_seconds(self, operation: MemoryBound) -> Array:
        """Return the time of kernels that share the bytes of an operation evenly."""
        machine, n_launches = self._machine, operation.n_launches
        each = memory_bound_seconds(
            operation.nbytes / n_launches, machine, operation.kernel, self._job.dtype
        )
        seconds = n_launches * each * self._slowdown(operation)
        return seconds + strided_excess_seconds(
            operation.strided_bytes, machine, self._clock_fraction
        )

    def _in_training(self, seconds: Array, gemm: Gemm) -> Array:
        """Return the time of a product at the GPU's power limit, from the time of a measurement."""
        gpu = self._machine.gpu
        seconds = seconds / self._clock_fraction
        if gpu.training_peak_fraction is None:
            return seconds
        peak = self._formats[gemm.number_format].peak_flops_per_s(self._machine)
        return np.maximum(seconds, gemm.flops / (peak * gpu.training_peak_fraction.value))

    def _slowdown(self, kernel: MemoryBound) -> float:
        """Return the time of a kernel over that of one which only streams its bytes."""
        recipe = self._job.recipe
        return recipe.slowdown if recipe is not None and kernel.kernel == "cast" else 1.0

    def _grouped_products(self, number_format: str) -> GroupedProducts:
        """Return the prices of grouped products in a format; they are made once."""
        if number_format not in self._grouped:
            priced = self._formats[number_format]
            grouped = GroupedProducts(self._machine, priced.dtype, priced.products)
            self._grouped[number_format] = grouped
        return self._grouped[number_format]

    @property
    def interpolation_error(self) -> float:
        """The relative standard deviation of the error for a product that was not timed."""
        priced = self._formats.get(self._job.product_format, self._formats[""])
        return priced.products.interpolation_error


def _work_of(kernel: Compute) -> Hashable:
    """Return all on which the price of a kernel depends."""
    return type(kernel), *(
        value.tobytes() if isinstance(value, np.ndarray) else value
        for key, value in vars(kernel).items()
        if key not in ("name", "waits_for")
    )


def host_seconds(
    phases: Iterable[Phase],
    table: CandidateTable,
    issue_seconds: float,
    issue_factor: float = 1.0,
    wait_seconds_per_rank: Callable[[str], Size] | None = None,
) -> Array:
    """Return how long the host needs to issue all operations of the phases, shape (C,).

    Grouped products take an issue for each product that is not formed in a common kernel, and for
    each input that is cast by itself. Products that are repeated one after another take one issue,
    since a short loop issues them. Where the host cannot run ahead of them, they state the time
    of an issue, which `issue_factor` multiplies. The host may wait in each collective for a time
    that grows with the ranks of the group, and that the axis of the group decides.
    """
    count, of_experts, waits = np.zeros((3, len(table)))
    n_collectives: dict[str, Size] = {}
    for phase in phases:
        repeats = np.asarray(phase.repeats, dtype=np.float64)
        n_sent: dict[str, Size] = {}
        n_issues: Size = 0.0
        for op in phase.operations:
            if isinstance(op, Collective):
                n_sent[op.axis] = n_sent.get(op.axis, 0.0) + np.greater(op.nbytes, 0.0)
            elif isinstance(op, MemoryBound):
                issues = op.n_launches if op.n_issues is None else op.n_issues
                n_issues = n_issues + issues * np.greater(op.nbytes, 0.0)
            elif isinstance(op, GroupedGemm):
                issues = op.n_launches * op.n_issues
                if op.issue_seconds:
                    of_experts += repeats * issues * (op.issue_seconds * issue_factor)
                else:
                    n_issues = n_issues + issues
            elif isinstance(op, Attention):
                n_issues = n_issues + op.n_launches
            elif not isinstance(op, (HostWork, HostKernel)):
                n_issues = n_issues + 1.0
        count += repeats * n_issues
        for axis, number in n_sent.items():
            n_collectives[axis] = n_collectives.get(axis, 0.0) + repeats * number
    for axis, number in n_collectives.items():
        n_ranks = table.size(axis)
        count += number * (n_ranks > 1)
        if wait_seconds_per_rank is not None:
            waits += number * n_ranks * (n_ranks > 1) * wait_seconds_per_rank(axis)
    return count * issue_seconds + of_experts + waits


def issued_seconds(
    scenario: Scenario, phases: Sequence[Phase], table: CandidateTable
) -> list[Array]:
    """Return when the host has issued all phases of a part before each one, shape (C,) each.

    The host starts when the device does. The list is empty if it does not wait for the device, and
    so is ahead.
    """
    if not scenario.strategy.engine.awaits_device:
        return []
    factor = scenario.machine.kernels.issue_factor.value
    seconds = [host_seconds([p], table, scenario.issue_seconds, factor) for p in phases[:-1]]
    return list(accumulate(seconds, initial=np.zeros(len(table))))


def lanes(links: Links) -> np.ndarray:
    """Return the lane that each group's collectives occupy, shape (G, P); 0 for a single rank.

    Groups whose outermost links are of the same level share these links, and queue on one lane;
    groups of different levels do not hinder each other. A lane has the number of the first group
    on it, counted from 1.
    """
    level = np.stack([group_links.level for group_links in links.values()])
    first_of_lane = 1 + (level[None] == level[:, None]).argmax(axis=1)
    return np.where(level < 0, 0, first_of_lane)


# Times of collectives by all on which they depend.
SentSeconds: TypeAlias = dict[Hashable, Array]


class _Senders:
    """Prices what candidates send, each of its own sizes."""

    def __init__(self, table: CandidateTable, links: Links) -> None:
        self._table = table
        self._links = links
        self._links_of: dict[tuple[str, str], KindLinks] = {}

    def seconds(self, sent: Collective) -> Array:
        """Return the time of a collective, shape (C,)."""
        key = (sent.axis, sent.kind)
        if key not in self._links_of:
            self._links_of[key] = (
                self._links[sent.axis].kinds[sent.kind].take(self._table.placement)
            )
        return _seconds(sent, self._table.size(sent.axis), self._links_of[key])


class CollectivePrices:
    """The prices of a plan's collectives for the candidates of a table.

    Candidates that differ only in what they recompute send equal messages, and are priced once.

    Parameters
    ----------
    links : Links
        Links of the placements of the table.
    table : CandidateTable
    rows : array of int, shape (C,), or None
        Rows of the plan that the candidates are like; None where it describes just these.
    known : SentSeconds or None
        Prices that are known already over the same links, to which those found here are added.
    """

    def __init__(
        self,
        links: Links,
        table: CandidateTable,
        rows: Ints | None = None,
        known: SentSeconds | None = None,
    ) -> None:
        self._links = links
        self._table = table
        self._rows = np.arange(len(table)) if rows is None else rows
        senders, self._sender_of = distinct(table.placement, table.micro_batch, table.n_virtual)
        self._sender_rows = self._rows[senders]
        self._sender_key = table.placement[senders].tobytes(), self._sender_rows.tobytes()
        firsts, self._first_of = distinct(table.placement[senders])
        self._first_rows = self._sender_rows[firsts]
        self._senders = _Senders(table.take(senders), links)
        self._firsts = _Senders(table.take(senders[firsts]), links)
        self._seconds: dict[tuple[str, str], Array] = {}
        self._known = {} if known is None else known

    def seconds(self, operation: Collective, chunk: Rows = slice(None)) -> Array:
        """Return the time of a collective for a chunk of the candidates.

        Collectives of one name over one group have equal sizes in the whole plan. They are priced
        once, and so are all others with equal bytes and calls, such as those of the other pass.
        """
        key = (operation.name, operation.axis)
        if key not in self._seconds:
            self._seconds[key] = self._sent(operation)
        return self._seconds[key][self._sender_of[chunk]]

    def _sent(self, operation: Collective) -> Array:
        """Return the time of a collective for all senders, which may be known from another one."""
        sizes = (
            np.asarray(size, dtype=np.float64).tobytes()
            for size in (operation.nbytes, operation.n_calls, operation.gap_seconds)
        )
        key = (operation.kind, operation.axis, self._sender_key, *sizes)
        if key not in self._known:
            if self._is_same_on_placement(operation):
                of_firsts = self._firsts.seconds(sized(operation, self._first_rows))
                self._known[key] = of_firsts[self._first_of]
            else:
                self._known[key] = self._senders.seconds(sized(operation, self._sender_rows))
        return self._known[key]

    def _is_same_on_placement(self, operation: Collective) -> bool:
        """Return whether all senders on a placement send the same, such as gathered weights."""
        return self._first_rows.size < self._sender_rows.size and all(
            np.array_equal(size[self._first_rows][self._first_of], size[self._sender_rows])
            for size in (operation.nbytes, operation.n_calls)
            if isinstance(size, np.ndarray)
        )

    def least_seconds(self, phases: Iterable[Phase], chunk: Rows = slice(None)) -> Array:
        """Return the least time in which the links can carry what the phases send, for a chunk.

        Collectives of different axes may run at the same time, on different lanes, and still pass
        through the same links, for example the links of a GPU itself.
        """
        sent: dict[tuple[str, str], Size] = {}
        for phase in phases:
            repeats = np.asarray(phase.repeats, dtype=np.float64)
            in_phase: dict[tuple[str, str], Size] = {}
            for op in phase.operations:
                if isinstance(op, Collective):
                    key = (op.axis, op.kind)
                    in_phase[key] = in_phase.get(key, 0.0) + op.nbytes
            for key, nbytes in in_phase.items():
                sent[key] = sent.get(key, 0.0) + repeats * nbytes
        rows, placement = self._rows[chunk], self._table.placement[chunk]
        by_level = np.zeros((1, placement.size))
        for (axis, kind), nbytes in sent.items():
            of_rows = np.asarray(nbytes)[rows] if np.ndim(nbytes) else nbytes
            links = self._links[axis]
            passes = (
                links.all_reduce_passes
                if kind == "all_reduce"
                else moved_fraction(kind, self._table.placements.size(axis).astype(np.float64))
            )
            occupied = links.occupied_s_per_byte * passes
            by_level = by_level + occupied.take(placement, axis=1) * of_rows
        return np.asarray(by_level.max(axis=0))


def _seconds(operation: Collective, n_ranks: Array, links: KindLinks) -> Array:
    """Return the time of a collective over groups that have these sizes and links, shape (C,)."""
    each_bytes = np.broadcast_to(call_bytes(operation.nbytes, operation.n_calls), n_ranks.shape)
    chunk_bytes = each_bytes / n_ranks
    seconds = collective_seconds(
        operation.kind,
        operation.nbytes,
        operation.n_calls,
        n_ranks,
        links.bandwidth_bytes_per_s,
        links.around_seconds(chunk_bytes),
        links.tree_seconds,
        links.tree_s_per_byte,
        links.least_tree_s_per_byte,
        links.ring.seconds(chunk_bytes),
        links.tree.seconds(each_bytes),
    )
    for curve, rows in links.measured:
        n_calls = np.broadcast_to(operation.n_calls, seconds.shape)[rows]
        seconds[rows] = n_calls * curve.at(each_bytes[rows])
    is_sent = (each_bytes > 0) & (n_ranks > 1)
    return np.asarray(seconds + is_sent * operation.n_calls * operation.gap_seconds)


def group_seconds(machine: Machine, kind: str, stride: int, size: int, nbytes: Size) -> Array:
    """Return the time of one collective while all groups of this stride and size run it.

    Parameters
    ----------
    nbytes : array_like, shape (N,)
        Full buffers.

    Returns
    -------
    ndarray, shape (N,) [s]
    """
    buffers = np.atleast_1d(np.asarray(nbytes, dtype=np.float64))
    sizes = np.full(buffers.shape, size)
    links = axis_links(machine, np.full(buffers.shape, stride), sizes).kinds[kind]
    return _seconds(Collective("", kind, buffers, ""), sizes.astype(np.float64), links)
