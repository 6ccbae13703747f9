"""Candidates: nothing forgotten, everything that falls is counted."""

import math
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import machine_of

from axonn_tune.errors import InputError
from axonn_tune.search.candidates import legal_placements, with_micro_batches
from axonn_tune.search.factors import divisors, factorisations
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.candidates import CandidateTable, Placements, distinct
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import ORDERS, check_order, grid_layout, parse_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D


@given(st.integers(1, 5000))
def test_divisors(n):
    assert list(divisors(n)) == [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("n", [1, 7, 12, 384, 1024, 6144])
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


def test_factorisations_are_formed_without_trying_all_products_of_divisors():
    """720,720 has 240 divisors; its factorisations into four numbers times these took 21 M."""
    tracemalloc.start()
    try:
        found = factorisations(720_720, 5)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Stars and bars for 2**4 * 3**2 and four primes, each into one of five factors.
    assert found.shape[1] == math.comb(8, 4) * math.comb(6, 4) * 5**4
    assert peak_bytes < 5 * found.nbytes


AXONN_CASES = [(12, 48, 1), (384, 768, 1), (384, 96, 24), (1024, 1024, 1), (6144, 6144, 24)]


@pytest.mark.parametrize(("n_gpus", "global_batch", "n_orders"), AXONN_CASES)
def test_legal_grids_of_axonn_are_those_that_divide(gpt_80b, n_gpus, global_batch, n_orders):
    """gpt-80b: hidden size 12288, 96 heads, MLP 49152, vocabulary 51200, by trial of every grid."""
    job = Job(n_gpus, global_batch, 2048)
    orders = ORDERS[:n_orders]
    search = Search(Scenario(gpt_80b, job, machine_of(), AXONN), Constraints(orders=orders))
    legal, rejected = legal_placements(search)
    matrices = [12288 * 36864, 12288 * 12288, 12288 * 49152, 12288 * 51200]
    found = {str(legal.layout(row)) for row in range(len(legal))}
    expected, n_placements = set(), 0
    for x, y, z, data in factorisations(n_gpus).T:
        present = [a for a, size in zip("xyzd", (x, y, z, data), strict=True) if size > 1]
        n_placements += len({"".join(a for a in order if a in present) for order in orders})
        divides = 12288 % x == 0 and all(size % y == 0 for size in (96, 49152, 51200))
        divides &= all(matrix % (x * y * z) == 0 for matrix in matrices)
        if divides and global_batch % (z * data) == 0:
            expected.add(f"{x}x{y}x{z}x{data}")
    assert found == expected
    assert len(legal) + sum(rejected.values()) == n_placements
    assert all(count > 0 for count in rejected.values())


def test_grouped_heads_and_odd_batches_have_reasons_of_their_own():
    model = Model("toy", 2, 64, 8, 256, 16, n_kv_heads=2, ffn_hidden_size=96)
    job = Job(64, 6, 16)
    placements = Placements.of(
        [grid_layout(1, 4, 1, 1), grid_layout(1, 2, 1, 1), grid_layout(3, 1, 1, 1)]
    )
    broken = AXONN.rejections(model, job, placements)
    assert list(broken["KV heads not divisible by G_y"]) == [True, False, False]
    assert list(broken["hidden size not divisible by G_x"]) == [False, False, True]
    spread = Placements.of(
        [grid_layout(1, 1, 2, 3), grid_layout(1, 1, 2, 2), grid_layout(1, 64, 1, 1)]
    )
    broken = AXONN.rejections(model, job, spread)
    assert list(broken["global batch not divisible by G_z*G_data"]) == [False, True, False]
    assert list(broken["MLP size not divisible by G_y"]) == [False, False, True]


def test_weights_must_divide_over_z_too():
    """64 x 192, 64 x 64, 64 x 256 and a head of 64 x 256: of these only the first has a three."""
    model = Model("toy", 2, 64, 4, 256, 16)
    placements = Placements.of(
        [grid_layout(1, 1, 3, 1), grid_layout(2, 2, 2, 1), grid_layout(1, 1, 4096, 1)]
    )
    broken = AXONN.rejections(model, Job(8, 4096 * 3, 16), placements)
    assert list(broken["weights not divisible over G_x*G_y*G_z"]) == [True, False, False]


class Ruled(Axonn4D):
    """AxoNN with rules of a test's own."""

    def rejections(self, model, job, placements):
        x, y = placements.sizes[:2]
        return {"x above 4": x > 4, "y above 2": y > 2}


class Unruled(Axonn4D):
    """AxoNN without rules."""

    def rejections(self, model, job, placements):
        return {}


TOY = Model("toy", 2, 64, 4, 256, 16)


def search_of(strategy, n_gpus, global_batch=1, constraints=None):
    job = Job(n_gpus, global_batch, 16)
    return Search(Scenario(TOY, job, machine_of(), strategy), constraints or Constraints())


def test_rejected_and_legal_make_all():
    legal, rejected = legal_placements(search_of(Ruled(), 64))
    assert len(legal) + sum(rejected.values()) == factorisations(64).shape[1]
    assert set(rejected) == {"x above 4", "y above 2"}
    assert (legal.sizes[0] <= 4).all()


def test_constraints_are_reasons_too():
    constraints = Constraints(axes={"z": 2}, max_tp=8)
    legal, rejected = legal_placements(search_of(Unruled(), 64, constraints=constraints))
    assert (legal.sizes[2] == 2).all() and (legal.sizes[:3].prod(axis=0) <= 8).all()
    assert set(rejected) == {"G_z fixed to 2", "G_x*G_y*G_z above --max-tp 8"}


def test_orders_that_place_ranks_alike_are_kept_once():
    assert len(Placements.of([grid_layout(2, 2, 2, 2)], ORDERS)) == 24
    assert len(Placements.of([grid_layout(2, 1, 2, 2)], ORDERS)) == 6
    one = Placements.of([grid_layout(1, 1, 8, 1)], ORDERS)
    assert len(one) == 1 and ORDERS[int(one.order[0])] == "xyzd"


@given(st.tuples(*[st.integers(1, 5)] * 4), st.sampled_from(ORDERS))
def test_strides_follow_from_the_rank_numbers(sizes, order):
    """Number all ranks by nested loops, the first letter fastest, and look at neighbours."""
    by_letter = dict(zip("xyzd", sizes, strict=True))
    coordinates = product(*(range(by_letter[letter]) for letter in reversed(order)))
    rank_of = {tuple(reversed(c)): rank for rank, c in enumerate(coordinates)}
    strides = Placements.of([grid_layout(*sizes)], (order,)).strides[:, 0]
    for axis, letter in enumerate("xyzd"):
        if by_letter[letter] > 1:
            origin, neighbour = [0] * 4, [0] * 4
            neighbour[order.index(letter)] = 1
            assert strides[axis] == rank_of[tuple(neighbour)] - rank_of[tuple(origin)]


def test_micro_batches_divide_the_share_of_the_batch():
    placements = Placements.of([grid_layout(1, 1, 2, 2), grid_layout(4, 1, 1, 1)])
    table, rejected = with_micro_batches(search_of(AXONN, 4, 24), placements)
    chosen = {p: list(table.micro_batch[table.placement == p]) for p in (0, 1)}
    assert chosen == {0: [1, 2, 3, 6], 1: [1, 2, 3, 4, 6, 8, 12, 24]}
    assert rejected == {}
    assert (table.n_microsteps(24) % 1 == 0).all()
    table, rejected = with_micro_batches(
        search_of(AXONN, 4, 24, Constraints(micro_batch=4)), placements
    )
    assert list(table.placement) == [1] and sum(rejected.values()) == 1


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 4), min_size=1, max_size=4), st.integers(1, 4))
def test_every_micro_batch_that_divides_is_there_once(grids, multiple):
    batch = 144 * multiple  # 4 * 3 * 4 * 3 divides it, so each z * data below does
    placements = Placements.of([grid_layout(*grid) for grid in grids])
    table, rejected = with_micro_batches(search_of(AXONN, 1, batch), placements)
    expected = [
        (row, size)
        for row, (_, _, z, data) in enumerate(grids)
        for size in range(1, batch // (z * data) + 1)
        if batch // (z * data) % size == 0
    ]
    pairs = zip(table.placement.tolist(), table.micro_batch.tolist(), strict=True)
    assert list(pairs) == expected and rejected == {}
    tokens = table.n_microsteps(batch) * table.micro_batch * table.size("z") * table.size("data")
    assert (tokens == batch).all()


@given(
    st.lists(st.tuples(*[st.integers(1, 3)] * 4), min_size=1, max_size=4),
    st.lists(st.sampled_from(ORDERS), min_size=1, max_size=24, unique=True),
)
def test_kept_orders_place_ranks_in_every_way_once(grids, orders):
    """A placement is the list of each rank's coordinates; of equal lists the first is kept."""
    kept = Placements.of([grid_layout(*grid) for grid in grids], tuple(orders))
    found = [(str(kept.layout(i)), ORDERS[int(kept.order[i])]) for i in range(len(kept))]
    expected = []
    for grid in grids:
        seen = set()
        for order in orders:
            sizes = [grid["xyzd".index(letter)] for letter in reversed(order)]
            where = [order[::-1].index(letter) for letter in "xyzd"]
            ranks = tuple(tuple(c[i] for i in where) for c in np.ndindex(*sizes))
            if ranks not in seen:
                seen.add(ranks)
                expected.append((str(grid_layout(*grid)), order))
    assert found == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_distinct_encodes_and_decodes(pairs):
    columns = np.array(pairs).T
    rows, inverse = distinct(*columns)
    assert (columns[:, rows][:, inverse] == columns).all()
    assert len(rows) == len(set(pairs))


@pytest.mark.parametrize(
    "text", ["8x4x4", "8x4x4x0", "axbxcxd", "", "8x4x4x8x2x1", "-1x1x1x1", "8 4 4 8"]
)
def test_grids_that_are_none(text):
    with pytest.raises(InputError, match="8x4x4x8"):
        parse_layout(text)


def test_grid_reads_what_it_prints():
    assert str(parse_layout("8x4x16x2")) == "8x4x16x2"
    assert parse_layout("8×4×16×2").n_ranks == 1024


def test_orders_that_are_none():
    with pytest.raises(InputError, match="permutation"):
        check_order("xyzz")


def test_a_single_candidate_is_a_table_of_length_one():
    table = CandidateTable.single(Configuration(grid_layout(2, 3, 4, 5), "zyxd", 7))
    assert len(table) == 1 and table.size("y")[0] == 3 and table.micro_batch[0] == 7
