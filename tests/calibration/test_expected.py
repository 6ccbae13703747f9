"""Collectives in the terms of nccl-tests."""

from dataclasses import replace

import pytest
from worlds import machine_of

from axonn_tune.calibration.expected import expected
from axonn_tune.errors import InputError
from axonn_tune.report.calibrate import calibration_text
from axonn_tune.report.machines import expected_text
from axonn_tune.spec.calibration import Calibration, RankSpeed
from axonn_tune.spec.points import GemmPoint, LinkPoint


def test_algbw_and_busbw_by_hand():
    """8 ranks, 1 GB, 20 ms: algbw 50 GB/s; busbw 2 * 7/8 of that to reduce, 7/8 to gather."""
    machine = machine_of(units=(1,), bandwidths=(87.5e9,), latencies=(0.0,), ranks_per_node=8)
    (reduce,) = expected(machine, "all_reduce", 1, 8, [10**9])
    assert reduce.seconds == pytest.approx(0.02)
    assert reduce.algbw_bytes_per_s == pytest.approx(50e9)
    assert reduce.busbw_bytes_per_s == pytest.approx(87.5e9)
    (gather,) = expected(machine, "all_gather", 1, 8, [10**9])
    assert gather.seconds == pytest.approx(0.01)
    assert gather.busbw_bytes_per_s == pytest.approx(87.5e9)


def point(nbytes, seconds):
    return LinkPoint("all_reduce", 1, 4, 1, True, nbytes, seconds)


def test_measured_stands_beside_and_a_sick_fabric_shows():
    machine = machine_of(units=(1,), bandwidths=(1e9,), latencies=(0.0,))
    healthy, sick = point(2**20, 1.5e-3), point(2**24, 1.0)
    entries = expected(replace(machine, link_points=(healthy, sick)), "all_reduce", 1, 4, [2**22])
    assert [e.nbytes for e in entries] == [2**20, 2**22, 2**24]
    assert [e.is_sick for e in entries] == [False, False, True]
    assert entries[1].measured_seconds is None
    moved = 1.5 * 2**24
    assert entries[2].measured_busbw_bytes_per_s == pytest.approx(moved / 1.0)
    assert entries[2].busbw_bytes_per_s == pytest.approx(1e9)  # not what was measured
    assert expected_text(machine, entries).count("sick fabric") == 1


def test_one_rank_has_nothing_to_send():
    with pytest.raises(InputError, match="2 ranks or more"):
        expected(machine_of(), "all_reduce", 4, 1, [1024])


def test_a_calibrated_profile_is_readable():
    gemm = [
        GemmPoint(s, s, s, mode, "bf16", s**3 / 1e14) for s in (256, 4096) for mode in ("NN", "TN")
    ]
    machine = machine_of(units=(1, 4), points=gemm)
    calibration = Calibration(
        "2026-01-01",
        "axonn-tune calibrate --quick",
        "H900",
        "nccl",
        8,
        ("n0", "n1"),
        61.0,
        software={"nccl": "2.27"},
        speeds=(RankSpeed(0, "n0", 1.0), RankSpeed(7, "n1", 0.7)),
        notes=("a thing to know",),
    )
    points = tuple(point(2**i, 1e-4 * 2 ** (i - 10)) for i in (10, 20))
    text = calibration_text(replace(machine, calibration=calibration, link_points=points))
    for expected_part in (
        "8 x H900",
        "n0, n1",
        "axonn-tune calibrate --quick",
        "└─ level1: joins 2 x units of 4 ranks\n   └─ level0: joins 4 x H900",
        "4096 x 4096 x 4096",
        "1 KiB",
        "1 MiB",
        "Note: a thing to know.",
        "Slow: rank 7 on n1 multiplies at 70 %",
    ):
        assert expected_part in text
    assert calibration_text(machine) == ""
