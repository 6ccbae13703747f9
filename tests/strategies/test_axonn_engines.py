"""What engines make of AxoNN's algorithm: how often weights travel, when, and in which type."""

from collections import Counter
from dataclasses import replace

import pytest
from build import number, operations, plan_of

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine, load_machine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, Gemm, MemoryBound
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.tuning import Adapters
from axonn_tune.step.prediction import hardware_flops
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.named import strategy_named

MODEL = Model("m", n_layers=6, hidden_size=64, n_heads=8, vocab_size=512, seq_len=32)
JOB = Job(16, 16, 32)
GRID = {"x": 1, "y": 2, "z": 4, "data": 2}
LAYERS = ("qkv", "proj", "up", "down")
NAMES = ("bundled", "axonn", "axonn-sc24", "nanogpt")
BUNDLED, AXONN_0_2, SC24, NANOGPT = map(load_engine, NAMES)
ALL = pytest.mark.parametrize("engine", [BUNDLED, AXONN_0_2, SC24, NANOGPT], ids=NAMES)

# 128 times 2 x 4 ranks of a tensor grid, the next multiple above 512 tokens.
PADDED_VOCABULARY = 1024
VOCABULARY_ELEMENTS = PADDED_VOCABULARY * MODEL.hidden_size / GRID["y"]
# What a rank holds more than where Z splits a vocabulary that is not padded.
SPLIT_ELEMENTS = MODEL.vocab_size * MODEL.hidden_size / (GRID["y"] * GRID["z"])
ADDED_ELEMENTS = VOCABULARY_ELEMENTS - SPLIT_ELEMENTS


def plan(engine, recompute="full", model=MODEL):
    return plan_of(Axonn4D(engine=engine), model, JOB, recompute=recompute, **GRID)


def count(part, kind, axis="z"):
    """Collectives of the blocks, with the repeats of each phase."""
    return sum(
        phase.repeats
        for phase in part.phases
        for op in phase.operations
        if isinstance(op, Collective)
        and (op.kind, op.axis) == (kind, axis)
        and op.name.split(".")[1] in LAYERS
    )


@pytest.mark.parametrize(
    ("engine", "recompute", "gathers"),
    [
        (BUNDLED, "full", 2.75),  # one weight of four is not needed for recomputation
        (AXONN_0_2, "full", 3),
        (NANOGPT, "full", 3),
        (SC24, "full", 2),
        (SC24, "none", 2),
        (BUNDLED, "none", 2),
    ],
)
def test_each_weight_is_gathered_so_often_and_its_gradient_scattered_once(
    engine, recompute, gathers
):
    microstep = plan(engine, recompute).microstep
    n_weights = MODEL.n_layers * len(LAYERS)
    assert count(microstep, "all_gather") == gathers * n_weights
    assert count(microstep, "reduce_scatter") == n_weights


def recomputed(engine, **about):
    """Names of recomputed operations but copies, with their repeats; `about` changes the job."""
    job = replace(JOB, **about)
    microstep = plan_of(Axonn4D(engine=engine), MODEL, job, recompute="full", **GRID).microstep
    names = [op.name for op in operations(microstep) if not op.name.endswith(".join")]
    return Counter(name for name in names if name.startswith("recompute."))


def test_the_bundled_runtime_recomputes_a_block_up_to_the_input_of_its_last_product():
    left_out = recomputed(AXONN_0_2) - recomputed(BUNDLED)
    last = ("down.all_gather", "down.gemm", "down.all_reduce", "residual2")
    assert left_out == dict.fromkeys((f"recompute.{name}" for name in last), MODEL.n_layers)
    assert not recomputed(BUNDLED) - recomputed(AXONN_0_2)


@pytest.mark.parametrize("about", [{"dropout": True}, {"adapters": Adapters(8)}])
def test_a_block_is_recomputed_to_its_end_where_something_needs_its_last_product(about):
    assert recomputed(BUNDLED, **about) == recomputed(AXONN_0_2, **about)


def test_the_hardware_flops_of_the_bundled_runtime_have_no_last_product_twice():
    def flops(engine):
        scenario = Scenario(MODEL, JOB, load_machine("perlmutter"), Axonn4D(engine=engine))
        return hardware_flops(scenario, "full")

    tokens = JOB.global_batch * JOB.seq_len
    last = 2 * tokens * MODEL.n_layers * 4 * MODEL.hidden_size**2
    assert flops(AXONN_0_2) - flops(BUNDLED) == last


def kernels_behind_gathers(engine):
    """Kernels between the start of each gather and the product that uses the weight."""
    started, hidden = {}, {}
    n_kernels = 0
    for op in operations(plan(engine).microstep):
        if isinstance(op, Collective):
            if op.kind == "all_gather":
                started[op.name.removesuffix(".all_gather")] = n_kernels
        else:
            owner, _, action = op.name.rpartition(".")
            if isinstance(op, Gemm) and owner in started and action in ("gemm", "gemm_input"):
                hidden[owner] = n_kernels - started.pop(owner)
            n_kernels += action != "join"  # it waits for its gather
    return hidden


def test_the_bundled_runtime_hides_every_gather():
    assert min(kernels_behind_gathers(BUNDLED).values()) > 0


def test_axonn_hides_no_gather_of_the_backward_pass():
    hidden = kernels_behind_gathers(AXONN_0_2)
    for name, n_kernels in hidden.items():
        assert (n_kernels > 0) == name.startswith("forward"), name


def test_the_first_gather_of_a_recomputed_block_is_exposed_in_the_code_of_sc24():
    hidden = kernels_behind_gathers(SC24)
    assert hidden["recompute.qkv"] == 0
    assert all(hidden[f"recompute.{layer}"] > 0 for layer in LAYERS[1:])
    assert not [name for name in hidden if name.startswith("backward") and "head" not in name]


def test_nanogpt_gathers_in_fp32_and_converts_what_it_gathered():
    of_job = {op.name: op for op in operations(plan(AXONN_0_2).microstep)}
    n_converted = 0
    for op in operations(plan(NANOGPT).microstep):
        if isinstance(op, Collective) and op.kind == "all_gather":
            assert number(op.nbytes) == 2.0 * number(of_job[op.name].nbytes)
        elif op.name.endswith(".convert"):
            assert isinstance(op, MemoryBound)
            gather = of_job[op.name.replace(".convert", ".all_gather")]
            assert number(op.nbytes) == 3.0 * number(gather.nbytes)
            n_converted += 1
    assert n_converted >= 3 * len(LAYERS)


def joined(engine, oag, **about):
    """Bytes that join each weight which came as a list, over the bytes of its gather."""
    job = replace(JOB, overlap=Overlap(oag=oag), **about)
    microstep = plan_of(Axonn4D(engine=engine), MODEL, job, recompute="full", **GRID).microstep
    gathers = {op.name: op for op in operations(microstep) if op.name.endswith(".all_gather")}
    return {
        name: number(op.nbytes) / number(gathers[f"{name}.all_gather"].nbytes)
        for op in operations(microstep)
        if (name := op.name.removesuffix(".join")) != op.name
    }


@pytest.mark.parametrize(
    ("engine", "oag", "chains"),
    [
        (SC24, True, set()),
        (SC24, False, {"forward", "recompute", "backward"}),
        (AXONN_0_2, True, {"recompute", "backward"}),
        (AXONN_0_2, False, {"forward", "recompute", "backward"}),
        # train.py always overlaps its forward pass.
        (NANOGPT, True, {"recompute", "backward"}),
        (NANOGPT, False, {"recompute", "backward"}),
        (BUNDLED, False, set()),
    ],
)
def test_weights_that_are_not_gathered_ahead_come_as_lists_and_are_copied_twice(
    engine, oag, chains
):
    copied = joined(engine, oag)
    of_blocks = [name for name in copied if name.split(".")[1] in LAYERS]
    # SC24 keeps what recomputation has gathered for the backward pass.
    n_passes = len(chains) - (engine is SC24 and "backward" in chains)
    assert len(of_blocks) == n_passes * len(LAYERS)
    assert {name.split(".")[0] for name in copied} <= chains
    assert set(copied.values()) <= {4.0}


def test_no_copies_join_a_weight_that_one_rank_has_whole():
    sizes = {**GRID, "z": 1, "data": 8}
    microstep = plan_of(Axonn4D(engine=NANOGPT), MODEL, JOB, recompute="full", **sizes).microstep
    copied = [number(op.nbytes) for op in operations(microstep) if op.name.endswith(".join")]
    assert not any(copied)


def test_nanogpt_waits_for_each_scatter_before_the_next_kernel():
    waited = set()
    pending = set()
    for op in operations(plan(NANOGPT).microstep):
        if isinstance(op, Collective):
            if op.kind == "reduce_scatter" and "embedding" not in op.name:
                pending.add(op.name)
        else:
            waited |= set(op.waits_for)
            assert pending <= waited, op.name
            pending.clear()


@ALL
def test_engines_sum_the_same_gradients_in_calls_of_their_own(engine):
    sums = {
        op.name: op
        for op in operations(plan(engine).step_end)
        if isinstance(op, Collective) and op.axis == "data" and op.name.startswith("gradient")
    }
    of_bundled = next(
        op for op in operations(plan(BUNDLED).step_end) if op.name == "gradient.all_reduce"
    )
    more = 4 * ADDED_ELEMENTS if engine.axonn.replicates_vocabulary else 0
    assert sum(number(op.nbytes) for op in sums.values()) == pytest.approx(
        number(of_bundled.nbytes) + more
    )
    calls = sum(number(op.n_calls) for op in sums.values())
    if engine.axonn.reduction == "whole":
        assert calls == 1
    if engine.axonn.reduction == "parameters":
        n_norms = 2 * (2 * MODEL.n_layers + 1)
        n_biases = n_matrices = 4 * MODEL.n_layers
        assert calls == n_norms + n_biases + n_matrices + 2


@ALL
def test_an_engine_changes_nothing_where_nothing_is_gathered_or_overlapped(engine):
    """On one rank of X and Z, without recomputation, the kernels are the same but for copies.

    The passes of norms' sums move no bytes there.
    """
    sizes = {**GRID, "z": 1, "data": 8}
    of_job = replace(engine.axonn, gathered_element_bytes=None)
    kernels = [
        [
            (op.name, type(op))
            for op in operations(plan_of(Axonn4D(engine=each), MODEL, JOB, **sizes).microstep)
            if not isinstance(op, Collective)
            and not op.name.endswith((".convert", ".attention_copies", ".join", ".sums"))
        ]
        for each in (
            BUNDLED,
            replace(engine, axonn=of_job),
        )
    ]
    assert kernels[0] == kernels[1]


def test_an_engine_carries_out_its_own_strategies_and_no_other():
    for engine in (BUNDLED, AXONN_0_2, SC24, NANOGPT):
        assert strategy_named("axonn", engine=engine).engine is engine
    with pytest.raises(InputError, match="engine nanogpt carries out axonn, not megatron"):
        strategy_named("megatron", engine=NANOGPT)


@ALL
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_copies_around_fused_attention_move_their_share_of_its_output(engine, attention):
    job = replace(JOB, attention=attention)
    microstep = plan_of(Axonn4D(engine=engine), MODEL, job, recompute="full", **GRID).microstep
    moved = {
        op.name.split(".")[0]: number(op.nbytes)
        for op in operations(microstep)
        if op.name.endswith(".attention_copies")
    }
    output_bytes = 2 * JOB.seq_len * MODEL.hidden_size / GRID["y"]
    expected = {"forward": 12, "recompute": 12, "backward": 8}
    copies = engine is SC24 and attention == "flash"
    assert moved == (
        {chain: passes * output_bytes for chain, passes in expected.items()} if copies else {}
    )


@pytest.mark.parametrize(("tied", "n_weights"), [(True, 1), (False, 2)])
def test_sc24_sums_the_gradients_of_a_replicated_vocabulary_once_in_a_step(tied, n_weights):
    of_sc24 = plan(SC24, model=replace(MODEL, tied_embeddings=tied))
    of_vocabulary = [
        op.name
        for op in operations(of_sc24.microstep)
        if isinstance(op, Collective)
        and op.axis == "z"
        and op.name.split(".")[1] in ("embedding", "head")
    ]
    assert not of_vocabulary
    (reduction,) = (o for o in operations(of_sc24.step_end) if "vocabulary" in o.name)
    assert (reduction.kind, reduction.axis, reduction.n_calls) == ("all_reduce", "z", n_weights)
    assert number(reduction.nbytes) == 4 * n_weights * VOCABULARY_ELEMENTS


def test_sc24_sums_each_norm_bias_and_position_over_z_in_a_call_of_its_own():
    model = replace(
        MODEL, position="learned", norm="layer", bias=True, qkv_bias=True, proj_bias=True
    )
    of_sc24, of_bundled = plan(SC24, model=model), plan(BUNDLED, model=model)
    vectors, together = (
        next(op for op in operations(each.step_end) if op.name == "gradient.vectors.all_reduce")
        for each in (of_sc24, of_bundled)
    )
    # Two norms of two vectors and four biases in each layer, a last norm, and the positions.
    assert (vectors.n_calls, together.n_calls) == (MODEL.n_layers * (4 + 4) + 2 + 1, 1)
    assert number(vectors.nbytes) == number(together.nbytes)


@ALL
def test_only_sc24_normalises_the_features_of_a_rank_alone(engine):
    """Where X splits the features, ranks of all others add the sums of mean and variance."""
    split = plan_of(Axonn4D(engine=engine), MODEL, JOB, recompute="full", x=2, y=2, z=2, data=2)
    of_norms = [
        op.name for op in operations(split.microstep) if op.name.split(".")[1].startswith("norm")
    ]
    sums = [name for name in of_norms if name.endswith((".sums", ".all_reduce"))]
    n_norms = len(of_norms) - len(sums)
    assert n_norms > 0
    assert len(sums) == (0 if engine is SC24 else 2 * n_norms)


def test_the_loss_of_sc24_is_that_of_megatron_in_single_kernels():
    """A forward pass moves 38 bytes for each logit, and a backward pass 14, in 14 kernels."""
    launched = operations(SC24.as_run(plan(SC24)).microstep)
    logits = JOB.seq_len * PADDED_VOCABULARY / GRID["y"]
    loss = {op.name: op for op in launched if op.name in ("loss.softmax", "loss.gradient")}
    bytes_of_logit = {name: number(op.nbytes) / logits for name, op in loss.items()}
    assert bytes_of_logit == {
        "loss.softmax": pytest.approx(38, rel=0.01),
        "loss.gradient": pytest.approx(14, rel=0.01),
    }
    assert sum(number(op.n_launches) for op in loss.values()) == 14


def test_sc24_pads_the_vocabulary_by_the_ranks_of_the_tensor_grid():
    columns = {
        name: number(op.n)
        for name, engine in (("sc24", SC24), ("bundled", BUNDLED))
        for op in operations(plan(engine).microstep)
        if op.name == "forward.head.gemm"
    }
    assert columns == {
        "sc24": PADDED_VOCABULARY / GRID["y"],
        "bundled": MODEL.vocab_size / GRID["y"],
    }


def memory(engine):
    table = plan(engine).candidates.executed("full", 1)
    return {name: number(n) for name, n in Axonn4D(engine=engine).memory(MODEL, JOB, table).items()}


def test_the_replicated_vocabulary_is_held_whole_by_every_rank_along_z():
    held, split = memory(SC24), memory(BUNDLED)
    assert held["weights"] - split["weights"] == pytest.approx(2 * ADDED_ELEMENTS)
    states = held["optimizer_states"] - split["optimizer_states"]
    assert states == pytest.approx(12 * ADDED_ELEMENTS)
    with_sums = replace(SC24, axonn=replace(SC24.axonn, replicates_vocabulary=False))
    assert memory(with_sums)["gradients"] < held["gradients"]
    assert memory(with_sums)["gathered_weights"] >= held["gathered_weights"]


def test_a_padded_vocabulary_can_be_shared_by_ranks_that_do_not_divide_it():
    table = plan_of(Axonn4D(), MODEL, JOB, x=1, y=3, z=1, data=1).candidates
    odd = replace(MODEL, hidden_size=72, n_heads=6, n_kv_heads=6)
    rule = "vocabulary not divisible by G_y"
    assert Axonn4D().rejections(odd, JOB, table.placements)[rule].all()
    assert not Axonn4D(engine=SC24).rejections(odd, JOB, table.placements)[rule].any()
