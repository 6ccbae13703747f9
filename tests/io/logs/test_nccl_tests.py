"""Output of nccl-tests and rccl-tests becomes points of collectives."""

from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.errors import FileError
from axonn_tune.spec.points import LinkPoint

LOG = Path(__file__).parents[2] / "data" / "nccl_all_reduce_2x4.log"


def test_a_log_under_mpirun(read_files):
    points = read_files(LOG).link_points
    expected = ((2**10, 60e-6), (2**20, 120e-6), (2**26, 1.5e-3), (2**30, 24e-3))
    assert [replace(point, seconds=1.0) for point in points] == [
        LinkPoint("all_reduce", 1, 8, 1, True, nbytes, 1.0) for nbytes, _ in expected
    ]
    assert [point.seconds for point in points] == pytest.approx([t for _, t in expected])


def test_rows_that_are_wrong_or_cut_short_are_left_out(read_files):
    wrong, cut = read_files(LOG).warnings
    assert "line 23: 17 elements were wrong; left out" in wrong
    assert "line 25: the row is cut short; left out" in cut


@pytest.mark.parametrize(
    ("name", "redop", "ratio", "kind"),
    [
        ("all_gather_perf.out", "none", 7 / 8, "all_gather"),
        ("x.log", "sum", 7 / 4, "all_reduce"),
        ("x.log", "sum", 7 / 8, "reduce_scatter"),
        ("alltoall.log", "none", 7 / 8, "all_to_all"),
        ("sendrecv_perf.log", "none", 1.0, "send_recv"),
    ],
)
def test_an_old_log_tells_its_collective_by_name_or_ratio(read, nccl_log, name, redop, ratio, kind):
    (point,) = read(nccl_log(2, 4, redop, 10.0 * ratio), name=name).link_points
    assert (point.kind, point.seconds) == (kind, pytest.approx(1e-4))


def test_a_log_that_does_not_tell_asks_for_the_kind(read, nccl_log):
    text = nccl_log(2, 4, "none", 8.75)
    with pytest.raises(FileError, match="give --kind"):
        read(text)
    (point,) = read(text, kind="all_gather").link_points
    assert point.kind == "all_gather"


def test_times_in_another_unit_are_refused(read, nccl_log):
    text = nccl_log(2, 4, rows=0) + "#  (B) (elements) (ms) (GB/s)\n"
    with pytest.raises(FileError, match=r"run\.log.*not in \(us\)"):
        read(text)


def test_a_collective_that_is_not_modelled_is_named(read, nccl_log):
    text = "# Collective test starting: broadcast_perf\n" + nccl_log(0, 0, rows=0)
    with pytest.raises(FileError, match=r"run\.log.*broadcast_perf times no.*allowed: all_reduce"):
        read(text)
