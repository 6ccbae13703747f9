"""What DeepSpeed gathers of a block that is recomputed, by hand and in the plan."""

from dataclasses import replace

import pytest
from build import number, operations, plan_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.zero.fetches import BackwardFetches, FetchRules, backward_fetches
from axonn_tune.strategies.zero.units import gradients_of_block, reductions_per_block
from axonn_tune.strategies.zero.zero import zero3, zeropp

DEEPSPEED = load_engine("deepspeed")
DEFAULTS = FetchRules(live_elements=1e9, reuse_elements=1e9, prefetch_elements=5e7)
WIDE = Model("gpt", 6, 12288, 96, 51200, 1024)
JOB = Job(32, 32, 1024, dtype="fp16")
# Every matrix of WIDE is larger than this bucket.
REDUCED_ALONE = replace(DEEPSPEED, zero=replace(DEEPSPEED.zero, bucket_elements=1e7))
NO_BIASES = {"bias": False, "qkv_bias": False, "proj_bias": False}


def fetches(hidden_size, rules=DEFAULTS):
    """The fetches of a GPT's block, whose matrices are those of qkv, proj, up and down."""
    squares = (0, 3, 1, 0, 4, 4)
    return backward_fetches(tuple(n * float(hidden_size) ** 2 for n in squares), rules)


@pytest.mark.parametrize(
    ("hidden_size", "again"),
    # In h^2. Of blocks of more than a billion elements, qkv is gathered again, then proj, too, and
    # up where a billion is less than down's elements in both passes.
    [(4096, 0), (6144, 0), (8192, 0), (9216, 3), (11000, 4), (12288, 8), (20480, 8)],
)
def test_what_is_gathered_again(hidden_size, again):
    assert fetches(hidden_size).again_elements == again * hidden_size**2


def test_without_gathers_ahead_the_distance_decides():
    """With 8192, proj comes again after up and down in both passes, which are 16 h^2 or 1.07e9."""
    rules = replace(DEFAULTS, prefetch_elements=0.0)
    assert fetches(8192, rules).again_elements == 4 * 8192**2
    assert fetches(8192, replace(rules, reuse_elements=2e9)) == BackwardFetches()


def test_which_gathers_start_while_a_block_is_recomputed():
    """These are down for its recomputation and up for its gradient: a third and a half."""
    found = fetches(12288)
    assert found.n_again == 3
    assert found.early_share == pytest.approx(4 / 12)
    assert found.early_again_share == pytest.approx(4 / 8)


def gathered(plan, *names):
    """The kinds of the gathers whose names begin so: group, calls and elements in 16 bits."""
    return {
        op.name: (op.axis, number(op.n_calls), number(op.nbytes) / 2)
        for op in operations(plan)
        if isinstance(op, Collective) and op.name.startswith(names)
    }


def test_the_plan_gathers_again_between_two_gradients():
    plan = plan_of(zero3(DEEPSPEED), WIDE, JOB, 1, "full", shard=32)
    (again,) = gathered(plan.microstep, "backward.block").items()
    assert again == ("backward.block.all_gather", ("shard", 3, 8 * 12288**2))
    waiting = [op.name for op in operations(plan.microstep) if again[0] in op.waits_for]
    assert {*waiting} == {"backward.up.gemm_input"}
    order = [op.name for op in operations(plan.microstep)]
    assert order.index(again[0]) < order.index("backward.down.gemm_input")


@pytest.mark.parametrize(
    ("facts", "is_tied", "squares"),
    [
        ({}, False, 8),
        # The embedding and the positions have 6.4e8 elements.
        ({"forgets_embedding": True}, False, 3),
        ({"live_elements": 1.64e9}, False, 3),
        ({"live_elements": 1.64e9}, True, 8),
    ],
)
def test_what_is_gathered_again_depends_on_the_room_beside_the_ends(facts, is_tied, squares):
    """A weight of both ends takes room all the time, as it does where blocks are gathered first."""
    engine = replace(DEEPSPEED, zero=replace(DEEPSPEED.zero, **facts))
    model = replace(WIDE, tied_embeddings=is_tied)
    plan = plan_of(zero3(engine), model, JOB, 1, "full", shard=32)
    (again,) = gathered(plan.microstep, "backward.block").values()
    assert again[2] == squares * 12288**2


def test_without_overlap_each_matrix_is_gathered_again_right_before_its_use():
    engine = replace(DEEPSPEED, zero=replace(DEEPSPEED.zero, overlaps_gathers=False))
    plan = plan_of(zero3(engine), WIDE, JOB, 1, "full", shard=32)
    again = gathered(plan.microstep, "backward.block")
    squares = {"up": 4, "proj": 1, "qkv": 3}
    assert again == {
        f"backward.block.{layer}.all_gather": ("shard", 1, n * 12288**2)
        for layer, n in squares.items()
    }
    order = [op.name for op in operations(plan.microstep)]
    for layer in squares:
        gather = order.index(f"backward.block.{layer}.all_gather")
        assert order[gather + 1] == f"backward.{layer}.gemm_input"


@pytest.mark.parametrize(
    ("facts", "reduced"),
    [
        ({}, {"down": ["down"], "up": ["up"], "proj": ["proj"], "qkv": ["qkv"]}),
        (NO_BIASES, {"down": [], "up": ["down", "up"], "proj": [], "qkv": ["proj", "qkv"]}),
        # One norm serves attention and MLP, which are side by side.
        (
            {**NO_BIASES, "parallel_block": True, "norms_per_block": 1},
            {"down": [], "up": ["down"], "proj": ["up"], "qkv": ["proj", "qkv"]},
        ),
    ],
)
def test_a_matrix_that_fills_a_bucket_is_reduced_when_the_next_gradient_comes(facts, reduced):
    """Those of a layer without bias wait for a norm's gradient, or for that of the next matrix."""
    model = replace(WIDE, **facts)
    plan = plan_of(zero3(REDUCED_ALONE), model, JOB, 1, "none", shard=32)
    names = [op.name for op in operations(plan.microstep)]
    products = [f"backward.{layer}.gemm_weight" for layer in reduced]
    begins = [names.index(name) for name in products]
    ends = [*begins[1:], names.index(products[0], begins[-1])]
    for layer, begin, end in zip(reduced, begins, ends, strict=True):
        starts = [name for name in names[begin:end] if name.startswith("gradient.block")]
        starts = [name.split(".")[2] for name in starts if name.endswith("shard.reduce")]
        assert starts == reduced[layer]
    kinds = gathered(plan.microstep, "gradient.block")
    elements = {name.split(".")[2]: each[2] for name, each in kinds.items()}
    matrices = {linear.name: linear.parameters for linear in model.block_linears}
    assert elements == pytest.approx(matrices, rel=1e-3)


@pytest.mark.parametrize("bucket_elements", [5e7, 2e8])
def test_matrices_that_share_a_bucket_are_reduced_at_the_end_of_their_block(bucket_elements):
    """The one of proj has 1.5e8 elements."""
    engine = replace(DEEPSPEED, zero=replace(DEEPSPEED.zero, bucket_elements=bucket_elements))
    plan = plan_of(zero3(engine), WIDE, JOB, 1, "none", shard=32)
    kinds = gathered(plan.microstep, "gradient.block")
    assert ("gradient.block.shard.reduce" in kinds) == (bucket_elements > 12288**2)


@pytest.mark.parametrize("bucket_elements", [1e3, 5e8])
def test_all_gradients_are_reduced_however_small_a_bucket_is(bucket_elements):
    """Those of experts, too, which are in no linear layer."""
    engine = replace(DEEPSPEED, zero=replace(DEEPSPEED.zero, bucket_elements=bucket_elements))
    model = replace(WIDE, experts=Experts(8, 2, 4096))
    for each in (WIDE, model):
        plan = plan_of(zero3(engine), each, JOB, 1, "none", shard=32)
        reduced = sum(
            number(op.nbytes) * number(phase.repeats) / 2
            for phase in plan.microstep.phases
            for op in phase.operations
            if isinstance(op, Collective) and op.kind == "reduce_scatter"
        )
        assert reduced == pytest.approx(each.parameters, rel=1e-9)


@pytest.mark.parametrize("ors", [True, False])
def test_kernels_wait_for_a_matrix_of_the_block_before_or_for_their_own(ors):
    job = replace(JOB, overlap=Overlap(ors=ors))
    plan = plan_of(zero3(REDUCED_ALONE), WIDE, job, 1, "none", shard=32)
    order = [(op.name, op.waits_for) for op in operations(plan.microstep)]
    names = [name for name, _ in order]
    reduce = "gradient.block.up.shard.reduce"
    start = names.index(reduce)
    waiting = [at for at, (_, waits) in enumerate(order) if reduce in waits]
    assert names[waiting[0]] == "gradient.block.up.accumulate"
    assert (waiting[0] < start) == ors


def test_each_matrix_is_exchanged_when_it_is_formed():
    plan = plan_of(zeropp(engine=REDUCED_ALONE), WIDE, JOB, 1, "full", secondary=16, across=2)
    reduced = gathered(plan.microstep, "gradient.block")
    for layer in ("down", "up", "proj", "qkv"):
        for group in ("secondary", "across"):
            assert reduced[f"gradient.block.{layer}.{group}.reduce"][:2] == (group, 2)
    n_vectors = sum(n for name, (_, n, _) in reduced.items() if name.endswith("vectors.reduce"))
    assert n_vectors == pytest.approx(8, rel=0.1)


@pytest.mark.parametrize(
    ("hidden_size", "joined"),
    # In h^2: proj comes with up where it has less than 5e7 elements.
    [(4096, 5), (6144, 5), (8192, 0), (12288, 0)],
)
def test_only_what_comes_with_others_is_copied(hidden_size, joined):
    model = Model("gpt", 6, hidden_size, 32, 51200, 1024)
    plan = plan_of(zero3(DEEPSPEED), model, JOB, 1, "none", shard=32)
    copied = {
        op.name: number(op.nbytes)
        for op in operations(plan.microstep)
        if op.name.endswith("block.copy")
    }
    wanted = 2 * 2 * joined * hidden_size**2
    assert copied.get("forward.block.copy", 0.0) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("bucket_elements", "message_bytes", "of_matrix"),
    # A bucket of 5e8 takes qkv and proj of 12288 (4 of 12 h^2). In the type of the weights these
    # are copied, joined and divided, and the others divided; in fp32 all are cast.
    [(1e7, 2.0, 4.0), (5e8, 2.0, 4.0 + 8.0 * 4 / 12), (2e9, 2.0, 12.0), (2e9, 4.0, 22.0)],
)
def test_gradients_that_share_a_bucket_are_copied_and_joined(
    bucket_elements, message_bytes, of_matrix
):
    facts = {"bucket_elements": bucket_elements, "reduced_element_bytes": message_bytes}
    engine = replace(DEEPSPEED, zero=replace(DEEPSPEED.zero, **facts))
    plan = plan_of(zero3(engine), WIDE, JOB, 1, "none", shard=32)
    packed = {
        op.name: number(op.nbytes)
        for op in operations(plan.microstep)
        if op.name.startswith("gradient.block") and op.name.endswith("shard.pack")
    }
    assert sum(packed.values()) == pytest.approx(of_matrix * WIDE.block_matmul_parameters, rel=1e-3)


@pytest.mark.parametrize(
    ("bucket_elements", "n_reductions"),
    # Four matrices and the vectors between them; of two blocks with 3, 1, 4 and 4 h^2, three
    # reductions of 8 h^2.
    [(1e7, 8.0), (8.1 * 4096**2, 1.5)],
)
def test_a_reduction_ends_where_the_next_gradient_does_not_fit(bucket_elements, n_reductions):
    model = Model("gpt", 100, 4096, 32, 51200, 1024)
    found = reductions_per_block(gradients_of_block(model), 100, bucket_elements)
    assert found == pytest.approx(n_reductions, abs=0.01)


@pytest.mark.parametrize("hidden_size", [4096, 12288])
def test_deepspeed_of_2021_gathers_every_matrix_in_all_three_passes(hidden_size):
    """Recorded of its hooks (v0.4.0): no module stands where its recorded order has it."""
    model = Model("gpt", 6, hidden_size, 32, 51200, 1024)
    plan = plan_of(zero3(load_engine("deepspeed-2021")), model, JOB, 1, "full", shard=32)
    chains = ("forward", "recompute", "backward")
    passes = gathered(plan.microstep, *(f"{chain}.block" for chain in chains))
    calls = {name: each[1] for name, each in passes.items()}
    assert calls == {f"{chain}.block.all_gather": 4 for chain in chains}


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_without_recomputation_each_matrix_is_gathered_once_in_each_pass(recompute):
    plan = plan_of(zero3(DEEPSPEED), WIDE, JOB, 1, recompute, shard=32)
    (only,) = gathered(plan.microstep, "backward.block").values()
    assert only[2] < 12 * 12288**2 * WIDE.n_layers


ZEROPP = ZeroProgram(quantises_copy=True, sends_scales_apart=True, reuse_elements=1e9)


def test_gathers_from_the_second_copy_are_quantised_and_have_scales_of_their_own():
    plans = [
        plan_of(zeropp(engine=Engine(zero=each)), WIDE, JOB, 1, secondary=16, across=2)
        for each in (ZeroProgram(), ZEROPP)
    ]
    plain, quantised = (gathered(plan.microstep, "backward.block") for plan in plans)
    name = "backward.block.all_gather"
    assert quantised[name][0] == plain[name][0] == "secondary"
    assert quantised[name][1] == 2 * plain[name][1]
    assert quantised[name][2] == pytest.approx(plain[name][2] / 2, rel=1e-2)
    kernels = {op.name for op in operations(plans[1].microstep) if isinstance(op, MemoryBound)}
    assert "backward.block.second_copy.dequantise" in kernels
    assert "backward.block.copy" not in kernels


def test_the_release_of_zeropp_gathers_from_all_ranks_what_recomputation_starts():
    """0.5 M forward, then 4 and 4 of 12 h^2 in 8 bits: a third of M more between nodes.

    A fifth of the last block is still gathered. The release forgets the embedding in its count of
    what is gathered, which is the head, too.
    """
    later = replace(DEEPSPEED.zero, forgets_embedding=True)
    early = replace(later, copy_serves_gradients=True)
    strategies = [zeropp(engine=replace(DEEPSPEED, zero=zero)) for zero in (later, early)]
    plans = [plan_of(each, WIDE, JOB, 1, "full", secondary=16, across=2) for each in strategies]
    block = WIDE.block_matmul_parameters
    for plan, share in zip(plans, (0, 8 / 12), strict=True):
        for passes, wanted in ((("forward.block",), 1.0), (("recompute", "backward"), share)):
            kinds = gathered(plan.sync_microstep, *passes).values()
            across = {each for each in kinds if each[0] == "secondary*across"}
            elements = 2 * sum(each[2] for each in across)
            assert elements == pytest.approx(wanted * block, rel=0.02)


def test_each_gradient_is_exchanged_for_itself_with_its_scales():
    plan = plan_of(zeropp(engine=DEEPSPEED), WIDE, JOB, 1, "full", secondary=16, across=2)
    reduced = gathered(plan.microstep, "gradient.")
    for group in ("secondary", "across"):
        assert reduced[f"gradient.block.{group}.reduce"][:2] == (group, 2 * 4)
    group, n_calls, elements = reduced["gradient.block.vectors.reduce"]
    # Two norms with gain and shift, and four biases.
    assert (group, elements) == ("secondary*across", pytest.approx(4 * 12288 + 9 * 12288))
    assert n_calls == pytest.approx(8, rel=0.1)
