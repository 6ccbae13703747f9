"""Rank orders that memory or links cannot tell apart are worked out once, which changes no time."""

from dataclasses import replace

import numpy as np
import pytest
from build import (
    every_configuration_of,
    every_table,
    ranking_of,
    search_of,
    times_of,
)
from worlds import machine_of

from axonn_tune.cost.placements import PairedLinks
from axonn_tune.search.candidates import legal_placements
from axonn_tune.search.search import Constraints
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import ORDERS
from axonn_tune.spec.model import Model
from axonn_tune.step.predict import predict
from axonn_tune.strategies.axonn.axonn4d import AXONN


def random_search(random):
    """A search through all rank orders on nodes of four or three ranks."""
    ranks_per_node = int(random.choice([4, 3]))
    n_nodes = int(random.choice([4, 8]))
    model = Model("m", 6, 384, 12, 2304, 96)
    n_gpus = ranks_per_node * n_nodes
    machine = machine_of(
        units=(1, 2, ranks_per_node) if ranks_per_node == 4 else (1, ranks_per_node),
        bandwidths=tuple(10.0 ** random.uniform(9.0, 11.5, 3 if ranks_per_node == 4 else 2)),
        latencies=tuple(10.0 ** random.uniform(-6.0, -4.0, 3 if ranks_per_node == 4 else 2)),
        rings=((1, 2, 4e10),) if random.random() < 0.5 else (),
        slowdown=random.uniform(0.0, 0.3),
        ranks_per_node=ranks_per_node,
    )
    search = search_of(model, Job(n_gpus, 24, 96), machine, AXONN, recomputes=("none", "full"))
    return replace(search, constraints=Constraints(orders=tuple(ORDERS)))


@pytest.mark.parametrize("seed", range(3))
def test_placements_with_one_number_take_equally_long(seed):
    search = random_search(np.random.default_rng(seed))
    n_merged = 0
    for table in every_table(search):
        links = PairedLinks.of(search.scenario.machine, table.placements)
        number = links.alike()[table.placement]
        times = times_of(search, table)
        key = np.stack([number, table.micro_batch])
        _, first, row_of = np.unique(key, axis=1, return_index=True, return_inverse=True)
        np.testing.assert_allclose(times, times[:, first[row_of]], rtol=1e-12, atol=1e-15)
        n_merged += len(table) - first.size
    assert n_merged > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_search_through_all_orders_predicts_each_configuration_as_it_is_alone(seed):
    search = random_search(np.random.default_rng(seed))
    ranked = every_configuration_of(search)
    for prediction in ranked[:: max(1, len(ranked) // 12)]:
        alone = predict(search.scenario, prediction.configuration)
        assert prediction.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12)
        assert prediction.memory_bytes == alone.memory_bytes


def test_the_best_in_all_orders_are_found_without_playing_all():
    n_bounded = [best_in_all_orders(np.random.default_rng(seed)) for seed in range(4)]
    assert sum(n_bounded) > 100


def best_in_all_orders(random):
    """Assert that the best rows are those of a whole ranking; return how many are not played."""
    search = random_search(random)
    whole = ranking_of(search)
    for n_best in (40, 5, 1):
        best = ranking_of(replace(search, n_best=n_best))
        assert len(best) == min(n_best, len(whole))
        assert best.n_left_out + len(best) == whole.n_left_out + len(whole)
        assert best.n_evaluated == whole.n_evaluated
        for column in ("step_seconds", "exposed_seconds", "memory_bytes", "fits"):
            np.testing.assert_allclose(getattr(best, column), getattr(whole, column)[: len(best)])
        for row in range(len(best)):
            assert best.table.configuration(row) == whole.table.configuration(row)
    return best.n_bounded - whole.n_bounded


def test_layouts_stand_for_all_their_orders():
    """They are sized in one order; what is ranked and counted holds each of all orders."""
    search = random_search(np.random.default_rng(1))
    search = replace(search, include_oom=True, every_configuration=True)
    ranking = ranking_of(search)
    tables = every_table(search)
    n_candidates = sum(map(len, tables)) * len(search.recomputes)
    assert len(ranking) == ranking.n_evaluated == n_candidates
    found = ranking.table.placements
    expected, _ = legal_placements(search)
    assert placed(found) == placed(expected)


def placed(placements):
    """Every layout with its order."""
    return sorted(zip(*placements.sizes.tolist(), placements.order.tolist(), strict=True))


def test_orders_that_links_tell_apart_keep_their_numbers():
    """An axis of two is inside a node, or leaves it, by its place in the order."""
    search = random_search(np.random.default_rng(0))
    for table in every_table(search):
        placements = table.placements
        number = PairedLinks.of(search.scenario.machine, placements).alike()
        inside = placements.stride("z") * placements.size("z") <= 3
        split = placements.size("z") > 1
        for layout in np.unique(number[split]):
            assert np.unique(inside[number == layout]).size == 1


@pytest.mark.parametrize("changed", ["added_seconds", "added_s_per_byte"])
def test_orders_whose_trees_take_longer_beyond_their_measured_steps_have_other_numbers(changed):
    search = random_search(np.random.default_rng(0))
    found = PairedLinks.of(search.scenario.machine, every_table(search)[0].placements)
    ((links, pairs),) = found.of_pairs
    number = found.alike()
    group, (row, other) = next(
        (group, np.flatnonzero(number == each)[np.unique(of_each, return_index=True)[1][:2]])
        for group, pair in pairs.items()
        for each in np.unique(number)
        if np.unique(of_each := pair[number == each]).size > 1
    )
    of_kind = links.kinds["all_reduce"]
    longer = 1.0 * (np.arange(links.level.size) == pairs[group][row])
    tree = replace(of_kind.tree, **{changed: longer})
    kinds = {**links.kinds, "all_reduce": replace(of_kind, tree=tree)}
    told_apart = replace(found, of_pairs=[(replace(links, kinds=kinds), pairs)]).alike()
    assert told_apart[row] != told_apart[other]
