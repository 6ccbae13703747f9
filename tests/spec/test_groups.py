"""The groups of an axis, against positions in an array of ranks."""

import numpy as np
import pytest

from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.groups import AxisGroups, axes_by_ranks
from axonn_tune.spec.layout import ORDERS, Axes, Layout, grid_layout

LETTERS = {"x": "x", "y": "y", "z": "z", "d": "data"}


def lines(table, position):
    """The ranks along one dimension of a table, each as a set."""
    moved = np.moveaxis(table, position, -1)
    return {frozenset(line.tolist()) for line in moved.reshape(-1, table.shape[position])}


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_of_a_group_differ_in_one_axis(order):
    sizes = {"x": 2, "y": 3, "z": 1, "data": 4}
    placements = Placements.of([grid_layout(*sizes.values())], (order,))
    names = [LETTERS[letter] for letter in reversed(order)]
    table = np.arange(24).reshape([sizes[name] for name in names])
    for axis in sizes:
        groups = AxisGroups.of(placements, axis)
        members = [frozenset(groups.ranks(group)) for group in range(len(groups))]
        assert len(set(members)) == len(members)
        assert set(members) == lines(table, names.index(axis))
        for rank in range(24):
            group = groups.ranks(groups.group_of(rank))
            assert group[groups.place_of(rank)] == rank


def test_a_product_of_axes_is_one_group():
    axes = Axes(("tensor", "context", "data"), ("data",), ("tensor", "context*data"))
    placements = Placements.of([Layout({"tensor": 2, "context": 3, "data": 4})], axes=axes)
    groups = AxisGroups.of(placements, "context*data")
    assert [list(groups.ranks(group)) for group in range(len(groups))] == [
        list(range(0, 24, 2)),
        list(range(1, 24, 2)),
    ]


def test_groups_of_ranks_are_named_after_their_axes():
    axes = Axes(("tensor", "data"), ("data",), ("tensor", "data", "tensor*data"))
    placements = Placements.of([Layout({"tensor": 2, "data": 3})], axes=axes)
    found = axes_by_ranks(placements, rank=3)
    assert found == {(2, 3): "tensor", (1, 3, 5): "data", (0, 1, 2, 3, 4, 5): "tensor*data"}


def test_a_group_of_one_axis_has_its_name():
    found = axes_by_ranks(Placements.of([grid_layout(1, 2, 1, 2)]), rank=0)
    assert found == {(0,): "x", (0, 1): "y", (0, 2): "data"}
