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


def _in_columns(nccl_log, set_columns, set_cells, last_column="", last_cell=""):
    """Return a log of 2 x 4 ranks with one row of 1 MiB, in columns of a newer version."""
    ranks = "".join(line for line in nccl_log(2, 4).splitlines(True) if "Rank" in line)
    columns = f"# size count type redop root {set_columns} {set_columns} {last_column}\n"
    row = f"1048576 262144 float sum -1 {set_cells} {set_cells.replace('100', '101')} {last_cell}\n"
    return ranks + columns + row


@pytest.mark.parametrize(
    ("columns", "cells", "last"),
    [
        ("time algbw busbw #wrong", "100.0 10.0 17.5 0", ("timestamp", "2026-11-20 10:11:12")),
        (
            "time algbw busbw #wrong i_min i_max i_p99 i_cv%",
            "100.0 10.0 17.5 0 98.0 103.0 102.0 1.2",
            ("", ""),
        ),
    ],
)
def test_the_time_stands_under_its_heading_also_where_rows_say_more(
    read, nccl_log, columns, cells, last
):
    (point,) = read(_in_columns(nccl_log, columns, cells, *last)).link_points
    assert (point.kind, point.seconds) == ("all_reduce", pytest.approx(1e-4))


def test_wrong_elements_count_also_where_they_are_more_than_six_digits_show(read, nccl_log):
    text = _in_columns(nccl_log, "time algbw busbw #wrong", "100.0 10.0 17.5 1.04858e+06")
    with pytest.raises(FileError, match=r"line 10: 1\.04858e\+06 elements were wrong$"):
        read(text)


def test_a_log_without_a_check_of_the_results_is_read(read, nccl_log):
    """With -c 0, nccl-tests prints N/A for the number of wrong elements."""
    log = read(_in_columns(nccl_log, "time algbw busbw #wrong", "100.0 10.0 17.5 N/A"))
    assert [point.seconds for point in log.link_points] == pytest.approx([1e-4])
    assert not log.warnings


# What common.cu printed from 7bd5758 to d39f59d: side_work is what -k says.
_COPIES = "# nThread 1 nGpus 1 minBytes 8 graph: 0 side_work: {} work_sms: 64 direction: H2D\n"


@pytest.mark.parametrize(
    ("head", "columns", "cells"),
    [
        (_COPIES.format(1), "time algbw busbw copybw #wrong", "100.0 10.0 17.5 25.31 0"),
        ("", "time algbw busbw copybw #wrong", "100.0 10.0 17.5 25.31 12"),
        (_COPIES.format(2), "time algbw busbw #wrong", "100.0 10.0 17.5 0"),
    ],
    ids=["copies", "copies without the head", "other work"],
)
def test_times_of_collectives_beside_copies_are_refused(read, nccl_log, head, columns, cells):
    with pytest.raises(FileError, match=r"copies ran beside .* without --side_work") as error:
        read(head + _in_columns(nccl_log, columns, cells))
    assert "\n" not in str(error.value)


def test_a_log_of_the_same_months_without_copies_is_read(read, nccl_log):
    text = _in_columns(nccl_log, "time algbw busbw #wrong", "100.0 10.0 17.5 0")
    (point,) = read(_COPIES.format(0) + text).link_points
    assert point.seconds == pytest.approx(1e-4)


_RIGHT_ROW = "2097152 524288 float sum -1" + 2 * " 200.0 10.0 17.5 {other} {wrong}" + "\n"


@pytest.mark.parametrize(("wrong", "n_rows"), [("0", 1), ("N/A", 1), ("3", 0), ("nan", 0)])
def test_wrong_elements_are_found_by_their_heading(read, nccl_log, wrong, n_rows):
    """The column before it is one that no version has had so far."""
    text = _in_columns(nccl_log, "time algbw busbw other #wrong", f"100.0 10.0 17.5 8 {wrong}")
    log = read(text + _RIGHT_ROW.format(other="8", wrong="0"))
    assert [point.nbytes for point in log.link_points] == [2**20] * n_rows + [2**21]
    assert len(log.warnings) == 1 - n_rows


def test_a_log_that_does_not_say_what_was_wrong_is_refused(read, nccl_log):
    text = _in_columns(nccl_log, "time algbw busbw", "100.0 10.0 17.5")
    with pytest.raises(FileError, match=r"line 9: no column .* allowed: a column #wrong or error"):
        read(text)


@pytest.mark.parametrize(
    ("kind", "error", "is_right"),
    [
        ("float", "0e+00", True),
        ("float", "7e-05", True),
        ("float", "8e-05", False),
        ("float", "4e+00", False),
        ("half", "7e-02", True),
        ("half", "8e-02", False),
        ("int", "1e+00", False),
        ("float", "N/A", True),
    ],
)
def test_before_2022_a_row_is_wrong_if_its_error_is_above_that_of_its_type(
    read, nccl_log, kind, error, is_right
):
    """The test allowed 1e-5 of float and 1e-2 of half for each of the other seven ranks."""
    text = _in_columns(nccl_log, "time algbw busbw error", f"100.0 10.0 17.5 {error}")
    log = read(text.replace("float", kind) + _RIGHT_ROW.format(other="", wrong="0e+00"))
    assert [point.nbytes for point in log.link_points] == [2**20] * is_right + [2**21]
    assert is_right or f"the error is {error}, more than" in log.warnings[0]
    assert len(log.warnings) == 1 - is_right


@pytest.mark.parametrize("before", [False, True], ids=["alone", "behind a log of times"])
def test_times_of_the_host_are_refused(read, nccl_log, before):
    """With -C 1, nccl-tests reports how long the host took to issue the collectives."""
    text = _in_columns(nccl_log, "cputime algbw busbw #wrong", "4.0 10.0 17.5 0")
    with pytest.raises(FileError, match=r"the column cputime .* without --report_cputime") as error:
        read(before * nccl_log(2, 4) + text)
    assert "\n" not in str(error.value)


def test_a_row_without_its_last_cell_is_cut_short(read, nccl_log):
    whole = nccl_log(2, 4)
    points = read(whole + whole.splitlines()[-1].rpartition("0")[0])
    assert [point.seconds for point in points.link_points] == pytest.approx([1e-4])
    assert "the row is cut short; left out" in points.warnings[0]


def test_a_test_of_several_groups_at_once_is_refused(read, nccl_log):
    text = nccl_log(2, 4)
    for rank in range(8):
        text = text.replace(f"Rank {rank} Pid", f"Rank {rank} Group {rank % 4} Pid")
    with pytest.raises(
        FileError, match="NCCL_TESTS_SPLIT made 4 groups of the ranks; allowed: one"
    ):
        read(text)


def test_an_all_to_all_of_unequal_parts_is_not_taken_for_one_of_equal_parts(read, nccl_log):
    text = "# Collective test starting: alltoallv_perf\n" + nccl_log(2, 4)
    with pytest.raises(FileError, match="alltoallv_perf times no collective that is modelled"):
        read(text)
