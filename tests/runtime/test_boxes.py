"""Boxes and flat ranges say where parameters lie, and cover the whole once on any grid."""

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from axonn_tune.runtime.axonn.boxes import BlockLayout, _boxes_of_range
from axonn_tune.runtime.axonn.hashing import mix, unit_interval
from axonn_tune.runtime.axonn.mesh import rank_table
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.layout import AXES, ORDERS, grid_layout


@dataclass
class Place:
    """A rank's coordinates, in place of a mesh with process groups."""

    sizes: dict
    coordinates: dict

    def size(self, axis):
        return self.sizes[axis]

    def coordinate(self, axis):
        return self.coordinates[axis]


def places(x, y, z):
    sizes = {"x": x, "y": y, "z": z}
    for at in itertools.product(range(x), range(y), range(z)):
        yield Place(sizes, dict(zip("xyz", at, strict=True)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_boxes_of_a_range_are_its_elements_in_order(sizes, data):
    n = math.prod(sizes)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    numbers = torch.arange(n).reshape(sizes)
    covered = []
    for offsets, extent in _boxes_of_range(tuple(sizes), start, stop):
        box = numbers[tuple(slice(o, o + e) for o, e in zip(offsets, extent, strict=True))]
        assert box.shape == torch.Size(extent)
        covered += box.reshape(-1).tolist()
    assert covered == list(range(start, stop))


@given(
    parts=st.tuples(*[st.sampled_from([1, 2, 3])] * 3),
    blocks=st.tuples(*[st.integers(1, 3)] * 3),
)
def test_what_ranks_store_is_the_whole_once(parts, blocks):
    x, y, z = parts
    layout = BlockLayout((x * blocks[0] * z, 2, y * blocks[1]), ("x", None, "y"), over_z=True)
    whole = torch.arange(math.prod(layout.shape))
    stored, boxed = [], []
    for place in places(x, y, z):
        stored += layout.take(whole, place).tolist()
        for offsets, extent in layout.stored_boxes(place):
            box = whole.reshape(layout.shape)
            for dim, (offset, size) in enumerate(zip(offsets, extent, strict=True)):
                box = box.narrow(dim, offset, size)
            boxed += box.reshape(-1).tolist()
    assert boxed == stored and sorted(stored) == whole.tolist()


def test_initial_values_depend_on_the_place_in_the_whole_only():
    layout = BlockLayout((12, 1, 8), ("x", None, "y"), over_z=True)
    whole = torch.empty(96)
    layout.initialise(whole, Place(dict.fromkeys("xyz", 1), dict.fromkeys("xyz", 0)), "w", 0, 2.0)
    for place in places(2, 2, 3):
        part = torch.empty(8)
        layout.initialise(part, place, "w", 0, 2.0)
        assert torch.equal(part, layout.take(whole, place))
    other_seed, other_name = torch.empty(96), torch.empty(96)
    alone = Place(dict.fromkeys("xyz", 1), dict.fromkeys("xyz", 0))
    layout.initialise(other_seed, alone, "w", 1, 2.0)
    layout.initialise(other_name, alone, "v", 0, 2.0)
    assert not torch.isclose(other_seed, whole).any()
    assert not torch.isclose(other_name, whole).any()


def test_hashes_are_splitmix64():
    """The first outputs of the published generator from state 0 (Steele et al., 2014)."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    got = mix(torch.tensor([1, 2, 3]))
    assert [value % 2**64 for value in got.tolist()] == published


def test_hashes_are_uniform():
    values = unit_interval(mix(torch.arange(100_000)))
    assert values.min() > 0 and values.max() < 1
    assert values.mean().item() == pytest.approx(0.5, abs=0.004)
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert (counts / 5000 - 1).abs().max() < 0.06


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_stand_where_the_cost_model_puts_them(order):
    grid = grid_layout(2, 3, 4, 5)
    table = rank_table(grid, order)
    assert table.shape == (5, 4, 3, 2) and sorted(table.flatten().tolist()) == list(range(120))
    strides = Placements.of([grid], (order,)).strides[:, 0]
    for axis, stride in zip(AXES, strides, strict=True):
        along = table.movedim(AXES[::-1].index(axis), 0)
        assert (along.diff(dim=0) == stride).all()
