"""Measure the network: its levels, collectives over every choice of groups, and slowdowns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from axonn_tune.calibration import selection
from axonn_tune.calibration.measure.links import (
    Groups,
    is_supported,
    pair_rate,
    time_collective,
    whole_bytes,
)
from axonn_tune.calibration.measure.slowdowns import SlowdownTimer
from axonn_tune.calibration.measure.timing import Sampling
from axonn_tune.calibration.measure.together import MeasuringRanks
from axonn_tune.calibration.measure.topology import (
    known_units,
    measured_units,
    merged_units,
    pairs_to_measure,
)
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.spec.points import LinkPoint

# Messages of pairs of ranks: on a GPU they must take longer than the host needs to send them.
PAIR_BYTES = {"cpu": 2**18, "cuda": 2**25}
PAIR_SAMPLING = {
    "cpu": Sampling(sample_seconds=0.0, n_samples=5, max_seconds=0.0),
    "cuda": Sampling(sample_seconds=2e-3, n_samples=5, max_seconds=0.1),
}
# Share of a rank's memory that one message may take; a collective holds a few of its size.
MESSAGE_SHARE = 1 / 8
# A message that a search asks for may take longer than others by this factor.
WANTED_LONGER = 10.0
# Rounds in which slowdowns are measured.
N_ROUNDS_QUICK = 3
N_ROUNDS_THOROUGH = 9


def measure_units(ranks: MeasuringRanks) -> list[int]:
    """Return the number of ranks in a unit of each link level.

    The user may state them; else names of devices and nodes and the rates of pairs tell them.
    """
    if ranks.request.units is not None:
        return list(ranks.request.units)
    pairs = pairs_to_measure(ranks.n_ranks, ranks.n_per_node)
    ranks.progress.expect(len(pairs))
    device = ranks.device
    n_bytes = PAIR_BYTES[device.type]
    sampling = PAIR_SAMPLING[device.type]
    rates = {
        (first, second): ranks.ledger.result(
            f"pair {first}, {second}",
            partial(pair_rate, (first, second), n_bytes, device, sampling),
        )
        for first, second in pairs
    }
    known = known_units(ranks.locations, ranks.n_per_node)
    return merged_units(known, measured_units(rates, ranks.n_ranks))


@dataclass(frozen=True)
class TimedCollectives:
    """Holds timed collectives, and remarks for the reader."""

    points: tuple[LinkPoint, ...] = ()
    notes: tuple[str, ...] = ()


def measure_collectives(ranks: MeasuringRanks, units: Sequence[int]) -> TimedCollectives:
    """Time every kind of collective that the backend has, over every choice of groups."""
    extent = ranks.request.extent
    wanted_kinds = selection.collective_kinds(extent)
    kinds = [kind for kind in wanted_kinds if _is_supported(ranks, kind)]
    choices = selection.group_choices(extent, ranks.n_ranks, ranks.n_per_node, units)
    sizes = selection.message_sizes(extent, MESSAGE_SHARE * ranks.memory_bytes)
    ranks.progress.expect(len(choices) * len(kinds) * len(sizes))
    largest_messages = ranks.request.largest_messages
    points: list[LinkPoint] = []
    for groups in choices:
        mesh = _LazyMesh(groups, ranks.device)
        for kind in kinds:
            largest = 0
            if groups.is_whole:
                largest = largest_messages.get((kind, groups.stride, groups.size), 0)
            points += _growing_messages(ranks, kind, groups, mesh, sizes, largest)
        mesh.close()
    lacking = sorted(set(wanted_kinds) - set(kinds))
    backend = dist.get_backend()
    notes = (f"{kind} was not measured: {backend} does not have it" for kind in lacking)
    return TimedCollectives(tuple(points), tuple(notes))


def _is_supported(ranks: MeasuringRanks, kind: str) -> bool:
    ranks.progress.expect(1)
    mesh = _LazyMesh(Groups(1, ranks.n_ranks, 1, True), ranks.device)
    supported = ranks.ledger.result(f"{kind} is supported", lambda: is_supported(kind, mesh.get()))
    mesh.close()
    return supported


def _growing_messages(
    ranks: MeasuringRanks,
    kind: str,
    groups: Groups,
    mesh: _LazyMesh,
    sizes: Sequence[int],
    largest: int,
) -> list[LinkPoint]:
    """Time one kind over one choice of groups, from small messages to those that take too long.

    Parameters
    ----------
    largest : int
        Size that a search asks for, 0 if none does; it is measured too, and messages up to it
        may take longer. [bytes]
    """
    points: list[LinkPoint] = []
    wanted_bytes = whole_bytes(largest, groups.size)
    all_sizes = sorted({*sizes, largest} - {0})
    for nbytes in dict.fromkeys(whole_bytes(size, groups.size) for size in all_sizes):
        if points:
            expected_seconds = points[-1].seconds * nbytes / points[-1].nbytes
            longer = WANTED_LONGER if nbytes <= wanted_bytes else 1.0
            if expected_seconds > ranks.request.extent.longest_seconds * longer:
                break

        def measure(nbytes: int = nbytes) -> tuple[float, float]:
            timing = time_collective(kind, nbytes, groups, mesh.get(), ranks.sampling)
            return timing.seconds, timing.spread_fraction

        key = f"{kind} of {nbytes} bytes, {groups}"
        seconds, spread = ranks.ledger.result(key, measure)
        points.append(
            LinkPoint(
                kind,
                groups.stride,
                groups.size,
                groups.n_rings,
                groups.everywhere,
                nbytes,
                seconds,
                spread,
            )
        )
    ranks.progress.expect(len(points) - len(sizes))
    return points


def measure_slowdowns(ranks: MeasuringRanks) -> list[tuple[float, float]]:
    """Time products during an all-reduce over all ranks.

    Returns
    -------
    The relative slowdown of the products and of the all-reduce, by round.
    """
    extent = ranks.request.extent
    n_rounds = N_ROUNDS_QUICK if extent.is_quick else N_ROUNDS_THOROUGH
    ranks.progress.expect(n_rounds)
    mesh = _LazyMesh(Groups(1, ranks.n_ranks, 1, True), ranks.device)
    timer: SlowdownTimer | None = None

    def measure() -> tuple[float, float]:
        nonlocal timer
        if timer is None:
            most_bytes = min(extent.most_bytes, int(MESSAGE_SHARE * ranks.memory_bytes))
            timer = SlowdownTimer(mesh.get(), ranks.request.dtypes[0], most_bytes)
        return timer.slowdowns()

    rounds = [ranks.ledger.result(f"interference {i + 1}", measure) for i in range(n_rounds)]
    mesh.close()
    return [(product, collective) for product, collective in rounds]


class _LazyMesh:
    """A mesh that is made when something is left to measure on it; all ranks decide alike."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._mesh: Mesh | None = None

    def get(self) -> Mesh:
        """Return the mesh."""
        if self._mesh is None:
            self._mesh = self._groups.mesh(self._device)
        return self._mesh

    def close(self) -> None:
        """Give the process groups of the mesh back."""
        if self._mesh is not None:
            self._mesh.close()
