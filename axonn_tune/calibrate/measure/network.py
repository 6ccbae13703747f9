"""Measure the network: its levels, collectives over every choice of groups, interference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
import torch.distributed as dist

from axonn_tune.calibrate import plan
from axonn_tune.calibrate.measure.interference import Interference
from axonn_tune.calibrate.measure.links import (
    Groups,
    is_supported,
    pair_rate,
    time_collective,
    whole_bytes,
)
from axonn_tune.calibrate.measure.topology import (
    known_units,
    measured_units,
    merged_units,
    pairs_to_measure,
)
from axonn_tune.calibrate.setting import Setting
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.spec.points import LinkPoint

PAIR_BYTES, PAIR_REPEATS = 2**18, 5
# Share of a rank's memory that one message may take; a collective holds a few of its size.
MESSAGE_SHARE = 1 / 8
# How much longer a message may take that a search asks for.
WANTED_LONGER = 10.0
N_ROUNDS = {True: 3, False: 9}  # of interference, in a quick and in a thorough calibration


def measure_units(setting: Setting) -> list[int]:
    """Ranks of the units of the link levels: as told, else as names and rates of pairs say."""
    if setting.request.units is not None:
        return list(setting.request.units)
    pairs = pairs_to_measure(setting.n_ranks, setting.n_per_node)
    setting.progress.expect(len(pairs))
    rates = {
        pair: setting.ledger.result(
            f"pair {pair[0]}, {pair[1]}",
            partial(pair_rate, pair, PAIR_BYTES, setting.device, PAIR_REPEATS),
        )
        for pair in pairs
    }
    known = known_units(setting.stations, setting.n_per_node)
    return merged_units(known, measured_units(rates, setting.n_ranks))


@dataclass(frozen=True)
class Links:
    """Timed collectives, and what a reader should know of them."""

    points: tuple[LinkPoint, ...] = ()
    notes: tuple[str, ...] = ()


def measure_links(setting: Setting, units: Sequence[int]) -> Links:
    """Every kind of collective that there is, over every choice of groups."""
    extent = setting.extent
    kinds = [kind for kind in plan.kinds(extent) if _is_supported(setting, kind)]
    choices = plan.group_choices(extent, setting.n_ranks, setting.n_per_node, units)
    sizes = plan.message_sizes(extent, MESSAGE_SHARE * setting.memory_bytes)
    setting.progress.expect(len(choices) * len(kinds) * len(sizes))
    wanted = setting.request.largest_messages
    points: list[LinkPoint] = []
    for groups in choices:
        mesh = _LazyMesh(groups, setting.device)
        for kind in kinds:
            largest = wanted.get((kind, groups.stride, groups.size), 0) if groups.is_whole else 0
            points += _series(setting, kind, groups, mesh, sizes, largest)
        mesh.close()
    lacking = sorted(set(plan.kinds(extent)) - set(kinds))
    backend = dist.get_backend()
    notes = (f"{kind} was not measured: {backend} does not have it" for kind in lacking)
    return Links(tuple(points), tuple(notes))


def _is_supported(setting: Setting, kind: str) -> bool:
    setting.progress.expect(1)
    mesh = _LazyMesh(Groups(1, setting.n_ranks, 1, True), setting.device)
    supported: bool = setting.ledger.result(
        f"{kind} is supported", lambda: is_supported(kind, mesh.get())
    )
    mesh.close()
    return supported


def _series(
    setting: Setting,
    kind: str,
    groups: Groups,
    mesh: _LazyMesh,
    sizes: Sequence[int],
    largest: int,
) -> list[LinkPoint]:
    """One kind over one choice of groups, from small messages to those that take too long.

    Up to `largest`, which is among them, they may take longer.
    """
    points: list[LinkPoint] = []
    steps = sorted({*sizes, largest} - {0})
    for nbytes in dict.fromkeys(whole_bytes(size, groups.size) for size in steps):
        if points:
            expected = points[-1].seconds * nbytes / points[-1].nbytes
            is_wanted = nbytes <= whole_bytes(largest, groups.size)
            if expected > setting.extent.longest_seconds * (WANTED_LONGER if is_wanted else 1.0):
                break

        def find(nbytes: int = nbytes) -> tuple[float, float]:
            timing = time_collective(kind, nbytes, groups, mesh.get(), setting.effort)
            return timing.seconds, timing.spread_fraction

        key = f"{kind} of {nbytes} bytes, {groups}"
        seconds, spread = setting.ledger.result(key, find)
        stride, size, n_rings, everywhere = astuple(groups)
        points.append(LinkPoint(kind, stride, size, n_rings, everywhere, nbytes, seconds, spread))
    setting.progress.expect(len(points) - len(sizes))
    return points


def measure_interference(setting: Setting) -> list[tuple[float, float]]:
    """Slowdowns of products beside an all-reduce over all ranks, and of this, by round."""
    n_rounds = N_ROUNDS[setting.extent.is_quick]
    setting.progress.expect(n_rounds)
    mesh = _LazyMesh(Groups(1, setting.n_ranks, 1, True), setting.device)
    begun: list[Interference] = []

    def find() -> tuple[float, float]:
        if not begun:
            most = min(setting.extent.most_bytes, int(MESSAGE_SHARE * setting.memory_bytes))
            begun.append(Interference(mesh.get(), setting.request.dtypes[0], most))
        return begun[0].slowdowns()

    rounds = [setting.ledger.result(f"interference {i + 1}", find) for i in range(n_rounds)]
    mesh.close()
    return [(of_product, of_collective) for of_product, of_collective in rounds]


class _LazyMesh:
    """A mesh that is made when something is left to measure on it; all ranks decide alike."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._mesh: Mesh | None = None

    def get(self) -> Mesh:
        """The mesh."""
        if self._mesh is None:
            self._mesh = self._groups.mesh(self._device)
        return self._mesh

    def close(self) -> None:
        """Give its groups back."""
        if self._mesh is not None:
            self._mesh.close()
