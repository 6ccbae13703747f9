"""Machines with other numbers: each of them reaches the prediction, measured points too."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine
from axonn_tune.search.pareto import pareto_front
from axonn_tune.search.rank import rank_candidates
from axonn_tune.step.predict import predict
from axonn_tune.studies.parameters import parameters, with_gpu, with_settings
from axonn_tune.studies.scaling import efficiencies, parse_counts, scale
from axonn_tune.studies.whatif import best, influences, what_if

CALIBRATED = Path(__file__).parents[2] / "docs" / "emulated" / "frontier-mini.yaml"


OF_MEMORY = ("gpu.memory", "memory.reserved", "memory.fragmentation")


def step_of(search, machine):
    return rank_candidates(search.on(machine)).prediction(0).step_seconds


def calibrated_search():
    options = {"global_batch": 16, "dtype": "fp32", "fix": {"x": 2, "y": 2, "z": 2}}
    return build_search("tiny", 8, str(CALIBRATED), **options)


@pytest.mark.parametrize("made", ["shipped", "calibrated"])
def test_every_rate_reaches_the_prediction(made):
    search = build_search("5b", 64, global_batch=64, fix={"x": 2, "y": 2, "z": 4})
    search = search if made == "shipped" else calibrated_search()
    base = step_of(search, search.scenario.machine)
    moved = {}
    for parameter in parameters(search.scenario.machine, search.scenario.job.dtype):
        if parameter.value and parameter.name not in OF_MEMORY:
            more = step_of(search, parameter.changed(4 * parameter.value))
            moved[parameter.name] = more / base - 1.0
    assert max(moved["gpu.compute"], moved["gpu.memory_bandwidth"]) < -0.001
    bandwidths = [name for name in moved if name.endswith(".bandwidth")]
    assert len(bandwidths) == len(search.scenario.machine.links)
    assert all(moved[name] <= 0 for name in bandwidths) and min(map(moved.get, bandwidths)) < -0.005
    latencies = [name for name in moved if name.endswith(".latency")]
    assert all(moved[name] >= 0 for name in latencies) and max(map(moved.get, latencies)) > 0
    for name in ("interference", "jitter", "host.launch"):
        assert moved.get(name, 1.0) > 0, name


def test_a_value_that_is_set_is_the_value_that_the_machine_has(perlmutter):
    settings = ["inter_node.bandwidth=50 GB/s", "intra_node.latency=7us", "gpu.memory=24 GiB"]
    changed = with_settings(perlmutter, [*settings, "jitter=1%"], "bf16")
    assert changed.links[1].bandwidth_bytes_per_s.value == pytest.approx(50e9)
    assert changed.links[0].latency_seconds.value == pytest.approx(7e-6)
    assert changed.gpu.memory_bytes.value == 24 * 2**30
    assert changed.jitter_fraction.value == pytest.approx(0.01)
    assert with_settings(perlmutter, [], "bf16") == perlmutter
    twice = with_settings(perlmutter, ["gpu.compute=2x", "gpu.compute=-50%"], "bf16")
    assert twice.peak_flops_per_s("bf16") == pytest.approx(perlmutter.peak_flops_per_s("bf16"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bandwidth", "write NAME=VALUE"),
        ("warp=2x", "no parameter 'warp'"),
        ("inter_nod.bandwidth=2x", "did you mean 'inter_node.bandwidth'"),
        ("gpu.memory=fast", "or a factor"),
        ("gpu.memory=0", "above zero"),
        ("inter_node.bandwidth=-100%", "above zero"),
        ("inter_node.bandwidth=200 Gb/s", "bits"),
        ("host.gap=2x", "it is 0 on this machine"),
        ("inter_node.bandwidth=400", "'400' has no unit, for example '25 GB/s'"),
        ("gpu.memory=80", "'80' has no unit"),
        ("inter_node.latenz=2x", "did you mean 'inter_node.latency'"),
        ("memory.fragmentation=3", "fragmentation_fraction"),
    ],
)
def test_a_bad_setting_is_named(perlmutter, setting, message):
    with pytest.raises(InputError, match="--set") as caught:
        with_settings(perlmutter, [setting], "bf16")
    assert message in str(caught.value)


def test_another_gpu_brings_its_memory_and_rates_and_leaves_the_links(perlmutter):
    h200 = load_machine("dgx-h200")
    changed = with_gpu(perlmutter, h200)
    assert (changed.gpu, changed.gemm) == (h200.gpu, h200.gemm)
    assert (changed.links, changed.ranks_per_node) == (perlmutter.links, 4)


def test_another_gpu_does_not_bring_its_host(perlmutter):
    """The profile of Alps says that its CPUs take 1.4 times as long to issue a kernel."""
    alps = load_machine("alps")
    assert alps.kernels.issue_factor.value > 1.0
    for field in ("issue_factor", "issue_seconds", "gap_seconds"):
        host_number = getattr(with_gpu(perlmutter, alps).kernels, field)
        assert host_number == getattr(perlmutter.kernels, field)


@pytest.mark.slow
def test_what_if_compares_the_best_before_and_after():
    search = build_search("20b", 64, global_batch=256)
    larger = with_settings(search.scenario.machine, ["gpu.memory=160 GiB"], "bf16")
    found = what_if(search, larger)
    assert found.before == best(search)
    assert found.kept.step_seconds == pytest.approx(found.before.step_seconds)
    assert found.after.step_seconds < found.before.step_seconds
    smaller = with_settings(search.scenario.machine, ["gpu.memory=16 GiB"], "bf16")
    assert not what_if(search, smaller).kept.fits


@pytest.mark.slow
def test_a_configuration_of_a_ranking_is_predicted_alike_alone():
    search = build_search("5b", 16, global_batch=32, strategy="megatron", recompute="full")
    ranking = rank_candidates(search)
    sample = [ranking.prediction(row) for row in range(0, len(ranking), 7)]
    assert {wanted.configuration.n_virtual for wanted in sample} >= {1, 2}
    for wanted in sample:
        alone = predict(search.scenario, wanted.configuration)
        assert alone.configuration == wanted.configuration
        assert alone.step_seconds == pytest.approx(wanted.step_seconds, rel=1e-12)
        assert alone.memory_bytes == pytest.approx(wanted.memory_bytes, rel=1e-12)


@pytest.mark.slow
def test_influences_are_searches_anew_the_strongest_first():
    search = build_search("5b", 64, global_batch=256, recompute="full")
    found = influences(search, 2.0)
    base = best(search)
    moves = [influence.moves for influence in found]
    assert moves == sorted(moves, reverse=True)
    by_name = {influence.parameter.name: influence for influence in found}
    assert by_name["gpu.compute"].more.step_seconds < base.step_seconds
    assert by_name["gpu.compute"].less.step_seconds > base.step_seconds
    faster = with_settings(search.scenario.machine, ["gpu.compute=2x"], "bf16")
    assert by_name["gpu.compute"].more.step_seconds == pytest.approx(step_of(search, faster))
    no_memory = influences(
        search.on(with_settings(search.scenario.machine, ["gpu.memory=6 GiB"], "bf16")),
        1.8,
    )
    assert {i.parameter.name: i for i in no_memory}["gpu.memory"].less is None


@pytest.mark.slow
def test_scaling_states_the_best_of_each_count_and_its_efficiency():
    job = {"global_batch": 256, "recompute": "full"}
    searches = [build_search("5b", count, **job) for count in (32, 64, 256)]
    points = scale(searches)
    for search, point in zip(searches, points, strict=True):
        assert point.prediction.step_seconds == pytest.approx(best(search).step_seconds)
    first, *others = [
        point.prediction.step_seconds * point.search.scenario.job.n_gpus for point in points
    ]
    assert efficiencies(points) == pytest.approx([1.0, *(first / each for each in others)])


def test_a_count_without_a_candidate_says_why_and_the_others_go_on():
    points = scale([build_search("80b", count, global_batch=256) for count in (4, 512)])
    assert points[0].prediction is None and "fits on no grid" in points[0].reason
    assert efficiencies(points) == [None, 1.0]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("128..1024", [128, 256, 512, 1024]),
        ("96,384", [96, 384]),
        ("4,8..40", [4, 8, 16, 32]),
        ("7", [7]),
    ],
)
def test_counts(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "8..4", "0..8", "a", "8,4", "8,8", "1..2..4", "99999999", "-1"]
)
def test_bad_counts_are_refused(text):
    with pytest.raises(InputError, match="--gpus"):
        parse_counts(text)


POINTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()), min_size=1, max_size=12
)


@given(POINTS)
def test_the_pareto_front_is_what_nothing_beats(points):
    front = pareto_front(*(list(column) for column in zip(*points, strict=True)))

    def beaten(row):
        time, memory, _ = points[row]
        return any(
            fits and (t, m) != (time, memory) and t <= time and m <= memory for t, m, fits in points
        )

    kept = {points[row][:2] for row in front}
    assert len(kept) == len(front)
    expected = {p[:2] for i, p in enumerate(points) if p[2] and not beaten(i)}
    assert kept == expected
    times = [points[row][0] for row in front]
    assert times == sorted(times) and not math.isnan(sum(times))
