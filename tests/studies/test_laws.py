"""Laws of questions that need many searches: what changes with the machine, and whole runs."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from build import layout_of, prediction_of, ranking_of, search_of
from worlds import machine_of, quantity

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.io.presets import load_machine
from axonn_tune.search.rank import best_of
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Facility
from axonn_tune.spec.model import Model
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint
from axonn_tune.spec.resources import resources
from axonn_tune.strategies.axonn.axonn4d import AXONN
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3
from axonn_tune.studies.compare import compare, rankings
from axonn_tune.studies.parameters import parameters, with_gpu, with_settings
from axonn_tune.studies.run_plan import meet_deadline
from axonn_tune.studies.scaling import efficiencies, scale
from axonn_tune.studies.training_run import Failures, training_run
from axonn_tune.studies.whatif import Influence, influences, what_if

approx = partial(pytest.approx, rel=1e-9)

MODEL = Model("m", 6, 256, 8, 1024, 128)
JOB = Job(8, 16, 128)


def small_search(strategy=AXONN, machine=None, job=JOB, model=MODEL, **options):
    machine = machine or machine_of(slowdown=0.2, jitter=0.02)
    options = {"micro_batch": 1, "recomputes": ("none",), **options}
    return search_of(model, job, machine, strategy, **options)


# Several searches --------------------------------------------------------------------------


def test_rankings_are_of_the_searches_that_have_candidates():
    """Seven ranks divide no heads."""
    job = Job(7, 14, 128)
    allowed = small_search(zero3(), job=job)
    refused = small_search(Megatron3D(), job=job, fixed={"tensor": 7})
    for searches in ([allowed, refused, allowed], [refused, allowed], [allowed]):
        found = rankings(searches)
        assert len(found) == sum(search is allowed for search in searches)
        assert all(len(ranking) for ranking in found)
    assert rankings([]) == []
    other = small_search(AXONN, job=job, fixed={"y": 7})
    with pytest.raises(NoCandidateError) as last:
        ranking_of(refused)
    with pytest.raises(NoCandidateError) as caught:
        rankings([other, refused])
    assert str(caught.value) == str(last.value)


def test_a_comparison_has_the_fastest_first_and_those_without_candidates_last():
    job = Job(7, 14, 128)
    refused = small_search(Megatron3D(), job=job, fixed={"tensor": 7})
    searches = [refused, small_search(zero3(), job=job), small_search(AXONN, job=job)]
    found = compare(searches)
    seconds = [each.prediction.step_seconds for each in found[:2]]
    assert seconds == sorted(seconds)
    assert found[2].prediction is None and found[2].reason
    for each in found[:2]:
        assert each.prediction.step_seconds == ranking_of(each.search).prediction(0).step_seconds


def test_scaling_compares_with_the_first_count_that_has_a_candidate():
    """Model FLOP/s of each GPU: with one batch, GPU-seconds of the first over those of others."""
    tight = machine_of()
    alone = ranking_of(small_search(job=Job(1, 16, 128))).prediction(0)
    gpu = replace(tight.gpu, memory_bytes=quantity(0.97 * alone.memory_bytes))
    tight = replace(tight, gpu=gpu)
    searches = [
        small_search(machine=tight, job=Job(n, 16, 128), fixed={"data": 1}) for n in (1, 4, 8)
    ]
    points = scale(searches)
    assert points[0].prediction is None
    steps = [point.prediction.step_seconds for point in points[1:]]
    assert efficiencies(points) == [
        None,
        1.0,
        approx(4 * steps[0] / (8 * steps[1])),
    ]
    with pytest.raises(NoCandidateError, match="fits on no grid"):
        scale(searches[:1])
    assert efficiencies([points[0]]) == [None]


# The machine changed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("less", "more", "expected"),
    [(2.0, 4.5, 0.5), (1.0, 3.5, 2 / 3), (None, 4.0, math.inf), (4.0, None, math.inf)],
)
def test_an_influence_moves_by_the_larger_of_both_changes(less, more, expected):
    less, more = (None if s is None else SimpleNamespace(step_seconds=s) for s in (less, more))
    base = SimpleNamespace(step_seconds=3.0)
    influence = Influence(SimpleNamespace(name="p"), base, less, more)
    assert influence.moves == approx(expected)


def assert_influences_are_searches(search, factor):
    """Each number's best is that of a whole search, and the strongest number comes first."""
    base = ranking_of(search).prediction(0)
    found = influences(search, factor)
    names = {p.name for p in parameters(search.scenario.machine, "bf16") if p.value}
    assert {influence.parameter.name for influence in found} == names
    moves = []
    for influence in found:
        p = influence.parameter
        less, more = (
            best_of(search.on(p.changed(value)), "time").prediction
            for value in (p.value / factor, p.value * factor)
        )
        assert influence.base.configuration == base.configuration
        for each, alone in ((influence.less, less), (influence.more, more)):
            assert each.configuration == alone.configuration, p.name
            assert each.step_seconds == approx(alone.step_seconds, rel=1e-12), p.name
        changes = [abs(each.step_seconds - base.step_seconds) for each in (less, more)]
        moves.append(max(changes) / base.step_seconds)
    assert moves == approx(sorted(moves, reverse=True)) and moves[0] > 0.05


def test_influences_are_searches_on_changed_machines_the_strongest_first():
    search = small_search(fixed={"x": 2, "z": 2, "data": 2}, micro_batch=None)
    assert_influences_are_searches(search, 1.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "fixed"), [(AXONN, {}), (Megatron3D(n_virtual=(1, 2)), {"pipeline": 2, "data": 2})]
)
@pytest.mark.parametrize("factor", [1.2, pytest.param(3.0, marks=pytest.mark.sweep)])
def test_influences_are_searches_for_other_strategies_and_factors(strategy, fixed, factor):
    recomputes = ("none", "full")
    search = small_search(strategy, fixed=fixed, micro_batch=None, recomputes=recomputes)
    assert_influences_are_searches(search, factor)


def test_what_if_keeps_the_former_best_with_its_micro_batch_order_and_stages():
    strategy = Megatron3D(n_virtual=(1, 3))
    options = {"fixed": {"pipeline": 2}, "recomputes": ("none",)}
    search = search_of(MODEL, JOB, machine_of(), strategy, **options)
    changed = with_settings(search.scenario.machine, ["inter_node.bandwidth=0.1x"], "bf16")
    found = what_if(search, changed)
    kept = found.kept
    assert kept.configuration == found.before.configuration
    assert kept.memory_bytes == approx(found.before.memory_bytes)
    assert kept.step_seconds >= found.after.step_seconds
    assert kept.step_seconds > found.before.step_seconds
    unchanged = what_if(search, search.scenario.machine)
    steps = [p.step_seconds for p in (unchanged.before, unchanged.after, unchanged.kept)]
    assert steps == approx([steps[0]] * 3)


UNMEASURED = machine_of(slowdown=0.2, jitter=0.02)
MEASURED = replace(
    UNMEASURED,
    gemm=replace(UNMEASURED.gemm, points=(GemmPoint(512, 512, 512, "NN", "bf16", 1e-4),)),
    kernels=replace(
        UNMEASURED.kernels,
        attention_points=(AttentionPoint(2, 4, 128, 32, True, True, "bf16", 3e-4),),
        memory_points=(MemoryPoint("copy", "bf16", 10**6, 2e-5),),
        gap_seconds=quantity(1e-6),
        issue_seconds=quantity(2e-6),
    ),
    # Two series in the node, in no order of size; one across.
    link_points=(
        LinkPoint("all_gather", 1, 4, 1, True, 2**20, 9e-4),
        LinkPoint("all_gather", 1, 4, 1, True, 2**10, 2e-4),
        LinkPoint("all_gather", 1, 4, 1, True, 2**16, 3e-4),
        LinkPoint("all_reduce", 1, 2, 1, True, 2**20, 5e-4),
        LinkPoint("all_reduce", 1, 2, 1, True, 2**10, 1e-4),
        LinkPoint("all_gather", 1, 8, 1, True, 2**20, 8e-4),
        LinkPoint("all_gather", 1, 8, 1, True, 2**10, 4e-4),
        # Ranks that leave the node, although only two of them.
        LinkPoint("all_gather", 4, 2, 4, True, 2**10, 6e-4),
    ),
)


@pytest.mark.parametrize(("level", "of_level"), [(0, range(5)), (1, range(5, 8))])
@pytest.mark.parametrize("factor", [2.0, 0.25])
def test_points_of_a_level_scale_with_its_latency_and_bandwidth(level, of_level, factor):
    """A series' quickest message is all latency; what a longer one takes beyond it, bandwidth."""
    quickest = [2e-4] * 3 + [1e-4] * 2 + [4e-4] * 2 + [6e-4]
    by_key = {resource.key: resource for resource in resources(MEASURED)}
    quicker = by_key[f"level{level}.latency"].improved(factor)
    wider = by_key[f"level{level}.bandwidth"].improved(factor)
    for i, (point, least) in enumerate(zip(MEASURED.link_points, quickest, strict=True)):
        beyond = point.seconds - least
        expected = (least / factor + beyond, least + beyond / factor)
        if i not in of_level:
            expected = (point.seconds, point.seconds)
        got = (quicker.link_points[i].seconds, wider.link_points[i].seconds)
        assert got == approx(expected)
    for i, link in enumerate(MEASURED.links):
        scale = factor if i == level else 1.0
        assert quicker.links[i].latency_seconds.value == approx(link.latency_seconds.value / scale)
        assert wider.links[i].bandwidth_bytes_per_s.value == approx(
            link.bandwidth_bytes_per_s.value * scale
        )
        assert quicker.links[i].bandwidth_bytes_per_s == link.bandwidth_bytes_per_s
        assert wider.links[i].latency_seconds == link.latency_seconds


def test_every_parameter_takes_the_value_that_it_is_given():
    """Whatever it is changed to, a parameter of that name then has that value."""
    for parameter in parameters(MEASURED, "bf16"):
        assert parameter.value > 0
        for factor in (0.5, 1.25):
            changed = parameter.changed(factor * parameter.value)
            again = {p.name: p for p in parameters(changed, "bf16")}
            for name, other in again.items():
                before = next(p for p in parameters(MEASURED, "bf16") if p.name == name)
                expected = (factor if name == parameter.name else 1.0) * before.value
                assert other.value == approx(expected), (parameter.name, name)


def test_measured_points_follow_the_rate_that_they_measure():
    """Twice the rate, half the time; of other rates nothing changes."""
    rates = {
        "gpu.compute": {"gemm", "attention"},
        "gpu.memory_bandwidth": {"memory"},
        "gemm.rate": {"gemm"},
        "attention.rate": {"attention"},
        "jitter": set(),
        "interference": set(),
        "gemm.k_overhead": set(),
        "host.gap": set(),
    }
    by_name = {p.name: p for p in parameters(MEASURED, "bf16")}
    for name, moved in rates.items():
        changed = by_name[name].changed(2.0 * by_name[name].value)
        seconds = {
            "gemm": changed.gemm.points[0].seconds / 1e-4,
            "attention": changed.kernels.attention_points[0].seconds / 3e-4,
            "memory": changed.kernels.memory_points[0].seconds / 2e-5,
        }
        expected = {kind: 0.5 if kind in moved else 1.0 for kind in seconds}
        assert seconds == approx(expected), name
    both = by_name["attention.rate"].changed(2.0 * by_name["attention.rate"].value).kernels
    before = MEASURED.kernels.flash_backward_fraction.value
    assert both.flash_backward_fraction.value == approx(2.0 * before)
    calm = by_name["interference"].changed(0.1).kernels
    assert calm.slowdown_fraction.value == approx(0.1)


def test_the_launch_can_be_set_where_no_kernel_was_measured():
    names = {p.name for p in parameters(machine_of(), "bf16")}
    assert names - {p.name for p in parameters(MEASURED, "bf16")} == {"host.launch"}


@pytest.mark.parametrize(
    ("setting", "factor"),
    [("0.5x", 0.5), (".5 x", 0.5), ("3×", 3.0), ("+20%", 1.2), ("-20 %", 0.8), ("+2.5%", 1.025)],
)
def test_factors_and_changes_in_percent(setting, factor):
    for name in ("gpu.compute", "level1.latency", "gpu.memory"):
        before = {p.name: p.value for p in parameters(MEASURED, "bf16")}[name]
        changed = with_settings(MEASURED, [f"{name}={setting}"], "bf16")
        after = {p.name: p.value for p in parameters(changed, "bf16")}[name]
        assert after == approx(factor * before)


@pytest.mark.parametrize(
    ("names", "level"), [(("inter_node", "level1"), 1), (("intra_node", "level0"), 0)]
)
def test_levels_have_names_by_their_place(names, level):
    for name in names:
        changed = with_settings(MEASURED, [f"{name}.bandwidth=2x"], "bf16")
        for i, (link, before) in enumerate(zip(changed.links, MEASURED.links, strict=True)):
            ratio = link.bandwidth_bytes_per_s.value / before.bandwidth_bytes_per_s.value
            assert ratio == approx(2.0 if i == level else 1.0)
    single = machine_of(units=(1,), bandwidths=(1e9,), latencies=(1e-6,), ranks_per_node=1)
    changed = with_settings(single, ["inter_node.bandwidth=2x"], "bf16")
    assert changed.links[0].bandwidth_bytes_per_s.value == 2e9
    with pytest.raises(InputError, match="no parameter 'intra_node"):
        with_settings(single, ["intra_node.bandwidth=2x"], "bf16")
    node = machine_of(units=(1,), bandwidths=(1e9,), latencies=(1e-6,), ranks_per_node=8)
    with pytest.raises(InputError, match="no parameter 'inter_node"):
        with_settings(node, ["inter_node.bandwidth=2x"], "bf16")


@pytest.mark.parametrize(
    "name",
    ["gemm.k_overhead", "memory.reserved", "memory.fragmentation", "host.gap", "host.issue"],
)
def test_what_may_be_nothing_can_be_set_to_zero(name):
    changed = with_settings(MEASURED, [f"{name}=0"], "bf16")
    assert {p.name: p.value for p in parameters(changed, "bf16")}[name] == 0.0
    with pytest.raises(InputError, match="above zero"):
        with_settings(MEASURED, ["gpu.compute=0"], "bf16")


def test_another_gpu_leaves_the_hosts_part():
    h100 = load_machine("dgx-h100")
    changed = with_gpu(MEASURED, h100)
    assert changed.kernels.gap_seconds.value == 1e-6
    assert changed.kernels.issue_seconds.value == 2e-6
    assert changed.kernels.memory_fraction == h100.kernels.memory_fraction
    assert changed.gpu == h100.gpu and changed.links == MEASURED.links


# Whole runs ------------------------------------------------------------------------------------


def test_checkpoints_that_take_as_long_as_two_failures_lie_apart_are_made_once_in_between():
    """Daly's equation 37 holds below 2 M; from there on the interval is M."""
    assert Failures(10.0, 20.0, 0.0).interval_seconds == 10.0
    assert Failures(10.0, 25.0, 0.0).interval_seconds == 10.0
    delta, mtbf = 19.0, 10.0
    root = math.sqrt(delta / (2 * mtbf))
    expected = math.sqrt(2 * delta * mtbf) * (1 + root / 3 + root**2 / 9) - delta
    assert Failures(mtbf, delta, 0.0).interval_seconds == approx(expected)


def test_work_that_ends_before_the_first_checkpoint_has_one_interval():
    """Daly's equation 20 with all work in one interval."""
    failures = Failures(1000.0, 10.0, 50.0)
    work = 0.1 * failures.interval_seconds
    expected = 1000.0 * math.exp(50.0 / 1000.0) * math.expm1((work + 10.0) / 1000.0)
    assert failures.wall_seconds(work) == approx(expected)


@pytest.mark.parametrize("restart", [0.0, 3000.0])
def test_a_run_that_would_take_a_million_times_as_long_never_ends(restart):
    """exp of the cycle and the restart over the mean time between failures."""
    for checkpoint, is_endless in ((12_000.0 - restart, False), (15_000.0 - restart, True)):
        failures = Failures(1000.0, checkpoint, restart)
        cycle = failures.interval_seconds + checkpoint + restart
        assert (cycle / 1000.0 > math.log(1e6)) == is_endless
        assert (failures.wall_seconds(1e7) == math.inf) == is_endless


def test_a_restart_reads_the_checkpoint_that_was_written():
    """Weights in two bytes, and master weights and two moments in four: 14 for a parameter."""
    facility = Facility(
        gpu_mtbf_seconds=quantity(8e6),
        checkpoint_bytes_per_s=quantity(1e6),
        restart_seconds=quantity(300.0),
    )
    machine = replace(machine_of(), facility=facility)
    run = training_run(small_search(machine=machine), 1e6)
    written = run.failures.checkpoint_seconds
    assert written == approx(14 * MODEL.parameters / 1e6, rel=0.03)
    assert run.failures.restart_seconds == approx(300.0 + written)
    assert run.failures.mtbf_seconds == approx(8e6 / 8)
    steps = math.ceil(1e6 / (16 * 128))
    assert run.n_steps == steps and run.work_seconds == steps * run.best.step_seconds
    assert run.model_flops == approx(
        run.best.tflops_per_gpu * 1e12 * 8 * run.best.step_seconds / (16 * 128) * 1e6
    )


@pytest.mark.parametrize("per_node", [1, 3, 4, 6])
@pytest.mark.parametrize("n_nodes", [None, 20, 100])
def test_counts_of_nodes_that_are_tried_are_powers_of_two_and_halfway(per_node, n_nodes):
    """Counts begin at what would do at the peak and end at 64 times that, or at what there is."""
    nodes = None if n_nodes is None else quantity(float(n_nodes))
    machine = machine_of(units=(1, per_node) if per_node > 1 else (1, 2), ranks_per_node=per_node)
    machine = replace(machine, facility=replace(machine.facility, n_nodes=nodes))
    search = small_search(machine=machine, job=Job(8, 64, 8192))
    tokens = 1e12
    flops = MODEL.model_flops(tokens, 4096)  # causal attention reads half of the keys
    for at_peak in (0.3, 5.0, 11.7):
        deadline = flops / (300e12 * at_peak)
        tried = []

        def spy(counts, tried=tried):
            tried.extend(counts)
            return []

        with pytest.raises(InputError, match="no layout that fits"):
            meet_deadline(search, tokens, deadline, spy)
        least = max(at_peak, per_node)
        most = n_nodes * per_node if n_nodes else 2**22
        shapes = {2**k for k in range(30)} | {3 * 2**k for k in range(30)} | {1}
        regular = [n * per_node for n in sorted(shapes) if least <= n * per_node <= most]
        # None is left out below 64 times the least, and none is far above.
        tried = list(dict.fromkeys(tried))
        assert tried == regular[: len(tried)]
        left = regular[len(tried) :]
        assert not left or left[0] > 64 * least
        assert tried[-1] <= per_node * 2 ** math.ceil(math.log2(64 * least / per_node))
    with pytest.raises(InputError, match="even at their peak"):
        meet_deadline(
            replace_nodes(search, 2), tokens, flops / (300e12 * (2 * per_node + 0.5)), iter
        )


def replace_nodes(search, n_nodes):
    facility = replace(search.scenario.machine.facility, n_nodes=quantity(float(n_nodes)))
    return search.on(replace(search.scenario.machine, facility=facility))


def test_a_deadline_on_the_dot_is_met():
    search = small_search(job=Job(8, 64, 128), machine=machine_of())
    tokens = 1e9
    (first, second) = pairwise_runs(search, tokens)
    on_the_dot = meet_deadline(search, tokens, second.wall_seconds)
    counts = [run.search.scenario.job.n_gpus for run in on_the_dot]
    assert on_the_dot[-1].wall_seconds <= second.wall_seconds
    assert counts[-1] <= second.search.scenario.job.n_gpus
    assert first.wall_seconds > second.wall_seconds


def pairwise_runs(search, tokens):
    """Runs on four and on eight GPUs."""
    return [training_run(search.on_gpus(n), tokens) for n in (4, 8)]


def test_a_wider_interval_of_the_step_is_a_wider_one_of_the_run():
    run = training_run(small_search(machine=machine_of()), 1e9)
    low, high = run.best.step_seconds_interval
    walls = [run.failures.wall_seconds(run.n_steps * s) for s in (low, high)]
    assert run.wall_seconds_range == approx(tuple(walls))
    bare = replace(run, best=replace(run.best, spread_fraction=None))
    assert bare.wall_seconds_range == approx((run.wall_seconds, run.wall_seconds))
    for before, after in pairwise(sorted([*walls, run.wall_seconds])):
        assert before < after


def test_the_layout_of_a_run_is_the_best_of_its_search():
    search = small_search(machine=machine_of())
    run = training_run(search, 1e9)
    assert run.best.step_seconds == ranking_of(search).prediction(0).step_seconds
    fixed = prediction_of(search, layout_of(AXONN, data=8))
    assert run.best.step_seconds <= fixed.step_seconds
