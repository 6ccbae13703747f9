"""Output of the OSU micro-benchmarks becomes points of collectives."""

from pathlib import Path

import pytest

from axonn_tune.errors import FileError, InputError

LOG = Path(__file__).parents[2] / "data" / "osu_allgather_2x4.log"


def test_an_allgather_counts_the_part_of_one_rank(read_files):
    points = read_files(LOG, n_ranks=8).link_points
    assert [(point.kind, point.nbytes, point.seconds) for point in points] == [
        ("all_gather", 8 * 1024, pytest.approx(40e-6)),
        ("all_gather", 8 * 2**20, pytest.approx(1e-3)),
    ]


def test_a_collective_asks_for_the_number_of_ranks(read_files):
    with pytest.raises(InputError, match="--log-ranks"):
        read_files(LOG)


def test_bandwidth_between_two_nodes_or_inside_one(read):
    text = "# OSU MPI Bandwidth Test v7.4\n# Size      Bandwidth (MB/s)\n4194304    25000.00\n"
    (between,) = read(text, ranks_per_node=1).link_points
    assert (between.kind, between.stride, between.size) == ("send_recv", 4, 2)
    assert between.seconds == pytest.approx(4194304 / 25e9)
    (inside,) = read(text).link_points
    assert (inside.stride, inside.size, inside.everywhere) == (1, 2, False)


def test_a_benchmark_that_is_not_modelled_is_named(read):
    with pytest.raises(
        FileError, match=r"run\.log.*Barrier Latency test times nothing.*allowed: allreduce"
    ):
        read("# OSU MPI Barrier Latency Test v7\n1 2\n", n_ranks=8)
