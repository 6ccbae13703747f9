"""A machine is found again from what it would be measured at."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prices import gemm_seconds
from worlds import machine_of, quantity

from axonn_tune.calibration.fit.assemble import fitted_machine, with_gemm_points, with_link_points
from axonn_tune.calibration.fit.links import LevelShape, fitted_levels
from axonn_tune.calibration.fit.rates import known_gpu, with_fitted_curve
from axonn_tune.calibration.measured_cluster import MeasuredCluster
from axonn_tune.cost.prices import group_seconds
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine, preset_machines
from axonn_tune.io.yaml_files import save_yaml
from axonn_tune.spec.calibration import Calibration, RankSpeed
from axonn_tune.spec.links import RingShare
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint

SIZES = [2**power for power in range(10, 31, 2)]
# Both an intercept and a slope show in messages of 1 KiB to 1 GiB.
BANDWIDTHS, LATENCIES = st.floats(5e9, 3e11), st.floats(2e-6, 5e-5)


@st.composite
def clusters(draw):
    """Machines of one to three levels whose kinds of collectives differ."""
    units = [1]
    for _ in range(draw(st.integers(0, 2))):
        units.append(units[-1] * draw(st.sampled_from([2, 4])))
    machine = machine_of(
        units=units,
        bandwidths=[draw(BANDWIDTHS) for _ in units],
        latencies=[draw(LATENCIES) for _ in units],
        ranks_per_node=units[-1],
    )
    levels = [
        replace(
            level,
            kind_fraction={"all_gather": quantity(draw(st.floats(0.4, 1.6)))},
            kind_latency_seconds={"all_gather": quantity(draw(LATENCIES))},
        )
        for level in machine.links
    ]
    return replace(machine, links=tuple(levels)), units[-1] * 2


def measured(machine, n_ranks, noise, random):
    """What collectives over every axis would take, with noise."""
    points = []
    pairs = itertools.product(range(1, n_ranks + 1), range(2, n_ranks + 1))
    for (stride, size), kind in itertools.product(pairs, ("all_reduce", "all_gather")):
        if n_ranks % (stride * size):
            continue
        seconds = group_seconds(machine, kind, stride, size, SIZES)
        seconds = seconds * np.exp(noise * random.standard_normal(len(SIZES)))
        points += [
            LinkPoint(kind, stride, size, stride, True, nbytes, float(t))
            for nbytes, t in zip(SIZES, seconds, strict=True)
        ]
    return points


def shapes_of(machine):
    return [LevelShape(level.name, level.unit_ranks) for level in machine.links]


@given(clusters(), st.floats(0, 0.01), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_every_level_and_kind_is_recovered(cluster, noise, seed):
    machine, n_ranks = cluster
    points = measured(machine, n_ranks, noise, np.random.default_rng(seed))
    found = fitted_levels(shapes_of(machine), points, machine.ranks_per_node)
    for i, (level, true) in enumerate(zip(found, machine.links, strict=True)):
        for kind in ("all_reduce", "all_gather"):
            # A ring across a boundary passes those inside it too; the slowest one is seen.
            of_a_ring = min(
                bandwidth(link, kind) / link.unit_ranks for link in machine.links[: i + 1]
            )
            expected = of_a_ring * true.unit_ranks
            assert bandwidth(level, kind) == pytest.approx(expected, rel=0.02 + 2 * noise)
            assert latency(level, kind) == pytest.approx(latency(true, kind), rel=0.02 + 3 * noise)


def latency(level, kind):
    return level.kind_latency_seconds.get(kind, level.latency_seconds).value


def bandwidth(level, kind):
    fraction = level.kind_fraction[kind].value if kind in level.kind_fraction else 1.0
    return level.bandwidth_bytes_per_s.value * fraction


def test_sharing_is_measured_not_assumed():
    """One ring gets a NIC of 25 GB/s, four get 25 each, eight share 100: no law says that."""
    shares = {1: 25e9, 2: 25e9, 4: 25e9, 8: 12.5e9}
    machine = machine_of(units=(1, 8), ranks_per_node=8)
    true = replace(
        machine.links[1],
        ring_shares=tuple(RingShare("all_reduce", n, quantity(b)) for n, b in shares.items()),
    )
    points = []
    for n_rings, each in shares.items():
        for nbytes in SIZES:
            seconds = 2 * 2 * 1e-5 + 2 * 3 / 4 * nbytes / each
            points.append(LinkPoint("all_reduce", 8, 4, n_rings, True, nbytes, seconds))
    (level,) = fitted_levels([LevelShape("inter-node", 8)], points, ranks_per_node=8)
    assert level.bandwidth_bytes_per_s.value == pytest.approx(100e9, rel=1e-3)
    assert level.latency_seconds.value == pytest.approx(1e-5, rel=1e-3)
    found = replace(machine, links=(machine.links[0], level))
    wanted = replace(
        machine, links=(machine.links[0], replace(true, latency_seconds=quantity(1e-5)))
    )
    for stride in (1, 2, 4, 8, 16):
        got, expected = (group_seconds(m, "all_reduce", stride, 16, SIZES) for m in (found, wanted))
        assert got == pytest.approx(expected, rel=1e-3)


def test_two_choices_of_groups_that_disagree_widen_the_spread():
    """The median of 80 and 100 GB/s has a deviation of 10 in 90, which 1.4826 makes a normal's."""
    points = []
    for size, bandwidth in ((4, 80e9), (8, 100e9)):
        for nbytes in SIZES:
            seconds = (size - 1) * 1e-5 + (size - 1) / size * nbytes / bandwidth
            points.append(LinkPoint("all_gather", 4, size, 1, True, nbytes, seconds))
    (level,) = fitted_levels([LevelShape("inter-node", 4)], points, ranks_per_node=4)
    bandwidth = level.bandwidth_bytes_per_s
    assert bandwidth.value == pytest.approx(90e9, rel=0.01)
    assert bandwidth.spread_fraction == pytest.approx(1.4826 / 9, rel=0.05)


def test_all_reduces_over_two_whole_nodes_do_not_make_links_faster_than_they_are():
    """Trees pass the boundary once, where a ring would pass it nearly twice."""
    machine = machine_of(units=(1, 4), bandwidths=(1e15, 80e9), latencies=(1e-6, 1e-5))
    seconds = group_seconds(machine, "all_reduce", 1, 8, SIZES)
    points = [
        LinkPoint("all_reduce", 1, 8, 1, True, nbytes, float(t))
        for nbytes, t in zip(SIZES, seconds, strict=True)
    ]
    (level,) = fitted_levels([LevelShape("inter-node", 4)], points, ranks_per_node=4)
    assert level.bandwidth_bytes_per_s.value == pytest.approx(80e9, rel=0.05)


@pytest.mark.parametrize("name", ["a100-800g", "a100-400g"])
def test_all_reduces_over_two_nodes_tell_the_network_on_rings_and_on_trees(name):
    """NCCL takes rings over A100 nodes with four fast NICs, and trees over those with slow ones."""
    machine = load_machine(name)
    network = machine.links[1]
    points = [
        LinkPoint(kind, 1, 16, 1, True, nbytes, float(t))
        for kind in ("all_reduce", "all_gather")
        for nbytes in (2**power for power in range(24, 31))
        for t in group_seconds(machine, kind, 1, 16, nbytes)
    ]
    (level,) = fitted_levels([LevelShape(network.name, 8)], points, machine.ranks_per_node)
    stated = network.bandwidth_bytes_per_s.value
    assert level.bandwidth_bytes_per_s.value == pytest.approx(stated, rel=0.1)
    assert (level.tree_limits is None) == (name == "a100-400g")
    fitted = replace(machine, links=(machine.links[0], level))
    for stride, size in ((1, 16), (2, 8), (4, 4), (1, 32), (2, 16)):
        got, true = (
            float(group_seconds(each, "all_reduce", stride, size, 2**29)[0])
            for each in (fitted, machine)
        )
        assert got == pytest.approx(true, rel=0.16)


@pytest.mark.parametrize(
    ("units", "size"), [((1, 2), 4), ((1, 4, 8), 16)], ids=["packages of a node", "pods of nodes"]
)
def test_all_reduces_over_two_units_that_are_no_nodes_are_fitted_as_they_are_priced(units, size):
    """Trees join nodes: large messages over two packages or two pods of two nodes run on rings."""
    n_levels, sizes = len(units), [2**power for power in range(24, 31)]
    bandwidths = (*[1e15] * (n_levels - 1), 80e9)
    machine = machine_of(units=units, bandwidths=bandwidths, latencies=(1e-6,) * n_levels)
    seconds = group_seconds(machine, "all_reduce", 1, size, sizes)
    points = [
        LinkPoint("all_reduce", 1, size, 1, True, nbytes, float(t))
        for nbytes, t in zip(sizes, seconds, strict=True)
    ]
    (level,) = fitted_levels([shapes_of(machine)[-1]], points, machine.ranks_per_node)
    assert level.bandwidth_bytes_per_s.value == pytest.approx(80e9, rel=0.01)


def test_a_level_that_nothing_crosses_is_named():
    points = [LinkPoint("all_reduce", 1, 2, 1, True, nbytes, 1e-3) for nbytes in SIZES]
    with pytest.raises(InputError, match="'inter-node' was not measured"):
        fitted_levels(
            [LevelShape("intra-node", 1), LevelShape("inter-node", 2)], points, ranks_per_node=2
        )


def test_a_profile_keeps_the_limits_of_its_trees():
    """The library expects them, whatever a network is measured to send."""
    machine = load_machine("dgx-a100")
    before = machine.links[1]
    points = [LinkPoint("all_gather", 1, 16, 1, True, n, 1e-4 + n / 100e9) for n in SIZES]
    after = with_link_points(machine, points).links[1]
    assert after.bandwidth_bytes_per_s != before.bandwidth_bytes_per_s
    assert after.tree_limits == before.tree_limits is not None


def test_a_kind_that_was_not_measured_keeps_what_the_profile_said():
    machine = machine_of(units=(1, 4), bandwidths=(300e9, 80e9), latencies=(3e-6, 1e-5))
    before = replace(
        machine.links[0],
        kind_fraction={"all_to_all": quantity(0.5)},
        kind_latency_seconds={"all_to_all": quantity(7e-6)},
        is_switch=True,
    )
    machine = replace(machine, links=(before, machine.links[1]))
    points = [LinkPoint("all_gather", 1, 4, 1, True, n, 3 * 2e-6 + 0.75 * n / 100e9) for n in SIZES]
    one_size = LinkPoint("all_reduce", 1, 4, 1, True, 2**20, 1.0)
    after = with_link_points(machine, [*points, one_size]).links
    assert after[1] == machine.links[1]
    level = after[0]
    assert level.is_switch
    wanted = {"all_gather": (100e9, 2e-6), "all_reduce": (300e9, 3e-6), "all_to_all": (150e9, 7e-6)}
    for kind, (beta, alpha) in wanted.items():
        assert bandwidth(level, kind) == pytest.approx(beta, rel=1e-3)
        assert latency(level, kind) == pytest.approx(alpha, rel=1e-3)


GRID = [(m, n, k) for m, n, k in itertools.product((64, 256, 1024, 4096), repeat=3)]


@given(
    sustained=st.floats(0.3, 0.95),
    k_overhead=st.floats(20, 400),
    modes=st.permutations([1.0, 0.9, 0.5]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=10, deadline=None)
def test_the_curve_of_products_is_recovered(sustained, k_overhead, modes, seed):
    plain = machine_of(modes=modes)
    gemm = replace(
        plain.gemm, sustained_fraction=quantity(sustained), k_overhead=quantity(k_overhead)
    )
    true = replace(plain, gemm=gemm)
    random = np.random.default_rng(seed)
    points = [
        GemmPoint(*shape, mode, "bf16", product(true, shape, mode) * noise)
        for (shape, mode), noise in zip(
            itertools.product(GRID, MODES),
            np.exp(0.01 * random.standard_normal(3 * len(GRID))),
            strict=True,
        )
    ]
    found = with_fitted_curve(plain, points, "bf16")
    assert found.gemm.sustained_fraction.value == pytest.approx(sustained, rel=0.03)
    for shape, mode in itertools.product([(2048, 2048, 2048), (512, 8192, 512)], MODES):
        expected = product(true, shape, mode)
        assert product(found, shape, mode) == pytest.approx(expected, rel=0.05)


def product(machine, shape, mode):
    return float(gemm_seconds(*shape, mode, machine, "bf16", kernel_tuning=False))


# A whole profile --------------------------------------------------------------------------------


def measured_cluster(machine, n_ranks, **changes):
    """What a calibration of two levels of links would find."""
    random = np.random.default_rng(0)
    gemm = [
        GemmPoint(*shape, mode, "bf16", product(machine, shape, mode), 0.01)
        for shape, mode in itertools.product(GRID, MODES)
    ]
    copies = [MemoryPoint("copy", "fp32", n, 5e-6 + n / 1.2e12, 0.01) for n in SIZES]
    attention = [
        AttentionPoint(1, 8, 1024, 64, backward, True, "bf16", 1e-4, 0.01)
        for backward in (False, True)
    ]
    cluster = MeasuredCluster(
        device_name="NVIDIA B9000",
        n_multiprocessors=100,
        memory_bytes=40e9,
        idle_bytes=1e9,
        backend="nccl",
        software={"torch": "2.13"},
        n_ranks=n_ranks,
        n_per_node=4,
        hosts=("a", "b"),
        units=(4,),
        level_names=("intra-node", "inter-node"),
        gemm_points=tuple(gemm),
        attention_points=tuple(attention),
        memory_points=tuple(copies),
        link_points=tuple(measured(machine, n_ranks, 0.01, random)),
        gap_seconds=2e-6,
        slowdowns=((0.2, 0.1), (0.1, 0.0)),
        speeds=tuple(RankSpeed(i, "ab"[i // 4], s) for i, s in enumerate([1.0] * 7 + [0.9])),
        notes=("a note",),
        seconds=60.0,
    )
    return replace(cluster, **changes)


PROVENANCE = Calibration(
    "2026-01-01", "axonn-tune calibrate", "NVIDIA B9000", "nccl", 8, ("a",), 1.0
)


def test_a_profile_is_written_and_read_back(tmp_path):
    true = machine_of(units=(1, 4))
    found = fitted_machine(measured_cluster(true, 8), "mine", PROVENANCE, preset_machines())
    assert found.gpu.name == "NVIDIA B9000"
    assert found.kernels.slowdown_fraction.value == pytest.approx(0.15)
    assert 0.01 < found.jitter_fraction.value < 0.1
    path = tmp_path / "mine.yaml"
    save_yaml(path, found)
    assert load_machine(path) == found
    for kind, stride in itertools.product(("all_reduce", "all_gather"), (1, 4)):
        got = group_seconds(found, kind, stride, 2, SIZES)
        assert got == pytest.approx(group_seconds(true, kind, stride, 2, SIZES), rel=0.05)


def test_the_rate_of_one_element_at_a_time_is_that_of_its_point():
    cluster = measured_cluster(machine_of(units=(1, 4)), 8)
    point = MemoryPoint("strided", "bf16", 2**30, 1e-3, 0.02)
    timed = replace(cluster, memory_points=(*cluster.memory_points, point))
    rates = [
        fitted_machine(each, "mine", PROVENANCE, preset_machines()).kernels.strided_bytes_per_s
        for each in (cluster, timed)
    ]
    assert rates[0] is None
    assert (rates[1].value, rates[1].spread_fraction) == (2**30 / 1e-3, 0.02)
    assert rates[1].origin == "measured"


def test_what_was_not_measured_comes_from_the_base():
    true = machine_of(units=(1, 4))
    base = load_machine("perlmutter")
    only_links = measured_cluster(
        true, 8, gemm_points=(), memory_points=(), attention_points=(), speeds=()
    )
    found = fitted_machine(only_links, "mine", PROVENANCE, [], base)
    assert (found.gpu, found.gemm, found.jitter_fraction) == (
        base.gpu,
        base.gemm,
        base.jitter_fraction,
    )
    assert [level.name for level in found.links] == ["intra-node", "inter-node"]
    only_gemm = measured_cluster(true, 8, memory_points=(), link_points=(), slowdowns=())
    found = fitted_machine(only_gemm, "mine", PROVENANCE, [], base)
    assert (found.links, found.kernels) == (base.links, base.kernels)
    assert found.gemm.points == only_gemm.gemm_points
    with pytest.raises(InputError, match=r"kernels \(memory\) and links were not measured"):
        fitted_machine(only_gemm, "mine", PROVENANCE, [])


@pytest.mark.parametrize(
    ("device", "gib", "n_multiprocessors", "machine"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, 108, "perlmutter"),
        ("NVIDIA H100 80GB HBM3", 79.1, 132, "aws-p5-2024"),
        ("AMD Instinct MI250X", 64.0, 110, "frontier-2024"),
        ("NVIDIA GH200 120GB", 94.5, 132, "alps"),
        ("NVIDIA H200", 139.8, 132, "dgx-h200"),
        ("NVIDIA B200", 178.4, 148, "b200-simumax"),
        ("NVIDIA B300 SXM6 AC", 267.7, 148, "dgx-b300"),
        ("NVIDIA GB200", 184.0, 152, "gb200-nvl72-64"),
        ("AMD Instinct MI300X", 192.0, 304, "mi300x"),
        ("CPU, 2 cores", 24.0, 2, None),
        ("NVIDIA H100 PCIe", 79.1, 114, None),
        ("NVIDIA H100 NVL", 93.1, 132, None),
        ("NVIDIA RTX A4000", 16.0, 48, None),
    ],
)
def test_published_figures_serve_for_a_known_gpu(device, gib, n_multiprocessors, machine):
    known = known_gpu(device, gib * 2**30, n_multiprocessors, preset_machines())
    assert (known and known.name) == machine


def test_imported_points_refit_the_levels_that_they_tell_of():
    machine = machine_of(units=(1, 4), bandwidths=(300e9, 80e9))
    slower = replace(
        machine,
        links=(machine.links[0], replace(machine.links[1], bandwidth_bytes_per_s=quantity(40e9))),
    )
    points = [p for p in measured(slower, 16, 0.0, np.random.default_rng(0)) if p.stride == 4]
    found = with_link_points(machine, points)
    assert found.links[0] == machine.links[0]
    assert found.links[1].bandwidth_bytes_per_s.value == pytest.approx(40e9, rel=0.01)
    again = with_link_points(found, points)
    assert len(again.link_points) == len(found.link_points)


def test_imported_products_replace_those_of_the_same_shape():
    machine = machine_of(points=[GemmPoint(64, 64, 64, "NN", "bf16", 1.0)])
    found = with_gemm_points(machine, [GemmPoint(64, 64, 64, "NN", "bf16", 2.0)])
    assert [p.seconds for p in found.gemm.points] == [2.0]
