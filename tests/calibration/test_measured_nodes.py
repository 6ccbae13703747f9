"""Profiles of nodes with NVSwitch meet products and collectives that others measured on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from axonn_tune.calibration.fit.assemble import with_link_points
from axonn_tune.calibration.fit.steps import fitted_ring_steps, fitted_tree_steps
from axonn_tune.cost import collectives
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.gemm import Products
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth
from axonn_tune.cost.prices import group_seconds
from axonn_tune.io.logs import LogOptions, read_logs
from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_machine
from axonn_tune.spec.links import Steps
from axonn_tune.spec.points import LinkPoint

DATA = Path(__file__).parents[1] / "data"
SYSTEMS = {
    "dgx-a100": "a100_sxm",
    "dgx-h100": "h100_sxm",
    "dgx-h200": "h200_sxm",
    "dgx-b200": "b200_sxm",
    "dgx-b300": "b300_sxm",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
}
DGX = [name for name in SYSTEMS if name.startswith("dgx")]
PAGE = (Path(__file__).parents[2] / "docs" / "machines.md").read_text()
MIB = 2**20


def measured(name, table):
    """The points of a table that belong to a profile's machine."""
    options = LogOptions(where={"system": SYSTEMS[name]})
    return read_logs([str(DATA / table)], load_machine(name), options)


def errors(machine, points):
    """Predicted over measured time of collectives, less one."""
    seconds = [group_seconds(machine, p.kind, p.stride, p.size, p.nbytes)[0] for p in points]
    return np.array(seconds) / [p.seconds for p in points] - 1.0


def mean(values):
    return np.abs(values).mean()


def stated(row, name):
    """The error in a row of the page's table, as the page writes it."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    return line.split(" | ")[1 + list(SYSTEMS).index(name)].removesuffix(" |")


def written(error):
    """The error with two digits, which is how the page writes it."""
    percent = 100 * error
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"


@pytest.mark.parametrize(
    ("name", "bar"),
    [
        ("dgx-a100", 0.03),
        ("dgx-h100", 0.045),
        ("dgx-h200", 0.045),
        ("dgx-b200", 0.05),
        ("dgx-b300", 0.05),
        ("gb200-nvl72", 0.09),
        ("gb300-nvl72", 0.05),
    ],
)
def test_products_that_the_profile_does_not_hold(name, bar):
    machine = load_machine(name)
    points = measured(name, "products_one_gpu.csv").gemm_points
    held = {(p.m, p.n, p.k) for p in machine.gemm.points if p.dtype == "bf16"}
    assert not held & {(p.m, p.n, p.k) for p in points}
    m, n, k, seconds = np.array([(p.m, p.n, p.k, p.seconds) for p in points]).T
    curve = replace(machine, gemm=replace(machine.gemm, points=()))
    error, without = (
        mean(Products(rates, "bf16").seconds(m, n, k, "NN", False) / seconds - 1.0)
        for rates in (machine, curve)
    )
    assert error < bar
    assert error < without
    assert written(error) == stated("products that the profile does not hold, mean error", name)
    assert written(without) == stated("the same without measured products", name)


@pytest.mark.parametrize("number_format", ["fp8", "fp8_block"])
@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "dgx-a100"])
def test_low_products_are_met_once_they_cast_what_they_multiply(name, number_format):
    """The table times the cast of the m x k operand with the product; no profile holds that.

    The time of a cast is fitted, a number for each machine and format. It must be near what the
    memory allows: a cast reads two bytes of an element once or more often, and writes one.
    """
    machine = load_machine(name)
    options = LogOptions(where={"system": SYSTEMS[name], "gemm_dtype": number_format})
    points = read_logs([str(DATA / "low_products_one_gpu.csv")], machine, options).gemm_points
    m, n, k, seconds = np.array([(p.m, p.n, p.k, p.seconds) for p in points]).T
    product = Products(machine, number_format).seconds(m, n, k, "NN", False)
    bytes_moved = np.arange(0.0, 20.0, 0.1)
    casts = np.outer(bytes_moved, m * k) / achieved_memory_bandwidth(machine)
    error = np.abs((product + casts) / seconds - 1.0).mean(axis=1)
    assert error.min() < 0.11
    assert 2.0 < bytes_moved[error.argmin()] < 12.0


@pytest.mark.parametrize("name", SYSTEMS)
def test_collectives_from_one_mebibyte(name):
    large = [p for p in measured(name, "collectives_one_node.csv").link_points if p.nbytes >= MIB]
    # All-gathers, reduce-scatters, all-reduces and all-to-alls of ten sizes, over 2, 4 and 8 GPUs.
    assert len(large) == 4 * 10 * len({p.size for p in large})
    error = mean(errors(load_machine(name), large))
    assert error < 0.02
    assert written(error) == stated("collectives of 1 to 512 MiB, all sizes", name)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_all_to_all_from_one_mebibyte(name):
    points = measured(name, "collectives_one_node.csv").link_points
    large = [p for p in points if p.kind == "all_to_all" and p.nbytes >= MIB]
    assert len(large) == 10 * len({p.size for p in large})
    error = np.abs(errors(load_machine(name), large)).max()
    assert error < 0.06
    assert written(error) == stated("all-to-alls of these sizes, the largest error", name)


@pytest.mark.parametrize(
    ("name", "bar"),
    [
        ("dgx-a100", 0.065),
        ("dgx-h100", 0.04),
        ("dgx-h200", 0.04),
        ("dgx-b200", 0.07),
        ("dgx-b300", 0.07),
        ("gb200-nvl72", 0.07),
        ("gb300-nvl72", 0.07),
    ],
)
def test_sizes_between_those_that_were_imported(name, bar):
    """Every second size is imported, so that the others are two doublings from each other."""
    points = measured(name, "collectives_one_node.csv").link_points
    imported = [p for p in points if p.nbytes in {4**i for i in range(9, 15)} | {512 * MIB}]
    machine = with_link_points(replace(load_machine(name), link_points=()), imported)
    others = [p for p in points if p.nbytes >= MIB and p not in imported]
    assert len(others) == 4 * 4 * len({p.size for p in others})
    error = mean(errors(machine, others))
    assert error < bar
    assert written(error) == stated("sizes left out, where every second one is imported", name)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "dgx-a100"])
def test_another_version_of_the_library(name):
    """Machines whose rows in the page of validation are of another version than their profile."""
    rows = [row for row in load_published("collectives_one_node") if row["machine"] == name]
    points = [
        LinkPoint(row["kind"], 1, int(row["ranks"]), 1, True, int(row["mebibytes"]) * MIB, seconds)
        for row in rows
        for seconds in [1e-3 * float(row["milliseconds"])]
    ]
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| [another version of NCCL]")]
    row = line[2 : line.index(" | ")]
    assert written(mean(errors(load_machine(name), points))) == stated(row, name)


@pytest.mark.parametrize("name", DGX)
def test_the_level_states_the_bus_bandwidth_of_the_largest_message(name):
    machine = load_machine(name)
    level = machine.links[0]
    largest = [p for p in machine.link_points if (p.size, p.nbytes) == (8, 512 * MIB)]
    assert len(largest) == 4
    for p in largest:
        fraction = level.kind_fraction[p.kind].value if p.kind in level.kind_fraction else 1.0
        stated = level.bandwidth_bytes_per_s.value * fraction
        assert stated == pytest.approx(
            float(moved_fraction(p.kind, 8)) * p.nbytes / p.seconds, 4e-3
        )


@pytest.mark.parametrize(
    ("kind", "bar"), [("all_reduce", 0.16), ("all_gather", 0.12), ("reduce_scatter", 0.12)]
)
def test_bandwidth_by_nodes_on_aws(kind, bar):
    """An all-reduce on 64 nodes was twice as slow as its law; other counts of nodes are nearer."""
    machine = load_machine("aws-p5-2024")
    plotted = [p for p in machine.link_points if p.kind == kind and p.size > 8]
    assert [p.size for p in plotted] == [16, 32, 64, 128, 256, 512]
    bandwidth_error = 1.0 / (1.0 + errors(machine, plotted)) - 1.0
    assert mean(bandwidth_error) < bar


def test_inside_a_node_aws_is_a_dgx():
    dgx, aws = load_machine("dgx-h100"), load_machine("aws-p5")
    assert (aws.gemm, aws.kernels) == (dgx.gemm, dgx.kernels)
    assert (aws.links[0], aws.link_points) == (dgx.links[0], dgx.link_points)


def test_aws_of_2024_differs_between_nodes_alone():
    new, old = load_machine("aws-p5"), load_machine("aws-p5-2024")
    inside = tuple(p for p in old.link_points if p.size <= 8)
    same = replace(old, name=new.name, description=new.description, link_points=inside)
    assert replace(same, links=(old.links[0], new.links[1])) == new


AWS = [
    LinkPoint(row["kind"], 1, int(row["ranks"]), 1, True, int(row["mebibytes"]) * MIB, seconds)
    for row in load_published("collectives_aws_p5")
    for seconds in [1e-3 * float(row["milliseconds"])]
]


@pytest.mark.parametrize(
    ("kind", "bar"), [("all_gather", 0.03), ("all_reduce", 0.1), ("all_to_all", 0.12)]
)
def test_collectives_over_nodes_of_aws(kind, bar):
    """Small all-to-alls take longer on many nodes."""
    assert mean(errors(load_machine("aws-p5"), [p for p in AWS if p.kind == kind])) < bar


def test_rings_on_aws_follow_from_those_of_other_sizes():
    """What calibrate finds over 2, 8 and 32 nodes meets gathers over 4 and 16 nodes."""
    machine = load_machine("aws-p5")
    gathers = [p for p in AWS if p.kind == "all_gather"]
    steps = fitted_ring_steps([p for p in gathers if p.size in (16, 64, 256)])
    efa = replace(machine.links[1], ring_steps=Steps("measured", "a part of the rows", steps))
    found = replace(machine, links=(machine.links[0], efa))
    others = [p for p in gathers if p.size in (32, 128)]
    assert len(others) == 14
    assert mean(errors(found, others)) < 0.05


def test_steps_on_aws_are_what_calibrate_finds():
    efa = load_machine("aws-p5").links[1]
    rings = fitted_ring_steps([p for p in AWS if p.kind != "all_to_all"])
    scatters = [replace(p, kind="reduce_scatter") for p in rings if p.kind == "all_gather"]
    assert sorted_steps(efa.ring_steps.points) == sorted_steps([*rings, *scatters])
    trees = fitted_tree_steps(AWS, rings, 8)
    of_one = [p for p in efa.tree_steps.points if p.n_rings == 1]
    assert of_one == [p for p in trees if p.above_ranks == 0 or p.nbytes <= 512 * MIB]


@pytest.mark.parametrize(
    ("name", "n_ranks", "least_mebibytes", "n_points"), [("alps", 8, 32, 8), ("aws-p5", 16, 256, 6)]
)
def test_large_all_reduces_over_two_nodes_follow_without_their_steps(
    name, n_ranks, least_mebibytes, n_points
):
    """Neither trees nor rings of the profile are measured: NCCL's own numbers are left."""
    machine = load_machine(name)
    outer = replace(machine.links[1], ring_steps=None, tree_steps=None)
    machine = replace(machine, links=(machine.links[0], outer))
    rows = [
        row
        for row in load_published("collectives_aws_p5" if name == "aws-p5" else "collectives_alps")
        if row["kind"] == "all_reduce" and int(row["ranks"]) == n_ranks
    ]
    points = [
        LinkPoint("all_reduce", 1, n_ranks, 1, True, int(row["mebibytes"]) * MIB, seconds)
        for row in rows
        for seconds in [1e-3 * float(row["milliseconds"])]
        if int(row["mebibytes"]) >= least_mebibytes
    ]
    assert len(points) == n_points
    assert np.abs(errors(machine, points)).max() < 0.1


@pytest.mark.parametrize(("n_nodes", "times"), [(3, 64.782 / 35.215), (4, 70.253 / 35.215)])
def test_all_reduces_of_a_gibibyte_take_so_many_times_as_long_as_over_two_nodes(n_nodes, times):
    """Nodes of p4d, eight A100 with 400 Gb/s (NVIDIA/nccl issue 527, out of place)."""
    machine = load_machine("a100-400g")
    few, many = (
        float(group_seconds(machine, "all_reduce", 1, 8 * n, 1024 * MIB)[0]) for n in (2, n_nodes)
    )
    assert many / few == pytest.approx(times, rel=0.12)


def all_reduces_of_h100(cluster, n_ranks):
    """All-reduces of 16 MiB to 8 GiB over nodes with eight NICs of 400 Gb/s."""
    table = (DATA / "all_reduces_h100.csv").read_text().splitlines()[4:]
    rows = [row.split(",") for row in table]
    return [
        LinkPoint("all_reduce", 1, n_ranks, 1, True, int(mebibytes) * MIB, 1e-6 * float(time))
        for name, ranks, mebibytes, time in rows
        if (name, int(ranks)) == (cluster, n_ranks)
    ]


@pytest.mark.parametrize(
    ("cluster", "n_ranks", "bar"),
    [
        ("first", 16, 0.08),
        ("first", 32, 0.07),
        ("second", 16, 0.09),
        ("second", 32, 0.17),
        ("second", 64, 0.2),
    ],
)
def test_all_reduces_over_two_four_and_eight_nodes_of_h100(cluster, n_ranks, bar, monkeypatch):
    """With NCCL's share of trees they are nearer than if every tree had the share of large ones."""
    points = all_reduces_of_h100(cluster, n_ranks)
    assert len(points) == 10
    error = mean(errors(load_machine("dgx-h100"), points))
    assert error < bar
    monkeypatch.setattr(collectives, "_TREE_SHARE", np.array([collectives.LARGEST_TREE_SHARE]))
    assert mean(errors(load_machine("dgx-h100"), points)) > error + 0.04


def sorted_steps(points):
    """Steps by kind and bytes."""
    return sorted(points, key=lambda p: (p.kind, p.nbytes))


NVL72 = ("gb200-nvl72", "gb300-nvl72")


@pytest.mark.parametrize("name", NVL72)
def test_sixty_four_gpus_of_each_rack_are_otherwise_the_whole_racks(name):
    whole, part = load_machine(name), load_machine(f"{name}-64")
    per_gpu = [
        m.links[1].bandwidth_bytes_per_s.value / m.links[1].unit_ranks for m in (whole, part)
    ]
    assert per_gpu[0] == per_gpu[1]
    within = [p for p in part.link_points if p.size <= 8]
    assert whole.link_points == tuple(within)
    same = replace(
        part,
        name=whole.name,
        description=whole.description,
        links=(part.links[0], whole.links[1]),
        link_points=whole.link_points,
    )
    assert same == whole


def dispatches():
    """Number of GPUs, bytes and time of all dispatches inside an NVL72, by the table."""
    table = (DATA / "dispatch_nvl72.csv").read_text().splitlines()[3:]
    gpus, tokens, milliseconds = np.array([row.split(",") for row in table], dtype=float).T
    return gpus, tokens * 8 * 7168 * 2.0, 1e-3 * milliseconds


def test_dispatches_of_tokens_inside_a_rack():
    """The largest, above 1 GiB, are in no profile: the last line goes on."""
    machine = load_machine("gb200-nvl72-64")
    gpus, nbytes, seconds = dispatches()
    assert set(gpus) == {8, 16, 32, 64} and nbytes.max() > 2**32
    predicted = [
        group_seconds(machine, "all_to_all", 1, int(n), size)[0]
        for n, size in zip(gpus, nbytes, strict=True)
    ]
    error = np.array(predicted) / seconds - 1.0
    assert np.abs(error).max() < 0.06


def test_groups_that_no_dispatch_was_measured_on_follow_the_law():
    """Without its points of larger groups, the profile knows of groups of 8 GPUs at most."""
    machine = load_machine("gb200-nvl72-64")
    points = tuple(p for p in machine.link_points if p.size <= 8)
    machine = replace(machine, link_points=points)
    gpus, nbytes, seconds = dispatches()
    large = (gpus > 8) & (nbytes > 2**28)
    predicted = [
        group_seconds(machine, "all_to_all", 1, int(n), size)[0]
        for n, size in zip(gpus[large], nbytes[large], strict=True)
    ]
    error = np.array(predicted) / seconds[large] - 1.0
    assert mean(error) < 0.15


def test_a_log_of_whole_nodes_leaves_what_it_does_not_tell():
    """The profile's own pairs are slower behind the switch, and do not count against eight GPUs."""
    before = load_machine("dgx-h200")
    gigabytes_per_s = 468.0
    log = [
        LinkPoint("all_reduce", 1, 8, 1, True, nbytes, 24e-6 + 1.75e-9 * nbytes / gigabytes_per_s)
        for nbytes in (MIB // 128, MIB, 32 * MIB, 1024 * MIB, 8192 * MIB)
    ]
    after = with_link_points(before, log)
    level, level_before = after.links[0], before.links[0]
    bandwidth, bandwidth_before = (
        each.bandwidth_bytes_per_s.value for each in (level, level_before)
    )
    assert bandwidth == pytest.approx(468e9, rel=0.01)
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        known = level_before.kind_fraction[kind].value * bandwidth_before
        assert level.kind_fraction[kind].value * bandwidth == pytest.approx(known)
    assert (level.ring_steps, level.tree_steps) == (None, None)
    large = [point for point in log if point.nbytes >= 1024 * MIB]
    assert abs(errors(replace(after, link_points=()), large)).max() < 0.05
