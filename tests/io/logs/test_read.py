"""Logs are recognised, and their ranks become groups of an axis."""

import pytest

from axonn_tune.errors import FileError, InputError


def test_one_rank_of_each_node_is_a_group_across_nodes(read, nccl_log):
    (point,) = read(nccl_log(4, 1, busbw=15.0)).link_points
    assert (point.stride, point.size, point.n_rings, point.everywhere) == (4, 4, 1, True)
    assert not point.is_of_whole_axis


@pytest.mark.parametrize(
    ("n_hosts", "ranks_per_host", "complaint"),
    [
        (2, 2, "2 of 4 ranks per node"),
        (1, 8, "8 ranks per node; allowed: up to 4, as many as a node of machine '.*' has"),
        (1, 1, "1 ranks with 1 per node; .* two ranks or more"),
        (0, 0, "0 ranks with 1 per node; .* two ranks or more"),
    ],
)
def test_groups_that_no_axis_can_have_are_refused(
    read, nccl_log, n_hosts, ranks_per_host, complaint
):
    with pytest.raises(InputError, match=complaint):
        read(nccl_log(n_hosts, ranks_per_host), kind="all_reduce")


def test_repeated_runs_give_a_spread(read, nccl_log):
    texts = [nccl_log(2, 4, time_us=time_us) for time_us in ("100.0", "110.0", "90.0")]
    (point,) = read(*texts).link_points
    assert point.seconds == pytest.approx(1e-4)
    assert point.spread_fraction == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["", "\x7fELF junk"])
def test_an_unknown_file_is_named(read, text):
    with pytest.raises(FileError, match=r"run\.log: not a log of a known format"):
        read(text)


def test_a_log_without_rows_is_named(read, nccl_log):
    with pytest.raises(FileError, match=r"run\.log: no whole row"):
        read(nccl_log(2, 4, rows=0))
