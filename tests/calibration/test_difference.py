"""What changed between two calibrations, told from noise."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import machine_of, quantity

from axonn_tune.calibration.difference import difference
from axonn_tune.report.machines import difference_document, difference_text
from axonn_tune.spec.calibration import Calibration, RankSpeed
from axonn_tune.spec.links import Steps
from axonn_tune.spec.points import GemmPoint, LinkPoint, StepPoint

SHAPES = [(m, n, 1024) for m in (64, 256, 1024, 4096) for n in (256, 1024, 4096)]
SPREAD = 0.02


def calibrated(seed, gemm=1.0, link=1.0, noise=SPREAD, speeds=(1.0, 1.0), **software):
    """A measured profile: products and collectives that take so many times longer."""
    random = np.random.default_rng(seed)

    def noisy(seconds):
        return float(seconds * np.exp(noise * random.standard_normal()))

    points = [
        GemmPoint(*shape, mode, "bf16", noisy(gemm * 1e-9 * shape[0] * shape[1]), SPREAD)
        for shape in SHAPES
        for mode in ("NN", "NT", "TN")
    ]
    collectives = tuple(
        LinkPoint(kind, 1, 4, 1, True, 2**i, noisy(link * (1e-5 + 2**i / 1e10)), SPREAD)
        for kind in ("all_reduce", "all_gather")
        for i in range(10, 30, 2)
    )
    machine = machine_of(points=points)
    level = replace(
        machine.links[0],
        bandwidth_bytes_per_s=replace(quantity(noisy(3e11 / link)), spread_fraction=SPREAD),
    )
    hosts = tuple(f"n{i}" for i in range(len(speeds)))
    calibration = Calibration(
        "2026-01-01",
        "axonn-tune calibrate",
        "gpu",
        "nccl",
        len(speeds),
        hosts,
        60.0,
        software={"torch": "2.13", **software},
        speeds=tuple(
            RankSpeed(i, host, s) for i, (host, s) in enumerate(zip(hosts, speeds, strict=True))
        ),
    )
    return replace(
        machine,
        links=(level, machine.links[1]),
        link_points=collectives,
        calibration=calibration,
    )


def names(found):
    return {change.name for change in found.significant}


def test_a_profile_does_not_differ_from_itself():
    machine = calibrated(0)
    found = difference(machine, machine)
    assert not found.significant and not found.provenance and not found.only_in_one
    assert all(change.change_fraction == 0 for change in found.changes)


def test_noise_within_the_spread_is_seldom_called_a_change():
    alarms = sum(
        bool(difference(calibrated(seed), calibrated(seed + 1000), least_change=0.0).significant)
        for seed in range(200)
    )
    assert alarms <= 10  # one in a hundred is promised; ten in two hundred are four deviations off


def test_a_slower_link_and_its_collectives_are_found():
    found = difference(calibrated(0), calibrated(1, link=1.15))
    assert names(found) == {
        "links.level0.bandwidth_bytes_per_s",
        "all_reduce over groups of 4, stride 1",
        "all_gather over groups of 4, stride 1",
    }
    assert all(change.is_worse for change in found.significant)


def test_faster_products_are_better():
    found = difference(calibrated(0, gemm=1.2), calibrated(1))
    assert names(found) == {f"products {mode} bf16" for mode in ("NN", "NT", "TN")}
    assert not any(change.is_worse for change in found.significant)


@given(st.floats(0.7, 1.4), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_swapping_mirrors_the_result(factor, seed):
    a, b = calibrated(seed), calibrated(seed + 1, gemm=factor, link=1 / factor)
    forth, back = (difference(*pair) for pair in ((a, b), (b, a)))
    assert names(forth) == names(back)
    mirrored = {change.name: change for change in back.changes}
    for change in forth.changes:
        other = mirrored[change.name]
        assert change.z is other.z is None or change.z == pytest.approx(-other.z, abs=1e-9)
        assert change.before == pytest.approx(other.after) or change.n_points
        assert change.is_worse != other.is_worse or change.before == change.after


def test_small_changes_are_not_reported_however_sure():
    sure = calibrated(0, noise=0.0), calibrated(0, noise=0.0, gemm=1.06)
    assert not difference(*sure, least_change=0.1).significant
    assert difference(*sure, least_change=0.01).significant


def test_numbers_without_a_spread_are_shown_where_they_differ_but_are_never_significant():
    a = machine_of()
    b = machine_of(bandwidths=(600e9, 80e9), slowdown=0.1)
    found = difference(a, b)
    assert not found.significant
    by_name = {change.name: change for change in found.restated}
    assert by_name.keys() == {"links.level0.bandwidth_bytes_per_s", "kernels.slowdown_fraction"}
    assert by_name["links.level0.bandwidth_bytes_per_s"].change_fraction == pytest.approx(1.0)
    assert by_name["kernels.slowdown_fraction"].change_fraction is None  # it was zero
    text = difference_text(a, b, found)
    assert "Significant changes: 0; changed numbers that state no spread: 2; " in text
    assert "100.0" in text and "links.level1" not in text
    assert not difference(a, a).restated


def test_steps_of_collectives_are_compared():
    """Two profiles may differ in these alone, as `frontier` and `frontier-202502` do."""

    def with_steps(factor, *more):
        points = [StepPoint("", 0, 2.0**i, factor * 2.0**i / 1e10) for i in range(20, 25)]
        machine = machine_of()
        *inner, outer = machine.links
        steps = Steps("measured", "a test", (*points, *more))
        return replace(machine, links=(*inner, replace(outer, ring_steps=steps)))

    slower = StepPoint("all_gather", 128, 2.0**20, 1e-3)
    found = difference(with_steps(1.0, slower), with_steps(1.5))
    (change,) = (each for each in found.changes if each.change_fraction)
    assert change.name == "links.level1.ring_steps"
    assert change.change_fraction == pytest.approx(0.5)
    assert change.is_worse
    assert found.only_in_one == ("links.level1.ring_steps of all_gather over more than 128 ranks",)


def test_slow_ranks_are_named_with_their_host():
    before = calibrated(0, speeds=(1.0, 1.0, 1.0))
    after = calibrated(0, speeds=(1.0, 0.8, 1.0))
    (slow,) = difference(before, after).slow_ranks
    assert (slow.host, slow.rank, slow.before, slow.after) == ("n1", 1, 1.0, 0.8)
    text = difference_text(before, after, difference(before, after))
    assert "rank 1 on n1 multiplies at 80 % of the median rank's rate, 100 % before" in text
    assert not difference(after, after).slow_ranks  # it was slow before


def test_what_was_measured_with_is_compared():
    found = difference(calibrated(0, nccl="2.20"), calibrated(0, nccl="2.27"))
    assert found.provenance == {"nccl": ("2.20", "2.27")}


def test_the_document_holds_what_the_text_says():
    a, b = calibrated(0), calibrated(1, link=1.2)
    document = difference_document(a, b, difference(a, b))
    worst = document["changes"][0]
    assert worst["is_significant"] and worst["is_worse"]
    assert worst["change_fraction"] == pytest.approx(worst["after"] / worst["before"] - 1)
