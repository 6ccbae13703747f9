"""Logs of nccl-tests, OSU and GEMM sweeps become points."""

from dataclasses import replace
from pathlib import Path

import pytest
from worlds import machine_of

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.logs.read import read_logs
from axonn_tune.spec.points import GemmPoint, LinkPoint

DATA = Path(__file__).parents[1] / "data"
NODE_OF_4 = machine_of(units=(1, 4), ranks_per_node=4)
SET = "     time   algbw   busbw #wrong"
HEADER = f"#       size         count      type   redop    root{SET}{SET}\n"
ROW = "  1048576  262144  float  {redop}  -1" + "  100.0  {algbw}  {busbw}  0" * 2 + "\n"


def ranks(n_hosts, each):
    lines = [
        f"#  Rank {host * each + i} Pid {100 + i} on n{host} device {i} [0x07] NVIDIA H100\n"
        for host in range(n_hosts)
        for i in range(each)
    ]
    return "# nThread 1 nGpus 1 minBytes 8\n" + "".join(lines)


def write(tmp_path, text, name="run.log"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_nccl_tests_under_mpirun():
    found = read_logs([str(DATA / "nccl_all_reduce_2x4.log")], NODE_OF_4)
    expected = ((2**10, 60e-6), (2**20, 120e-6), (2**26, 1.5e-3), (2**30, 24e-3))
    assert [replace(p, seconds=1.0) for p in found.link_points] == [
        LinkPoint("all_reduce", 1, 8, 1, True, nbytes, 1.0) for nbytes, _ in expected
    ]
    assert [p.seconds for p in found.link_points] == pytest.approx([t for _, t in expected])
    wrong, cut = found.warnings
    assert "line 23: 17 elements were wrong; left out" in wrong
    assert "line 25: the row is cut short; left out" in cut


def test_osu_counts_the_part_of_one_rank_in_an_allgather():
    found = read_logs([str(DATA / "osu_allgather_2x4.log")], NODE_OF_4, n_ranks=8)
    assert [(p.kind, p.nbytes, p.seconds) for p in found.link_points] == [
        ("all_gather", 8 * 1024, pytest.approx(40e-6)),
        ("all_gather", 8 * 2**20, pytest.approx(1e-3)),
    ]
    with pytest.raises(InputError, match="--log-ranks"):
        read_logs([str(DATA / "osu_allgather_2x4.log")], NODE_OF_4)


def test_osu_bandwidth_between_two_nodes(tmp_path):
    text = "# OSU MPI Bandwidth Test v7.4\n# Size      Bandwidth (MB/s)\n4194304    25000.00\n"
    path = write(tmp_path, text)
    (point,) = read_logs([path], NODE_OF_4, ranks_per_node=1).link_points
    assert (point.kind, point.stride, point.size) == ("send_recv", 4, 2)
    assert point.seconds == pytest.approx(4194304 / 25e9)
    (inside,) = read_logs([path], NODE_OF_4).link_points
    assert (inside.stride, inside.size, inside.everywhere) == (1, 2, False)


def test_products_from_a_table():
    found = read_logs([str(DATA / "gemm.csv")], NODE_OF_4)
    assert [replace(p, seconds=1.0) for p in found.gemm_points] == [
        GemmPoint(1024, 1024, 1024, "NT", "fp16", 1.0),
        GemmPoint(4096, 4096, 4096, "TN", "bf16", 1.0),
    ]
    assert [p.seconds for p in found.gemm_points] == pytest.approx([1e-5, 5.5e-4])


def test_rates_of_products_become_seconds(tmp_path):
    (point,) = read_logs(
        [write(tmp_path, "m,n,k,tflops\n1000,1000,1000,200\n")], NODE_OF_4
    ).gemm_points
    assert (point.mode, point.dtype, point.seconds) == ("NN", "bf16", pytest.approx(1e-5))


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
def test_an_old_log_tells_its_collective_by_name_or_ratio(tmp_path, name, redop, ratio, kind):
    row = ROW.format(redop=redop, algbw=10.0, busbw=10.0 * ratio)
    path = write(tmp_path, ranks(2, 4) + HEADER + row, name)
    (point,) = read_logs([path], NODE_OF_4).link_points
    assert (point.kind, point.seconds) == (kind, pytest.approx(1e-4))


def test_a_log_that_does_not_tell_asks_for_the_kind(tmp_path):
    row = ROW.format(redop="none", algbw=10.0, busbw=8.75)
    path = write(tmp_path, ranks(2, 4) + HEADER + row)
    with pytest.raises(FileError, match="give --kind"):
        read_logs([path], NODE_OF_4)
    (point,) = read_logs([path], NODE_OF_4, kind="all_gather").link_points
    assert point.kind == "all_gather"


def test_one_rank_of_each_node_is_a_group_across_nodes(tmp_path):
    row = ROW.format(redop="sum", algbw=10.0, busbw=15.0)
    path = write(tmp_path, ranks(4, 1) + HEADER + row)
    (point,) = read_logs([path], NODE_OF_4).link_points
    assert (point.stride, point.size, point.n_rings, point.everywhere) == (4, 4, 1, True)
    assert not point.is_of_whole_axis
    with pytest.raises(InputError, match="2 of 4 ranks per node"):
        read_logs([write(tmp_path, ranks(2, 2) + HEADER + row)], NODE_OF_4)


def test_repeated_runs_give_a_spread(tmp_path):
    texts = [
        ranks(2, 4) + HEADER + ROW.format(redop="sum", algbw=10, busbw=17.5).replace("100.0", t)
        for t in ("100.0", "110.0", "90.0")
    ]
    paths = [write(tmp_path, text, f"{i}.log") for i, text in enumerate(texts)]
    (point,) = read_logs(paths, NODE_OF_4).link_points
    assert point.seconds == pytest.approx(1e-4)
    assert point.spread_fraction == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a log that is known"),
        ("\x7fELF junk", "not a log that is known"),
        (ranks(2, 4) + HEADER, "no whole row"),
        (ranks(2, 4) + HEADER + "#  (B) (elements) (ms) (GB/s)\n", "not in \\(us\\)"),
        ("# Collective test starting: broadcast_perf\n" + HEADER, "broadcast_perf times no"),
        ("# OSU MPI Barrier Latency Test v7\n1 2\n", "Barrier Latency test times nothing"),
        ("m,n,k\n1,2,3\n", "no column of times"),
        ("m,n,k,us\n1,2,many,4\n", "line 2: invalid literal"),
        ("m,n,k,us,mode\n1,2,3,4,XX\n", "line 2: .*mode is 'XX'"),
        ("m,n,k,tflops\n1,2,3,0\n", "line 2"),
    ],
)
def test_bad_logs_are_named(tmp_path, text, complaint):
    with pytest.raises(FileError, match=complaint) as error:
        read_logs([write(tmp_path, text)], NODE_OF_4, n_ranks=8)
    assert "run.log" in str(error.value)
