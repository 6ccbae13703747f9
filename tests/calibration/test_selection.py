"""What a calibration measures covers what a search asks for."""

from dataclasses import astuple

import pytest

pytest.importorskip("torch")

from axonn_tune.api.searching import build_search
from axonn_tune.calibration import selection
from axonn_tune.calibration.fit.links import LevelShape, fitted_levels
from axonn_tune.calibration.measure.kernels import points_by_name
from axonn_tune.calibration.measure.links import whole_bytes
from axonn_tune.calibration.wanted import kernels_of, largest_messages
from axonn_tune.io.presets import load_model
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.plan import MEMORY_KERNELS, Attention, Collective, Gemm
from axonn_tune.spec.points import LinkPoint
from axonn_tune.strategies.axonn.axonn4d import AXONN

THOROUGH = selection.thorough_extent(on_gpu=False)
QUICK = selection.quick_extent(on_gpu=False)


@pytest.mark.parametrize("extent", [QUICK, THOROUGH], ids=["quick", "thorough"])
def test_small_models_run_every_memory_bound_kernel(extent):
    models = (selection.GPT_LIKE, selection.LLAMA_LIKE)
    loads = selection.workloads(extent, ["fp32"], models, on_gpu=False)
    points = [point for load in loads for point in points_by_name(load).values()]
    timed = {getattr(point, "kernel", "attention") for point in points}
    # Copies, plain ones and those of one element at a time, have measurements of their own, casts
    # of low precisions are copies, and the runtime routes no tokens to experts and has no gates
    # that are limited; only a grid that splits X has the rest.
    of_experts = {"routing", "routing_backward", "expert_bias", "expert_bias_backward"}
    of_gpt_oss = {"clamped_swiglu", "clamped_swiglu_backward", "scaled_rotary"}
    assert timed >= set(MEMORY_KERNELS) - {"copy", "strided", "cast"} - of_experts - of_gpt_oss


def test_fp16_has_products_but_no_training_step():
    assert selection.workloads(QUICK, ["fp16"], (selection.GPT_LIKE,), on_gpu=True) == []
    assert selection.gemm_shapes(QUICK, ["fp16"])


@pytest.mark.parametrize("n_ranks", [2, 4, 6, 8, 32])
def test_a_thorough_calibration_measures_every_axis(n_ranks):
    choices = selection.group_choices(THOROUGH, n_ranks, 4 if n_ranks % 4 == 0 else n_ranks, [])
    whole = {(g.stride, g.size) for g in choices if g.everywhere and g.n_rings == g.stride}
    pairs = [(s, g) for s in range(1, n_ranks + 1) for g in range(2, n_ranks + 1)]
    assert whole == {(s, g) for s, g in pairs if n_ranks % (s * g) == 0}
    assert len(set(choices)) == len(choices)


def test_rings_across_nodes_share_links_in_every_number():
    for extent in (QUICK, THOROUGH):
        choices = selection.group_choices(extent, 32, 8, [8])
        assert {g.n_rings for g in choices if (g.stride, g.size) == (8, 4)} == {1, 2, 4, 8}


def test_one_block_alone_and_one_ring_alone():
    choices = selection.group_choices(THOROUGH, 8, 8, [])
    assert any(not g.everywhere and g.n_rings == 1 for g in choices)
    assert any(g.everywhere and g.n_rings < g.stride for g in choices)


def test_a_quick_calibration_of_many_ranks_keeps_what_fills_units():
    choices = selection.group_choices(QUICK, 64, 8, [2, 8])
    assert len({(g.stride, g.size) for g in choices}) < 21
    assert {(1, 2), (2, 4), (8, 8), (1, 64)} <= {(g.stride, g.size) for g in choices}
    # Every level has groups all of whose hops are its own.
    points = [LinkPoint("all_reduce", *astuple(g), n, 1e-3 * n) for g in choices for n in (8, 64)]
    shapes = [LevelShape(f"level {unit}", unit) for unit in (1, 2, 8)]
    assert len(fitted_levels(shapes, points, ranks_per_node=8)) == 3


def test_messages_grow_as_far_as_memory_allows():
    sizes = selection.message_sizes(THOROUGH, 2**24)
    assert sizes[0] == 1024 and sizes[-1] <= 2**24 < sizes[-1] * THOROUGH.message_growth
    assert sizes == sorted(set(sizes))


def test_buffers_have_whole_elements_for_each_rank():
    assert whole_bytes(1024, 3) == 1032
    assert whole_bytes(1, 8) == 32


def test_the_shapes_of_a_search_are_those_of_its_plans():
    search = build_search("tiny", 8, micro_batch=1)
    products, attentions = kernels_of(search)
    assert len(set(products)) == len(products)
    model, job = load_model("tiny"), search.scenario.job
    for grid in (grid_layout(1, 1, 1, 8), grid_layout(2, 2, 1, 2), grid_layout(1, 4, 2, 1)):
        for op in operations(model, job, grid):
            if isinstance(op, Gemm):
                assert (*map(number, (op.m, op.n, op.k)), op.mode) in products
            elif isinstance(op, Attention):
                sizes = tuple(map(number, (op.n_sequences, op.n_heads)))
                assert (*sizes, op.seq_len, op.head_dim) in attentions


def test_grids_that_move_least_come_first():
    search = build_search("80b", 1024, micro_batch=1)
    products, _ = kernels_of(search)
    best = build_search("80b", 1024, micro_batch=1, cost_model="paper")
    grid = rank_candidates(best).prediction(0).layout
    first = operations(best.scenario.model, best.scenario.job, grid)
    shapes = {(*map(number, (op.m, op.n, op.k)), op.mode) for op in first if isinstance(op, Gemm)}
    assert shapes <= set(products[: len(products) // 4])


def test_messages_are_measured_up_to_the_largest_of_the_search():
    search = build_search("tiny", 8, global_batch=8, recompute="none")
    largest = largest_messages(search)
    met = set()
    for grid in (
        grid_layout(1, 1, 1, 8),
        grid_layout(2, 2, 1, 2),
        grid_layout(1, 4, 2, 1),
        grid_layout(8, 1, 1, 1),
    ):
        x, y, z, _ = grid.sizes.values()
        strides = {"x": 1, "y": x, "z": x * y, "data": x * y * z}
        for op in operations(search.scenario.model, search.scenario.job, grid):
            if isinstance(op, Collective) and (size := grid.size(op.axis)) > 1:
                key = (op.kind, strides[op.axis], size)
                assert number(op.nbytes) / number(op.n_calls) <= largest[key]
                met.add(key)
    assert ("all_reduce", 1, 8) in met and ("all_gather", 4, 2) in met
    assert not any(size == 1 for _, _, size in largest)


def operations(model, job: Job, grid):
    table = CandidateTable.single(Configuration(grid, micro_batch=1))
    return [
        op for p in AXONN.plan(model, job, table.executed("none", 1)).phases for op in p.operations
    ]


def number(size):
    return round(float(getattr(size, "item", lambda: size)()))


def test_the_largest_copy_fits_in_no_cache():
    """AMD's MI300X has a cache of 256 MiB; a copy's source and target take half of it each."""
    for extent in (selection.quick_extent(True), selection.thorough_extent(True)):
        assert max(extent.copy_bytes) >= 4 * 2**28
