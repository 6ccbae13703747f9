"""The links of all groups of placements, and which placements have the same links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np

from axonn_tune.cost.links import AxisLinks, HopDelays, KindLinks, SteppedLinks, axis_links
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.candidates import Ints, Placements, distinct
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array


def placement_links(
    machine: Machine, placements: Placements, sent_once: Experts | None = None
) -> dict[str, AxisLinks]:
    """Return the `AxisLinks` of each group for every placement, shape (P,).

    Groups with the same stride and size have the same links, whatever their axis, and are computed
    once. `sent_once` holds the experts to which tokens are sent once, which changes the bandwidth
    of the groups of experts; it is None where a copy travels to each expert.
    """
    links = {
        group: of_pairs.take(rows)
        for of_pairs, pairs in _links_of_pairs(machine, placements, sent_once)
        for group, rows in pairs.items()
    }
    return {group: links[group] for group in placements.axes.groups}


def alike_placements(
    machine: Machine, placements: Placements, sent_once: Experts | None = None
) -> Ints:
    """Return a number for each placement, the same for placements with equal links.

    They have one layout, and each of their groups has the same bandwidth and latency, so that their
    steps take equally long. Of the rank orders of a layout most differ only in the strides of
    groups that leave their node anyway.
    """
    layouts, number = distinct(*placements.sizes)
    if layouts.size == number.size:
        return number
    numbers = [number]
    for of_pairs, pairs in _links_of_pairs(machine, placements, sent_once):
        _, alike = np.unique(np.vstack(_columns(of_pairs)), axis=1, return_inverse=True)
        numbers += [alike[rows] for rows in pairs.values()]
    return distinct(*numbers)[1]


def _links_of_pairs(
    machine: Machine, placements: Placements, sent_once: Experts | None
) -> Iterator[tuple[AxisLinks, dict[str, Ints]]]:
    """Yield the links of distinct pairs of stride and size, and by group each placement's pair.

    The groups to which tokens are sent once get others than those of the same stride and size.
    """
    groups = placements.axes.groups
    alone = [group for group in groups if sent_once is not None and group == EXPERT]
    together = [group for group in groups if group not in alone]
    for alike, experts in ((alone, sent_once), (together, None)):
        if not alike:
            continue
        stride = np.concatenate([placements.stride(group) for group in alike])
        size = np.concatenate([placements.size(group) for group in alike])
        n_ranks = np.tile(placements.n_ranks, len(alike))
        first, pair_of = distinct(stride, size, n_ranks)
        of_pairs = axis_links(machine, stride[first], size[first], experts, n_ranks[first])
        yield of_pairs, dict(zip(alike, np.split(pair_of, len(alike)), strict=True))


def _columns(links: AxisLinks | KindLinks | SteppedLinks | HopDelays) -> list[Array]:
    """Return all arrays of the links of groups, each of shape (P,) or (levels, P)."""
    columns = []
    for field in fields(links):
        value = getattr(links, field.name)
        if isinstance(value, np.ndarray):
            columns.append(value)
        elif isinstance(value, dict):
            columns += [column for of_kind in value.values() for column in _columns(of_kind)]
        elif isinstance(value, SteppedLinks):
            columns += _columns(value)
        elif field.name == "delays":
            columns += [column for delay in value for column in _columns(delay)]
    return columns
