"""Tables of collectives and products of several machines become points."""

import pytest

from axonn_tune.errors import FileError, InputError

COLLECTIVES = """\
# aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0), systems/data: NCCL inside one node.
system,nccl,op,gpus_one_node,bytes,latency_ms
a100_sxm,2.27.3,all_gather,2,512,0.00898
h100_sxm,2.27.3,alltoall,4,1048576,0.01533
h100_sxm,2.29.2,alltoall,4,1048576,0.01563
h100_sxm,2.29.2,all_reduce,2,1048576,0.01466
"""
PRODUCTS = """\
system,gemm_dtype,m,n,k,latency_ms
h100_sxm,bfloat16,16384,1024,1024,0.05094
h100_sxm,bfloat16,16384,1024,1024,0.05109
h100_sxm,int8,16384,1024,1024,0.0307
"""
H100 = {"system": "h100_sxm"}
BF16 = {"gemm_dtype": "bfloat16"}


def test_collectives_of_one_machine(read):
    exchange, reduce = read(COLLECTIVES, where=H100).link_points
    assert (exchange.kind, exchange.stride, exchange.size) == ("all_to_all", 1, 4)
    assert exchange.nbytes == 2**20
    # Two versions of NCCL are two timings of the same collective.
    assert exchange.seconds == pytest.approx(15.48e-6)
    assert exchange.spread_fraction == pytest.approx(0.0137, rel=0.01)
    assert (reduce.kind, reduce.size, reduce.everywhere) == ("all_reduce", 2, False)


def test_a_condition_chooses_among_the_rows(read):
    points = read(COLLECTIVES, where=H100 | {"nccl": "2.27.3"}).link_points
    assert [(p.kind, p.seconds) for p in points] == [("all_to_all", pytest.approx(15.33e-6))]


def test_a_plain_table_of_collectives(read):
    text = "kind,n_ranks,nbytes,seconds\nreduce_scatter,8,1048576,1.2e-4\n"
    (point,) = read(text).link_points
    assert (point.kind, point.stride, point.size, point.nbytes) == ("reduce_scatter", 1, 8, 2**20)
    assert (point.seconds, point.is_of_whole_axis) == (1.2e-4, True)


def test_whole_numbers_may_have_a_point_as_pandas_writes_them(read):
    (point,) = read("kind,n_ranks,nbytes,us\nall_gather,8.0,1024.0,20\n").link_points
    assert (point.size, point.nbytes) == (8, 1024)


def test_products_that_were_timed_twice_give_one_point(read):
    (point,) = read(PRODUCTS, where=BF16).gemm_points
    assert (point.m, point.n, point.k, point.dtype) == (16384, 1024, 1024, "bf16")
    assert point.seconds == pytest.approx(51.015e-6)
    assert point.spread_fraction == pytest.approx(0.00208)


def test_a_condition_on_a_column_that_only_another_table_has_is_skipped_there(read):
    where = H100 | BF16 | {"nccl": "2.27.3"}
    found = read(COLLECTIVES, PRODUCTS, where=where)
    assert (len(found.link_points), len(found.gemm_points)) == (1, 1)


@pytest.mark.parametrize(
    ("text", "where", "complaint"),
    [
        (COLLECTIVES, {}, "several machines; give --where system=NAME; .*: a100_sxm, h100_sxm"),
        (COLLECTIVES, {"system": "v100"}, "no row has system=v100; allowed: a100_sxm, h100_sxm"),
        (PRODUCTS, {"k": "7"}, "no row has k=7; allowed: 1024"),
        (
            PRODUCTS,
            {"colour": "red", "gemm_dtype": "bfloat16"},
            "--where colour=red: no table has such a column; known: gemm_dtype, ",
        ),
    ],
)
def test_rows_that_are_not_chosen_well_are_refused(read, text, where, complaint):
    with pytest.raises(InputError, match=complaint):
        read(text, where=where)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kind,n_ranks,nbytes\nall_gather,2,8\n", "no column seconds or"),
        (
            "kind,n_ranks,nbytes,ms\nbroadcast,2,8,1\n",
            "line 2: 'broadcast' is no collective that is modelled; allowed: all_reduce, ",
        ),
        (
            "kind,n_ranks,nbytes,ms\nall_gather,two,8,1\n",
            "line 2: n_ranks is 'two'; allowed: a whole number",
        ),
        ("kind,n_ranks,nbytes,ms\nall_gather,2,8\n", "line 2: the row is cut short: .*'ms'"),
        (
            "kind,n_ranks,nbytes,ms\nall_gather,2,8,-1\n",
            "line 2: ms is '-1'; allowed: a number above 0",
        ),
        ("kind,n_ranks,nbytes,ms\n", "no whole row"),
        (PRODUCTS, "line 4: .*dtype is 'int8'"),
    ],
)
def test_bad_tables_are_named(read, text, complaint):
    with pytest.raises(FileError, match=rf"run\.log.*{complaint}"):
        read(text)
