"""Intervals hold what they promise, and P(best) is the chance to be the fastest."""

import math
from dataclasses import replace

import numpy as np
import pytest
from worlds import machine_of, quantity

from axonn_tune.api.searching import build_search
from axonn_tune.io.presets import load_machine
from axonn_tune.search import uncertainty
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.normal import NORMAL_90
from axonn_tune.spec.resources import resources
from axonn_tune.spec.track_record import NO_TRACK_RECORDS, TrackRecord, TrackRecords
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.spread import MODEL_ERROR, UNSTATED_SPREAD, spread_of


def spread_machine(spread, **numbers):
    """A machine all of whose numbers have the same spread."""
    machine = machine_of(slowdown=0.2, jitter=0.02, **numbers)

    def wide(item):
        return replace(item, spread_fraction=spread)

    kernels = {
        name: wide(getattr(machine.kernels, name))
        for name in ("memory_fraction", "slowdown_fraction", "launch_seconds")
    }
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=wide(link.bandwidth_bytes_per_s),
            latency_seconds=wide(link.latency_seconds),
        )
        for link in machine.links
    )
    gemm = replace(machine.gemm, sustained_fraction=wide(machine.gemm.sustained_fraction))
    return replace(
        machine,
        gemm=gemm,
        kernels=replace(machine.kernels, **kernels),
        links=links,
        jitter_fraction=wide(machine.jitter_fraction),
    )


def searched(machine, model="5b", gpus=64, records=NO_TRACK_RECORDS, **options):
    """A search whose intervals come from the profile alone, unless there are records."""
    search = build_search(model, gpus, machine, micro_batch=1, recompute="full", **options)
    return replace(search, scenario=replace(search.scenario, track_records=records))


def found(machine, **options):
    return rank_candidates(searched(machine, **options))


def test_probabilities_are_of_one_event():
    known = found(spread_machine(0.1)).uncertainty
    assert known.p_best.sum() == pytest.approx(1.0)
    assert (known.p_best >= 0).all() and len(known.rows) == len(set(known.rows))


def test_a_wider_profile_gives_wider_intervals():
    narrow, wide = (found(spread_machine(s)).uncertainty.spread for s in (0.01, 0.2))
    assert (wide > narrow).all()
    assert (narrow > MODEL_ERROR).all()


def test_what_published_runs_show_widens_every_interval_and_leaves_the_chances():
    machine = spread_machine(0.05)
    before = found(machine).uncertainty
    runs = TrackRecord("axonn", "bundled runtime", "GPU", 9, 5, 0.3, 0.4)
    after = found(machine, records=TrackRecords((runs,))).uncertainty
    assert (before.spread < 0.4).all()
    assert after.spread == pytest.approx(np.full(len(after.rows), 0.4))
    assert (after.p_best == before.p_best).all()


def test_a_profile_that_is_less_certain_than_published_runs_decides():
    runs = TrackRecord("axonn", "bundled runtime", "GPU", 9, 0, 0.01, 0.01)
    machine = spread_machine(0.2)
    with_runs = found(machine, records=TrackRecords((runs,))).uncertainty
    assert (with_runs.spread == found(machine).uncertainty.spread).all()


def test_orders_that_make_no_difference_share_the_chance():
    """Both axes of the grid lie inside one flat level, so that their order changes nothing."""
    machine = spread_machine(0.05, units=(1,), bandwidths=(1e11,), latencies=(1e-6,))
    ranking = found(machine, gpus=4, model="tiny", order="all", every_configuration=True)
    known = ranking.uncertainty
    groups = {}
    for row, p in zip(known.rows, known.p_best, strict=True):
        grid = ranking.table.placements.layout(int(ranking.table.placement[row]))
        groups.setdefault(grid, []).append(p)
    tied = [chances for chances in groups.values() if len(chances) > 1 and max(chances) > 0.02]
    assert tied
    for chances in tied:
        assert max(chances) - min(chances) < 0.03  # four times the worst error of a chance


def test_what_slows_all_alike_tells_nothing_apart():
    """On one GPU type without communication the compute rate scales every time."""
    one = machine_of(units=(1,), bandwidths=(1e18,), latencies=(0.0,))
    sure = found(one, gpus=8).uncertainty.p_best
    gemm = replace(one.gemm, sustained_fraction=quantity(0.8))
    gemm = replace(gemm, sustained_fraction=replace(gemm.sustained_fraction, spread_fraction=0.5))
    unsure = found(replace(one, gemm=gemm), gpus=8).uncertainty
    assert unsure.p_best == pytest.approx(sure, abs=0.05)
    assert unsure.spread.min() > 0.3


def test_where_nothing_fits_nothing_is_known():
    ranking = found(spread_machine(0.05))
    nowhere = np.zeros(len(ranking.table), dtype=bool)
    known = uncertainty.uncertainty(
        ranking.search.scenario, ranking.table, ranking.step_seconds, nowhere
    )
    assert [known.rows.size, known.spread.size, known.p_best.size] == [0, 0, 0]


def test_a_dominated_row_has_no_chance():
    ranking = found(spread_machine(0.02))
    known = ranking.uncertainty
    slower = ranking.step_seconds[known.rows] > 1.5 * ranking.step_seconds[known.rows].min()
    assert slower.any() and known.p_best[slower].max() < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_true_times_lie_in_their_intervals_and_the_likeliest_wins_as_often(seed):
    """Machines drawn from the stated spreads, priced exactly, not linearised."""
    machine = spread_machine(0.08)
    search = searched(machine)
    ranking = rank_candidates(search)
    known = ranking.uncertainty
    rows = known.rows
    table = CandidateTable(
        ranking.table.placements.take(ranking.table.placement[rows]),
        np.arange(rows.size),
        ranking.table.micro_batch[rows],
        ranking.table.recompute[rows],
    )
    evaluator = Evaluator.of(search.scenario, table)
    products = np.sqrt(evaluator.squared_product_seconds())
    seconds = products * table.n_microsteps(search.scenario.job.global_batch)
    base = ranking.step_seconds[rows]
    own = evaluator.kernels.prices.interpolation_error * seconds / base
    random = np.random.default_rng(seed)
    names, wins, inside = len(resources(machine)), np.zeros(rows.size), []
    for _ in range(150):
        true = machine
        for i, deviation in enumerate(random.standard_normal(names)):
            sigma = spread_of(resources(machine)[i].quantity)
            true = resources(true)[i].improved(float(np.exp(sigma * deviation)))
        seconds = evaluator.on(true).evaluate().step_seconds
        per_shape = random.standard_normal(int(evaluator.schedules.shape_of.max()) + 1)
        seconds = seconds * np.exp(own * per_shape[evaluator.schedules.shape_of])
        alone = MODEL_ERROR * random.standard_normal(rows.size)
        seconds = seconds * np.exp(alone)
        inside.append(np.abs(np.log(seconds / base)) < NORMAL_90 * known.spread)
        wins[seconds.argmin()] += 1
    assert 0.83 < np.mean(inside) < 0.96
    assert wins / 150 == pytest.approx(known.p_best, abs=0.15)


def below(deviation):
    """The probability that a standard normal variable is below a number."""
    return 0.5 * (1.0 + math.erf(deviation / math.sqrt(2.0)))


@pytest.mark.parametrize("same_products", [True, False])
def test_of_two_rows_the_chance_is_that_of_the_difference_of_their_times(same_products):
    """What moves both alike cancels: 0.3 of the causes, and the error of products if shared."""
    effects = np.array([[0.3, 0.3], [0.04, -0.02]])
    own_error = np.array([0.05, 0.03])
    shape_of = np.array([0, 0]) if same_products else np.array([0, 1])
    of_products = 0.02**2 if same_products else 0.05**2 + 0.03**2
    deviation = math.sqrt(0.06**2 + of_products + 2 * MODEL_ERROR**2)
    for gap in (0.0, 0.02, 0.1):
        chances = uncertainty._p_best(np.array([1.0, 1.0 + gap]), effects, own_error, shape_of)
        assert chances == pytest.approx([below(gap / deviation), below(-gap / deviation)], abs=2e-3)


@pytest.mark.parametrize("rows", [1, 3, 8, uncertainty.N_ROWS])
def test_of_rows_that_share_no_error_the_chances_are_an_integral(rows):
    """The time of a row is t with a density of t, and all others are slower."""
    log_seconds = 0.01 * np.arange(rows) / rows
    own_error = np.full(rows, 0.03)
    sigma = math.hypot(0.03, MODEL_ERROR)
    steps = np.linspace(-6.0, 6.0, 2401)
    density = np.exp(-(steps**2) / 2) / math.sqrt(2 * math.pi) * (steps[1] - steps[0])
    exact = []
    for row in range(rows):
        others = (log_seconds - log_seconds[row])[:, None] / sigma - steps
        slower = np.vectorize(below, otypes=[float])(np.delete(others, row, axis=0))
        exact.append(float(density @ slower.prod(axis=0)))
    none = np.zeros((0, rows))
    chances = uncertainty._p_best(log_seconds, none, own_error, np.arange(rows))
    assert chances == pytest.approx(exact, abs=0.01)


def test_points_of_the_normal_law_are_even_and_independent():
    assert len(uncertainty.PRIMES) == uncertainty.N_ROWS
    points = uncertainty._normal_points(uncertainty.N_ROWS)
    assert points.shape == (uncertainty.N_ROWS, uncertainty.N_POINTS)
    assert np.abs(points.mean(axis=1)).max() < 0.01
    covariance = np.abs(np.cov(points) - np.eye(len(points)))
    assert covariance.max() < 0.15
    assert covariance[:8, :8].max() < 0.03
    for deviation in (-1.5, 0.0, 0.5):
        share = (points < deviation).mean(axis=1)
        assert share == pytest.approx(np.full(len(points), below(deviation)), abs=0.01)


def test_the_number_of_tied_rows():
    assert uncertainty.tied(np.array([0.5, 0.3, 0.15, 0.05]), 0.9) == 3
    assert uncertainty.tied(np.array([0.05, 0.95]), 0.9) == 1


def test_unstated_spreads_follow_the_origin():
    assert spread_of(quantity(1.0)) == UNSTATED_SPREAD["assumed"]
    stated = replace(quantity(1.0), spread_fraction=0.01)
    assert spread_of(stated) == 0.01


def test_a_machine_that_differs_in_one_resource_is_priced_as_if_alone():
    machine = spread_machine(0.08)
    search = searched(machine)
    table = rank_candidates(search).table.take(slice(8)).compact()
    table = table.take(next(iter(table.alike())))
    evaluator = Evaluator.of(search.scenario, table)
    better = {each.key: each.improved(1.5) for each in resources(machine)}
    for other in better.values():
        alone = Evaluator.of(replace(search.scenario, machine=other), table).evaluate()
        shared = evaluator.on(other).evaluate()
        assert (shared.step_seconds == alone.step_seconds).all()
        assert (shared.step_seconds != evaluator.evaluate().step_seconds).any()
    assert evaluator.on(better["interference"]).kernels is evaluator.kernels
    assert evaluator.on(better["gpu.memory_bandwidth"]).kernels is not evaluator.kernels


def test_products_that_were_timed_outweigh_a_rate_that_was_assumed():
    """DGX H200 has 60 measured products beside the rate of H100, which it assumes."""
    machine = load_machine("dgx-h200")
    assert machine.gemm.sustained_fraction.origin == "assumed"
    by_name = {resource.name: resource.quantity for resource in resources(machine)}
    assert by_name["GPU compute rate"].origin == "measured"
    untimed = replace(machine, gemm=replace(machine.gemm, points=()))
    by_name = {resource.name: resource.quantity for resource in resources(untimed)}
    assert by_name["GPU compute rate"].origin == "assumed"
