"""Candidates: nothing forgotten, everything that falls is counted."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.errors import InputError
from axonn_tune.search.candidates import (
    Constraints,
    divisors,
    factorisations,
    legal_placements,
    with_micro_batches,
)
from axonn_tune.spec.grid import ORDERS, CandidateTable, Grid, Placements, check_order, distinct


@given(st.integers(1, 5000))
def test_divisors(n):
    assert list(divisors(n)) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("n", [1, 7, 12, 384])
def test_factorisations_are_complete(n):
    found = [tuple(column) for column in factorisations(n).T]
    ds = [d for d in range(1, n + 1) if n % d == 0]
    expected = [
        (x, y, z, n // (x * y * z)) for x, y, z in product(ds, ds, ds) if n % (x * y * z) == 0
    ]
    assert sorted(found) == sorted(expected)


def test_counts_of_factorisations():
    # 2**10 in four factors: stars and bars; 6144 = 2**11 * 3.
    assert factorisations(1024).shape[1] == 286
    assert factorisations(6144).shape[1] == 364 * 4


def no_rules(placements):
    return {}


def test_rejected_and_legal_make_all():
    def rules(placements):
        x, y = placements.sizes[:2]
        return {"x above 4": x > 4, "y above 2": y > 2}

    legal, rejected = legal_placements(64, Constraints(), rules)
    assert len(legal) + sum(rejected.values()) == factorisations(64).shape[1]
    assert set(rejected) == {"x above 4", "y above 2"}
    assert (legal.sizes[0] <= 4).all()


def test_constraints_are_reasons_too():
    constraints = Constraints(axes={"z": 2}, max_tp=8)
    legal, rejected = legal_placements(64, constraints, no_rules)
    assert (legal.sizes[2] == 2).all() and (legal.sizes[:3].prod(axis=0) <= 8).all()
    assert set(rejected) == {"G_z fixed to 2", "G_x*G_y*G_z above --max-tp 8"}


def test_orders_that_place_ranks_alike_are_kept_once():
    assert len(Placements.of([Grid(2, 2, 2, 2)], ORDERS)) == 24
    assert len(Placements.of([Grid(2, 1, 2, 2)], ORDERS)) == 6
    one = Placements.of([Grid(1, 1, 8, 1)], ORDERS)
    assert len(one) == 1 and ORDERS[int(one.order[0])] == "xyzd"


@given(st.tuples(*[st.integers(1, 5)] * 4), st.sampled_from(ORDERS))
def test_strides_follow_from_the_rank_numbers(sizes, order):
    """Number all ranks by nested loops, the first letter fastest, and look at neighbours."""
    by_letter = dict(zip("xyzd", sizes, strict=True))
    coordinates = product(*(range(by_letter[letter]) for letter in reversed(order)))
    rank_of = {tuple(reversed(c)): rank for rank, c in enumerate(coordinates)}
    strides = Placements.of([Grid(*sizes)], (order,)).strides[:, 0]
    for axis, letter in enumerate("xyzd"):
        if by_letter[letter] > 1:
            origin, neighbour = [0] * 4, [0] * 4
            neighbour[order.index(letter)] = 1
            assert strides[axis] == rank_of[tuple(neighbour)] - rank_of[tuple(origin)]


def test_micro_batches_divide_the_share_of_the_batch():
    placements = Placements.of([Grid(1, 1, 2, 2), Grid(4, 1, 1, 1)])
    table, rejected = with_micro_batches(placements, 24, Constraints())
    chosen = {p: list(table.micro_batch[table.placement == p]) for p in (0, 1)}
    assert chosen == {0: [1, 2, 3, 6], 1: [1, 2, 3, 4, 6, 8, 12, 24]}
    assert rejected == {}
    assert (table.n_microsteps(24) % 1 == 0).all()
    table, rejected = with_micro_batches(placements, 24, Constraints(micro_batch=4))
    assert list(table.placement) == [1] and sum(rejected.values()) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_distinct_encodes_and_decodes(pairs):
    columns = np.array(pairs).T
    rows, inverse = distinct(*columns)
    assert (columns[:, rows][:, inverse] == columns).all()
    assert len(rows) == len(set(pairs))


@pytest.mark.parametrize(
    "text", ["8x4x4", "8x4x4x0", "axbxcxd", "", "8x4x4x8x2", "-1x1x1x1", "8 4 4 8"]
)
def test_grids_that_are_none(text):
    with pytest.raises(InputError, match="8x4x4x8"):
        Grid.parse(text)


def test_grid_reads_what_it_prints():
    assert str(Grid.parse("8x4x16x2")) == "8x4x16x2"
    assert Grid.parse("8×4×16×2").n_ranks == 1024


def test_orders_that_are_none():
    with pytest.raises(InputError, match="permutation"):
        check_order("xyzz")


def test_a_single_candidate_is_a_table_of_length_one():
    table = CandidateTable.single(Grid(2, 3, 4, 5), "zyxd", 7)
    assert len(table) == 1 and table.size("y")[0] == 3 and table.micro_batch[0] == 7
