"""The links of all groups of placements, and which placements have the same links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from axonn_tune.cost.links import AxisLinks, KindLinks, axis_links
from axonn_tune.cost.stepped import HopDelays, SteppedLinks, SteppedTrees
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.candidates import Ints, Placements, distinct
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array


@dataclass(frozen=True, eq=False)
class PairedLinks:
    """The links of the groups of placements, once for each distinct pair of stride and size.

    Groups with the same stride and size have the same links, whatever their axis.

    placements
        The placements, P of them.
    of_pairs
        Links of pairs, and by group each placement's pair. The groups to which tokens are sent once
        get others than those of the same stride and size.
    """

    placements: Placements
    of_pairs: Sequence[tuple[AxisLinks, Mapping[str, Ints]]]

    @classmethod
    def of(
        cls, machine: Machine, placements: Placements, sent_once: Experts | None = None
    ) -> PairedLinks:
        """Return the links of placements; `sent_once` is that of `placement_links`."""
        groups = placements.axes.groups
        alone = [group for group in groups if sent_once is not None and group == EXPERT]
        together = [group for group in groups if group not in alone]
        of_pairs = []
        for alike, experts in ((alone, sent_once), (together, None)):
            if not alike:
                continue
            stride = np.concatenate([placements.stride(group) for group in alike])
            size = np.concatenate([placements.size(group) for group in alike])
            n_ranks = np.tile(placements.n_ranks, len(alike))
            first, pair_of = distinct(stride, size, n_ranks)
            links = axis_links(machine, stride[first], size[first], experts, n_ranks[first])
            pairs = np.split(pair_of, len(alike))
            of_pairs.append((links, dict(zip(alike, pairs, strict=True))))
        return cls(placements, of_pairs)

    @cached_property
    def placed(self) -> dict[str, AxisLinks]:
        """The `AxisLinks` of each group for every placement, shape (P,)."""
        links = {
            group: of_pairs.take(rows)
            for of_pairs, pairs in self.of_pairs
            for group, rows in pairs.items()
        }
        return {group: links[group] for group in self.placements.axes.groups}

    def alike(self) -> Ints:
        """Return a number for each placement, the same for placements with equal links.

        They have one layout, and each of their groups has the same bandwidth and latency, so that
        their steps take equally long. Most rank orders of a layout differ only in the strides of
        groups that leave their node anyway.
        """
        layouts, number = distinct(*self.placements.sizes)
        if layouts.size == number.size:
            return number
        numbers = [number]
        for of_pairs, pairs in self.of_pairs:
            known: dict[bytes, int] = {}
            columns = np.vstack(_columns(of_pairs)).T
            alike = np.array([known.setdefault(pair.tobytes(), len(known)) for pair in columns])
            numbers += [alike[rows] for rows in pairs.values()]
        return distinct(*numbers)[1]


def placement_links(
    machine: Machine, placements: Placements, sent_once: Experts | None = None
) -> dict[str, AxisLinks]:
    """Return the `AxisLinks` of each group for every placement, shape (P,).

    `sent_once` holds the experts to which tokens are sent once, which changes the bandwidth of the
    groups of experts; it is None where a copy travels to each expert.
    """
    return PairedLinks.of(machine, placements, sent_once).placed


def _columns(links: AxisLinks | KindLinks | SteppedLinks | SteppedTrees | HopDelays) -> list[Array]:
    """Return all arrays of the links of groups, each of shape (P,) or (levels, P)."""
    columns = []
    for field in fields(links):
        value = getattr(links, field.name)
        if isinstance(value, np.ndarray):
            columns.append(value)
        elif isinstance(value, Mapping):
            columns += [column for of_kind in value.values() for column in _columns(of_kind)]
        elif isinstance(value, SteppedLinks | SteppedTrees):
            columns += _columns(value)
        elif field.name == "delays":
            columns += [column for delay in value for column in _columns(delay)]
    return columns
