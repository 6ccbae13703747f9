"""Measured collectives: what the tables hold, and how their errors are added up."""

import pytest
from reproduced import LOADERS

from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.prices import group_seconds
from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_machine
from axonn_tune.reproduce.collectives import collective_errors, timed_collectives

# Advertised bytes per second of NVLink in each direction, by machine (NVIDIA's datasheets).
NVLINK = {
    "dgx-a100": 300e9,
    "dgx-h100": 450e9,
    "dgx-h200": 450e9,
    "dgx-b200": 900e9,
    "dgx-b300": 900e9,
    "gb200-nvl72": 900e9,
    "gb300-nvl72": 900e9,
}


def row(machine="perlmutter", kind="all_gather", ranks=64, mebibytes=64, milliseconds=1.0):
    return {
        "machine": machine,
        "kind": kind,
        "ranks": str(ranks),
        "mebibytes": str(mebibytes),
        "milliseconds": str(milliseconds),
        "library": "NCCL",
    }


def predicted_milliseconds(kind, ranks, mebibytes):
    machine = load_machine("perlmutter")
    return 1e3 * float(group_seconds(machine, kind, 1, ranks, mebibytes * 2**20)[0])


@pytest.mark.slow
def test_sizes_inside_a_node_are_whole_buffers():
    """A rank sends that share of the whole buffer, near the link's bandwidth and never above it."""
    large = [
        timed
        for timed in timed_collectives(load_published, LOADERS)["inside a node"]
        if timed.nbytes == 256 * 2**20 and timed.n_ranks >= 4 and timed.kind != "all_reduce"
    ]
    assert {timed.machine for timed in large} == set(NVLINK)
    for timed in large:
        sent = moved_fraction(timed.kind, timed.n_ranks) * timed.nbytes
        share = sent / timed.comparison.published / NVLINK[timed.machine]
        assert 0.5 < share < 0.8, timed


def test_the_tables_hold_no_other_library_and_their_whole_grid():
    across = load_published("collectives_pccl")
    assert {r["library"].split()[0] for r in across} == {"NCCL", "RCCL"}
    assert len(across) == 102
    inside = load_published("collectives_one_node")
    keys = {(r["machine"], r["kind"], r["ranks"], r["mebibytes"]) for r in inside}
    # A node of an NVL72 has four GPUs, and so no groups of eight.
    assert len(keys) == len(inside) == 4 * 5 * (5 * 3 + 2 * 2)


def test_rows_keep_their_order_whatever_their_groups():
    kinds = ("all_gather", "all_reduce", "all_gather")
    sizes = (64, 8, 16)
    rows = [row(kind=kind, mebibytes=size) for kind, size in zip(kinds, sizes, strict=True)]
    timed = timed_collectives(lambda _: rows, LOADERS)["across nodes"]
    alone = [timed_collectives(lambda _, r=r: [r], LOADERS)["across nodes"][0] for r in rows]
    assert timed == alone
    assert [each.nbytes / 2**20 for each in timed] == list(sizes)


def test_errors_are_counted_for_each_machine_kind_and_number_of_ranks():
    rows = [
        row(kind=kind, ranks=ranks, milliseconds=factor * predicted_milliseconds(kind, ranks, 64))
        for kind, ranks, factor in (
            ("all_gather", 64, 2.0),
            ("all_gather", 8, 1.0),
            ("all_reduce", 64, 0.5),
        )
    ]
    found = {
        (group.machine, group.kind, group.n_ranks): group.errors
        for group in collective_errors(timed_collectives(lambda _: rows, LOADERS)["across nodes"])
    }
    assert list(found) == [
        ("", "", 0),
        ("perlmutter", "", 0),
        ("perlmutter", "all_gather", 0),
        ("perlmutter", "all_gather", 8),
        ("perlmutter", "all_gather", 64),
        ("perlmutter", "all_reduce", 0),
        ("perlmutter", "all_reduce", 64),
    ]
    assert found["perlmutter", "all_gather", 64].bias == pytest.approx(-0.5)
    assert found["perlmutter", "all_gather", 8].mape == pytest.approx(0.0)
    assert found["perlmutter", "all_gather", 0].mape == pytest.approx(0.25)
    assert found["perlmutter", "all_reduce", 0].bias == pytest.approx(1.0)
    assert found["", "", 0].n == 3
    assert found["", "", 0].mape == pytest.approx(0.5)
    assert found["", "", 0].max_error == pytest.approx(1.0)
