"""AxoNN's step plan: shapes, bytes, order of issue, and sums over all ranks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from worlds import models, worlds

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, grid_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, Gemm, MemoryBound
from axonn_tune.strategies.axonn.axonn4d import AXONN
from axonn_tune.strategies.axonn.memory import stored_parameters

MODEL = Model("toy", n_layers=3, hidden_size=64, n_heads=4, vocab_size=256, seq_len=16)
GRID = grid_layout(2, 4, 2, 2)
JOB = Job(n_gpus=GRID.n_ranks, global_batch=16, seq_len=16)


def plan_of(recompute="none", job=JOB, model=MODEL, grid=GRID, micro_batch=2):
    table = CandidateTable.single(Configuration(grid, micro_batch=micro_batch))
    return AXONN.plan(model, job, table.executed(recompute, 1))


def operations(plan, phase=None):
    return [op for p in plan.phases for op in p.operations if phase in (None, p.name)]


def size(value):
    return float(np.ravel(value)[0])


def named(plan, name):
    return next(op for op in operations(plan) if op.name == name)


def test_shapes_of_a_normal_and_a_transposed_layer():
    """T = 2 x 16 tokens; qkv is 64 -> 192, proj 64 -> 64; X = 2, Y = 4."""
    plan = plan_of()
    shapes = {
        name: (*(size(getattr(named(plan, name), d)) for d in "mnk"), named(plan, name).mode)
        for name in (
            "forward.qkv.gemm",
            "backward.qkv.gemm_input",
            "backward.qkv.gemm_weight",
            "forward.down.gemm",
            "backward.down.gemm_input",
            "backward.down.gemm_weight",
            "forward.head.gemm",
        )
    }
    assert shapes == {
        "forward.qkv.gemm": (32, 192 / 4, 64 / 2, "NN"),
        "backward.qkv.gemm_input": (32, 64 / 2, 192 / 4, "NT"),
        "backward.qkv.gemm_weight": (64 / 2, 192 / 4, 32, "TN"),
        "forward.down.gemm": (32, 64 / 2, 256 / 4, "NN"),
        "backward.down.gemm_input": (32, 256 / 4, 64 / 2, "NT"),
        "backward.down.gemm_weight": (256 / 4, 64 / 2, 32, "TN"),
        "forward.head.gemm": (32, 256 / 4, 64 / 2, "NT"),
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("norms_per_block", "names"),
    [
        (1, ["norm1"]),
        (2, ["norm1", "norm2"]),
        (4, ["norm1", "attention_norm", "norm2", "mlp_norm"]),
    ],
)
def test_a_block_runs_its_norms_in_order_and_backwards(norms_per_block, names, recompute):
    plan = plan_of(recompute, model=replace(MODEL, norms_per_block=norms_per_block))
    block = [f"forward.{name}" for name in names]
    run = [op.name for op in operations(plan, "forward")]
    assert [name for name in run if name in block] == block
    block = [f"backward.{name}" for name in reversed(names)]
    run = [op.name for op in operations(plan, "backward")]
    assert [name for name in run if name in block] == block
    repeated = {name.removeprefix("recompute.") for name in run if name.startswith("recompute.")}
    # Selective recomputation repeats inputs of products, which outputs of other norms are not.
    inputs = [name for name in names if name in ("norm1", "norm2")]
    wanted = {"none": [], "selective": inputs, "full": names}[recompute]
    assert repeated & {"norm1", "norm2", "attention_norm", "mlp_norm"} == set(wanted)


@pytest.mark.parametrize(
    ("tied", "modes", "gradient"),
    [
        # The embedding's weight lies n x k, and so does its gradient.
        (True, ("NT", "NN", "TN"), (256 / 4, 64 / 2, 32)),
        (False, ("NN", "NT", "TN"), (64 / 2, 256 / 4, 32)),
    ],
)
def test_a_head_that_shares_the_embeddings_weight_finds_it_transposed(tied, modes, gradient):
    plan = plan_of(model=replace(MODEL, tied_embeddings=tied))
    products = [
        named(plan, "forward.head.gemm"),
        named(plan, "backward.head.gemm_input"),
        named(plan, "backward.head.gemm_weight"),
    ]
    assert tuple(op.mode for op in products) == modes
    shapes = [tuple(size(getattr(op, d)) for d in "mnk") for op in products]
    assert shapes == [(32, 256 / 4, 64 / 2), (32, 64 / 2, 256 / 4), gradient]


def test_buffers_and_axes_are_the_designs_table():
    plan = plan_of()
    buffers = {
        op.name: (op.kind, op.axis, size(op.nbytes))
        for op in operations(plan)
        if isinstance(op, Collective)
    }
    block = 2 * 64 * 192 / 8  # the gathered qkv weight: bf16, over X and Y
    assert buffers["forward.qkv.all_gather"] == ("all_gather", "z", block)
    assert buffers["backward.qkv.all_gather"] == ("all_gather", "z", block)
    assert buffers["backward.qkv.reduce_scatter"] == ("reduce_scatter", "z", block)
    assert buffers["forward.qkv.all_reduce"] == ("all_reduce", "x", 2 * 32 * 192 / 4)
    assert buffers["backward.qkv.all_reduce"] == ("all_reduce", "y", 2 * 32 * 64 / 2)
    assert buffers["forward.down.all_reduce"] == ("all_reduce", "y", 2 * 32 * 64 / 2)
    assert buffers["backward.down.all_reduce"] == ("all_reduce", "x", 2 * 32 * 256 / 4)
    assert buffers["forward.embedding.all_reduce"] == ("all_reduce", "y", 2 * 32 * 64 / 2)
    assert buffers["forward.norm1.all_reduce"] == ("all_reduce", "x", 2 * 4 * 32)
    sharded, replicated = (
        size(v) for v in stored_parameters(MODEL, plan.candidates, MODEL.n_layers, True, True)
    )
    assert buffers["gradient.all_reduce"] == ("all_reduce", "data", 4 * (sharded + replicated))


def test_heads_are_split_over_y():
    attention = named(plan_of(), "backward.attention")
    assert isinstance(attention, Attention) and attention.backward
    assert (size(attention.n_sequences), size(attention.n_heads), attention.head_dim) == (2, 1, 16)


def test_micro_steps_make_the_global_batch():
    assert size(plan_of().n_microsteps) == 16 / (2 * 2 * 2)


def issue_order(plan, phase, *parts):
    names = [op.name for op in operations(plan, phase)]
    return [name for name in names if name.endswith(parts)]


def waits(plan, name):
    return set(named(plan, name).waits_for) - {"compute"}


def with_overlap(**switches):
    off = {"oar": False, "ors": False, "oag": False}
    return plan_of(job=replace(JOB, overlap=Overlap(**{**off, **switches})))


def test_without_overlap_every_collective_is_awaited_at_once():
    for phase in with_overlap().microstep.phases[:-1]:
        for here, following in pairwise(phase.operations):
            if isinstance(here, Collective):
                assert here.name in following.waits_for


def test_oar_moves_the_all_reduce_behind_the_weight_product():
    name = "backward.up.all_reduce"
    assert waits(with_overlap(), "backward.up.gemm_weight") == {name}
    on = with_overlap(oar=True)
    assert waits(on, "backward.up.gemm_weight") == set()
    # It is awaited before what needs its result, and not before the reduce-scatter is issued.
    names = [op.name for op in operations(on, "backward")]
    after = names.index("backward.up.gemm_weight") + 1
    followers = [op for op in operations(on, "backward")[after:] if name in op.waits_for]
    assert followers[0].name == "backward.norm2.sums"
    assert "backward.up.reduce_scatter" in names[after : names.index("backward.norm2.sums")]


def test_ors_waits_for_the_last_but_one_reduce_scatter():
    """Weight gradients form in the order head, then down, up, proj, qkv a block, embedding."""
    on = with_overlap(ors=True)
    waited = {}
    for op in operations(on):
        scatters = [n.split(".")[1] for n in op.waits_for if n.endswith("reduce_scatter")]
        if scatters:
            waited[op.name] = set(scatters)
    assert waited == {
        "backward.down.gemm_weight": {"proj"},
        "backward.up.gemm_weight": {"qkv", "head"},  # a block's, or the head's before the first
        "backward.proj.gemm_weight": {"down"},
        "backward.qkv.gemm_weight": {"up"},
        "backward.embedding.scatter_add": {"proj"},
        "gradient.tied": {"embedding"},
    }
    assert [p.name for p in on.microstep.phases][-1] == "accumulate"


@given(worlds())
def test_at_most_two_weight_gradients_await_their_reduce_scatter(world):
    """One gradient is under way while the next one forms with ORS; without it none is."""
    model, job, _, recompute, table = world
    plan = AXONN.plan(model, job, table.executed(recompute, 1))
    under_way, n_formed = [], 0
    for phase in plan.microstep.phases:
        for _ in range(min(phase.repeats, 3)):
            for op in phase.operations:
                for name in set(op.waits_for) & set(under_way):
                    del under_way[: under_way.index(name) + 1]
                if op.name.endswith((".gemm_weight", ".scatter_add")):
                    assert len(under_way) == (min(n_formed, 1) if job.overlap.ors else 0)
                    n_formed += 1
                elif op.name.endswith(".reduce_scatter"):
                    under_way.append(op.name)
    assert not under_way


def test_a_block_of_the_backward_pass_in_order_of_issue():
    """Everything overlapped and everything cheap recomputed: where each operation is issued.

    What `selective` recomputes comes where it is needed, beside the all-reduce of dI; a
    bias's gradient follows the weight's; gradients add up where the residual forks.
    """
    model = replace(MODEL, position="rotary")
    plan = plan_of("selective", replace(JOB, attention="unfused"), model)
    expected = """
        backward.up.all_gather backward.down.gemm_input backward.down.all_reduce
        recompute.activation
        backward.down.gemm_weight backward.down.bias backward.down.reduce_scatter
        backward.activation
        backward.proj.all_gather backward.up.gemm_input backward.up.all_reduce
        recompute.norm2
        backward.up.gemm_weight backward.up.bias backward.up.reduce_scatter
        backward.norm2.sums backward.norm2.all_reduce backward.norm2
        backward.residual2
        backward.qkv.all_gather backward.proj.gemm_input backward.proj.all_reduce
        backward.proj.gemm_weight backward.proj.bias backward.proj.reduce_scatter
        recompute.attention backward.attention backward.rotary
        backward.down.all_gather backward.qkv.gemm_input backward.qkv.all_reduce
        recompute.norm1
        backward.qkv.gemm_weight backward.qkv.bias backward.qkv.reduce_scatter
        backward.norm1.sums backward.norm1.all_reduce backward.norm1
        backward.residual1
    """
    assert [op.name for op in operations(plan, "backward")] == expected.split()


def test_oag_gathers_one_weight_ahead():
    on = with_overlap(oag=True)
    order = issue_order(on, "forward", ".all_gather", ".gemm")
    assert order == [
        "forward.proj.all_gather",
        "forward.qkv.gemm",
        "forward.up.all_gather",
        "forward.proj.gemm",
        "forward.down.all_gather",
        "forward.up.gemm",
        "forward.qkv.all_gather",
        "forward.down.gemm",
    ]
    awaited = [n for op in operations(on, "forward") for n in op.waits_for if "all_gather" in n]
    assert sorted(set(awaited)) == sorted(name for name in order if "gather" in name)
    assert issue_order(on, "forward_last", ".all_gather")[-1] == "forward.head.all_gather"
    assert issue_order(on, "backward_last", ".all_gather")[-1] == "backward.qkv.all_gather"


@pytest.mark.parametrize("oag", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("keep", [True, False])
def test_how_often_a_weight_is_gathered(oag, recompute, keep):
    """Forward, backward, and once more in a recomputed forward; once if it is kept."""
    job = replace(JOB, overlap=Overlap(oag=oag), keep_gathered_weights=keep)
    plan = plan_of(recompute, job)
    gathers = {}
    for phase in plan.microstep.phases:
        for op in phase.operations:
            if isinstance(op, Collective) and op.kind == "all_gather":
                weight = op.name.split(".")[1]
                gathers[weight] = gathers.get(weight, 0) + phase.repeats
    per_layer = 1 if keep else {"none": 2, "selective": 2, "full": 3}[recompute]
    assert gathers == {
        **dict.fromkeys(("qkv", "proj", "up", "down"), 3 * per_layer),
        "head": 1 if keep else 2,
        "embedding": 1,
    }


@given(worlds())
def test_every_gathered_weight_is_awaited_before_its_product(world):
    """Whatever the switches: play the host program and watch what has been awaited."""
    model, job, _, recompute, table = world
    plan = AXONN.plan(model, job, table.executed(recompute, 1))
    awaited = set()
    for phase in plan.microstep.phases:
        for _ in range(min(phase.repeats, 2)):
            for op in phase.operations:
                awaited |= set(op.waits_for)
                chain, _, rest = op.name.partition(".")
                if isinstance(op, Collective) and op.kind == "all_gather":
                    awaited.discard(op.name)
                elif isinstance(op, Gemm):
                    weight = rest.partition(".")[0]
                    use = "forward" if job.keep_gathered_weights else chain
                    assert f"{use}.{weight}.all_gather" in awaited


def flops_of_all_ranks(plan, kind):
    n_ranks = GRID.n_ranks if plan.candidates.placements.layout(0) == GRID else 1
    per_rank = sum(
        phase.repeats * size(op.flops)
        for phase in plan.microstep.phases
        for op in phase.operations
        if isinstance(op, kind)
    )
    return per_rank * size(plan.n_microsteps) * n_ranks


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flops_over_all_ranks_are_the_models(recompute):
    """Products exactly; attention once per X rank, since X replicates it; see the design."""
    plan = plan_of(recompute)
    tokens, heads = JOB.tokens, MODEL.n_heads * MODEL.head_dim
    passes = 4 if recompute == "full" else 3
    attention = passes * 4 * tokens * JOB.seq_len * heads * MODEL.n_layers
    products = MODEL.hardware_flops(tokens, JOB.seq_len, recompute) - attention
    assert flops_of_all_ranks(plan, Gemm) == pytest.approx(products, rel=1e-12)
    assert flops_of_all_ranks(plan, Attention) == pytest.approx(
        GRID.size("x") * attention, rel=1e-12
    )


@given(worlds())
def test_products_of_random_models_add_up(world):
    model, job, _, recompute, table = world
    plan = AXONN.plan(model, job, table.executed(recompute, 1))
    per_rank = np.zeros(len(table))
    for phase in plan.microstep.phases:
        for op in phase.operations:
            if isinstance(op, Gemm):
                per_rank = per_rank + phase.repeats * op.flops
    heads = model.n_heads * model.head_dim
    passes = 4 if recompute == "full" else 3
    attention = passes * 4.0 * job.tokens * job.seq_len * heads * model.n_layers
    expected = model.hardware_flops(job.tokens, job.seq_len, recompute) - attention
    assert per_rank * plan.n_microsteps * job.n_gpus == pytest.approx(expected, rel=1e-12)


@given(models())
def test_stored_parameters_add_up_to_the_models(model):
    table = CandidateTable.single(Configuration(grid_layout(2, 2, 1, 1)))
    sharded, replicated = (
        size(v) for v in stored_parameters(model, table, model.n_layers, True, True)
    )
    n_embeddings = 1 if model.tied_embeddings else 2
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * n_embeddings
    # Vectors are split over X or Y and replicated over the other: two ranks hold each.
    assert 4 * sharded + 2 * replicated == pytest.approx(model.parameters + padding, rel=1e-12)


def test_memory_by_hand():
    """Grid 2 x 4 x 2 x 2, bf16, T = 32 tokens, h = 64; bytes of one rank."""
    table = CandidateTable.single(Configuration(GRID, micro_batch=2))
    terms = {k: size(v) for k, v in AXONN.memory(MODEL, JOB, table.executed("none", 1)).items()}
    sharded, replicated = (
        size(v) for v in stored_parameters(MODEL, table, MODEL.n_layers, True, True)
    )
    residual, qkv, up = 2 * 32 * 64 / 2, 2 * 32 * 192 / 4, 2 * 32 * 256 / 4
    attention_out = 2 * 32 * 64 / 4
    block = 4 * residual + qkv + attention_out + 2 * up
    assert terms["weights"] == 2 * (sharded + replicated)
    # fp32 sums, and the micro-step's shards in bf16.
    assert terms["gradients"] == (4 + 2) * (sharded + replicated)
    assert terms["optimizer_states"] == 12 * (sharded + replicated)
    assert terms["activations"] == 3 * block + residual
    # The loss takes most: logits in bf16, their fp32 copy and softmax, and the head's input. The
    # head is gathered for its backward pass.
    assert terms["working_set"] == 32 * 256 / 4 * (2 + 4 + 4) + residual
    assert terms["gathered_weights"] == 2 * 64 * 256 / 8


def test_recomputation_saves_activations_in_order():
    table = CandidateTable.single(Configuration(GRID, micro_batch=2))
    held = [
        size(AXONN.memory(MODEL, JOB, table.executed(recompute, 1))["activations"])
        for recompute in ("none", "selective", "full")
    ]
    assert held[0] > held[1] > held[2]


def test_unfused_attention_keeps_its_scores():
    table = CandidateTable.single(Configuration(GRID, micro_batch=2))
    flash, unfused = (
        size(
            AXONN.memory(MODEL, replace(JOB, attention=a), table.executed("none", 1))["activations"]
        )
        for a in ("flash", "unfused")
    )
    scores = 2 * 2 * 16 * 16 * 4 / 4  # bf16, sequences x s x s x heads over Y
    assert unfused - flash == 3 * scores  # of each layer what the softmax gave


# The algorithm, executed ----------------------------------------------------------------------


class Ranks:
    """The ranks of a grid hold real arrays, and remember what each collective carried."""

    def __init__(self, grid):
        self.grid = grid
        self.all = list(
            np.ndindex(grid.size("x"), grid.size("y"), grid.size("z"), grid.size("data"))
        )
        self.carried = {}
        self.products = {}

    def _groups(self, axis):
        at = AXES.index(axis)
        for rank in self.all:
            if rank[at] == 0:
                sizes = (
                    self.grid.size("x"),
                    self.grid.size("y"),
                    self.grid.size("z"),
                    self.grid.size("data"),
                )
                yield [(*rank[:at], i, *rank[at + 1 :]) for i in range(sizes[at])]

    def _note(self, name, kind, axis, n_elements):
        self.carried[name] = (kind, axis, n_elements)

    def all_reduce(self, name, held, axis):
        for group in self._groups(axis):
            total = sum(held[rank] for rank in group)
            held |= dict.fromkeys(group, total)
        self._note(name, "all_reduce", axis, held[self.all[0]].size)
        return held

    def all_gather(self, name, held, shape):
        gathered = {}
        for group in self._groups("z"):
            whole = np.concatenate([held[rank] for rank in group]).reshape(shape)
            gathered |= dict.fromkeys(group, whole)
        self._note(name, "all_gather", "z", np.prod(shape))
        return gathered

    def reduce_scatter(self, name, held):
        scattered = {}
        for group in self._groups("z"):
            parts = np.split(sum(held[rank] for rank in group).ravel(), len(group))
            scattered |= dict(zip(group, parts, strict=True))
        self._note(name, "reduce_scatter", "z", held[self.all[0]].size)
        return scattered

    def multiply(self, name, left, right):
        self.products[name] = (
            left[self.all[0]].shape[0],
            right[self.all[0]].shape[1],
            left[self.all[0]].shape[1],
        )
        return {rank: left[rank] @ right[rank] for rank in self.all}

    def cut(self, matrix, rows_over, columns_over):
        """Every rank's block of a matrix; Z and data split the tokens."""
        return {
            rank: self._part(self._part(matrix, rank, rows_over, 0), rank, columns_over, 1)
            for rank in self.all
        }

    def _part(self, matrix, rank, axis, dimension):
        if axis == "tokens":
            index, n_parts = (
                rank[3] * self.grid.size("z") + rank[2],
                self.grid.size("z") * self.grid.size("data"),
            )
        else:
            index, n_parts = rank[AXES.index(axis)], self.grid.size(axis)
        return np.split(matrix, n_parts, axis=dimension)[index]

    def transposed(self, held):
        return {rank: block.T for rank, block in held.items()}


def same_on_all(held, blocks):
    return all(np.allclose(held[rank], blocks[rank]) for rank in blocks)


@pytest.mark.parametrize(
    "grid", [grid_layout(2, 4, 2, 2), grid_layout(1, 2, 4, 1), grid_layout(3, 1, 2, 2)]
)
def test_two_layers_executed_on_every_rank_carry_what_the_plan_says(grid):
    """MLP up and down without an activation, forward and backward, on integer matrices.

    Each rank knows only its shard; the results must be those of the whole matrices, and
    the shapes and buffers those of the plan.
    """
    hidden, inner, n_sequences, seq_len = 48, 96, 2, 4
    model = Model("toy", 1, hidden, 4, 128, seq_len, ffn_hidden_size=inner)
    n_tokens = n_sequences * seq_len * grid.size("z") * grid.size("data")
    random = np.random.default_rng(7)
    tokens = random.integers(-4, 5, (n_tokens, hidden)).astype(float)
    weights = {
        "up": random.integers(-4, 5, (hidden, inner)).astype(float),
        "down": random.integers(-4, 5, (inner, hidden)).astype(float),
    }
    output_gradient = random.integers(-4, 5, (n_tokens, hidden)).astype(float)

    ranks = Ranks(grid)
    axes = {"up": ("x", "y"), "down": ("y", "x")}  # the second layer is transposed
    blocks = {name: ranks.cut(w, *axes[name]) for name, w in weights.items()}
    shards = {
        name: {
            rank: np.split(block.ravel(), grid.size("z"))[rank[2]]
            for rank, block in blocks[name].items()
        }
        for name in weights
    }
    shape = {name: held[ranks.all[0]].shape for name, held in blocks.items()}

    activations = {"up": ranks.cut(tokens, "tokens", "x")}
    for name, following in (("up", "down"), ("down", "out")):
        weight = ranks.all_gather(f"forward.{name}.all_gather", shards[name], shape[name])
        partial = ranks.multiply(f"forward.{name}.gemm", activations[name], weight)
        activations[following] = ranks.all_reduce(
            f"forward.{name}.all_reduce", partial, axes[name][0]
        )
    out = tokens @ weights["up"] @ weights["down"]
    assert same_on_all(activations["out"], ranks.cut(out, "tokens", "x"))

    gradient, scattered = ranks.cut(output_gradient, "tokens", "x"), {}
    for name in ("down", "up"):
        weight = ranks.all_gather(f"backward.{name}.all_gather", shards[name], shape[name])
        partial = ranks.multiply(f"backward.{name}.gemm_input", gradient, ranks.transposed(weight))
        of_weight = ranks.multiply(
            f"backward.{name}.gemm_weight", ranks.transposed(activations[name]), gradient
        )
        gradient = ranks.all_reduce(f"backward.{name}.all_reduce", partial, axes[name][1])
        scattered[name] = ranks.reduce_scatter(f"backward.{name}.reduce_scatter", of_weight)
    inner_gradient = output_gradient @ weights["down"].T
    assert same_on_all(gradient, ranks.cut(inner_gradient @ weights["up"].T, "tokens", "x"))

    expected = {
        "up": tokens.T @ inner_gradient,
        "down": (tokens @ weights["up"]).T @ output_gradient,
    }
    n_reduced = 0
    for name, held in scattered.items():
        held = ranks.all_reduce(f"{name}.data", held, "data")
        n_reduced += ranks.carried.pop(f"{name}.data")[2]
        whole = ranks.cut(expected[name], *axes[name])
        assert same_on_all(
            held, {rank: np.split(b.ravel(), grid.size("z"))[rank[2]] for rank, b in whole.items()}
        )

    job = Job(grid.n_ranks, n_sequences * grid.size("z") * grid.size("data"), seq_len)
    plan = plan_of(job=job, model=model, grid=grid, micro_batch=n_sequences)
    for name, (kind, axis, n_elements) in ranks.carried.items():
        op = named(plan, name)
        assert (name, op.kind, op.axis, size(op.nbytes)) == (name, kind, axis, 2 * n_elements)
    for name, product in ranks.products.items():
        assert (name, *(size(getattr(named(plan, name), d)) for d in "mnk")) == (name, *product)
    elements = sum(w.size for w in weights.values()) / (
        grid.size("x") * grid.size("y") * grid.size("z")
    )
    assert n_reduced == elements


# Everything else by hand ----------------------------------------------------------------------

# Bytes on GRID: 32 tokens, h = 64 over X = 2, 192 and 256 over Y = 4, bf16.
RESIDUAL, QKV, MLP = 2 * 32 * 64 / 2, 2 * 32 * 192 / 4, 2 * 32 * 256 / 4
LOGITS, EMBEDDING = 32 * 256 / 4, 2 * 64 * 256 / 8  # elements; bytes of the gathered block
# Per rank: 3 blocks of 49152 and the embedding of 16384, over 16 ranks; seven norms, the
# positions and two biases a layer over X; the other two over Y.
SHARDED = (3 * 49152 + 16384) / 16
VECTORS = (7 * 128 + 16 * 64 + 3 * 128) / 2 + 3 * (192 + 256) / 4


def memory_traffic(plan):
    return {
        (phase.name, op.name): size(op.nbytes)
        for phase in plan.phases
        for op in phase.operations
        if isinstance(op, MemoryBound)
    }


def test_bytes_of_every_memory_bound_kernel():
    """Read plus written: a norm reads its input for the sums and again to scale it, and so on."""
    forward = {
        "norm1.sums": RESIDUAL,
        "norm1": 2 * RESIDUAL,
        "residual1": 3 * RESIDUAL,
        "norm2.sums": RESIDUAL,
        "norm2": 2 * RESIDUAL,
        "activation": 2 * MLP,
        "residual2": 3 * RESIDUAL,
    }
    # A norm reads its input and dO for the sums, and again to write dI; a bias reads dO.
    backward = {
        "down.bias": RESIDUAL,
        "activation": 3 * MLP,
        "up.bias": MLP,
        "norm2.sums": 2 * RESIDUAL,
        "norm2": 3 * RESIDUAL,
        "residual2": 3 * RESIDUAL,
        "proj.bias": RESIDUAL,
        "qkv.bias": QKV,
        "norm1.sums": 2 * RESIDUAL,
        "norm1": 3 * RESIDUAL,
        "residual1": 3 * RESIDUAL,
    }
    stored = SHARDED + VECTORS
    expected = {
        ("embedding", "forward.embedding.lookup"): 2 * RESIDUAL,
        ("embedding", "forward.embedding.position"): 2 * RESIDUAL,
        ("head", "forward.norm.sums"): RESIDUAL,
        ("head", "forward.norm"): 2 * RESIDUAL,
        # Read bf16 for the sum of exponentials and again to write fp32; then bf16 again.
        ("head", "loss.softmax"): (2 + 2 + 4) * LOGITS,
        ("head", "loss.gradient"): (4 + 2) * LOGITS,
        ("head", "backward.norm.sums"): 2 * RESIDUAL,
        ("head", "backward.norm"): 3 * RESIDUAL,
        ("embedding_backward", "backward.embedding.position"): RESIDUAL,
        ("embedding_backward", "backward.embedding.scatter_add"): EMBEDDING + 3 * RESIDUAL,
        # The head's shard and the embedding's, halves by Z: both read, the sum written.
        ("accumulate", "gradient.tied"): 3 * EMBEDDING / 2,
        ("accumulate", "gradient.accumulate"): (2 + 4 + 4) * stored,
        ("step_end", "gradient.norm"): 4 * stored,
        ("step_end", "gradient.clip"): 2 * 4 * stored,
        # The gradient read and cleared; master, two moments read and written; the bf16 weight.
        ("step_end", "optimizer.step"): (2 * 4 + 2 * 12 + 2) * stored,
    }
    for suffix in ("", "_last"):
        for chain, kernels in (("forward", forward), ("backward", backward)):
            for name, nbytes in kernels.items():
                expected[f"{chain}{suffix}", f"{chain}.{name}"] = nbytes
    assert memory_traffic(plan_of()) == expected


def test_selective_recomputation_redoes_norms_activation_and_unfused_attention():
    extra = {
        name: nbytes
        for (phase, name), nbytes in memory_traffic(plan_of("selective")).items()
        if phase == "backward" and name.startswith("recompute.")
    }
    assert extra == {
        "recompute.norm1": 2 * RESIDUAL,
        "recompute.norm2": 2 * RESIDUAL,
        "recompute.activation": 2 * MLP,
    }
    unfused = plan_of("selective", replace(JOB, attention="unfused"))
    assert isinstance(named(unfused, "recompute.attention"), Attention)
    names = [op.name for op in operations(plan_of("selective"))]
    assert "recompute.attention" not in names


def test_full_recomputation_repeats_the_whole_forward_block():
    plan = plan_of("full")
    forward = [op.name.partition(".")[2] for op in operations(plan, "forward")]
    again = [
        op.name.partition(".")[2]
        for op in operations(plan, "backward")
        if op.name.startswith("recompute.")
    ]
    # With OAG a block gathers the first weight of the one that follows it, at another place.
    assert [n for n in forward if n != "qkv.all_gather"] == [
        n for n in again if n != "qkv.all_gather"
    ]
    order = [op.name for op in operations(plan, "backward")]
    recomputed = max(i for i, name in enumerate(order) if name.startswith("recompute.residual2"))
    assert order.index("backward.down.gemm_input") > recomputed


def test_rms_norm_sends_one_sum_and_gated_mlp_twice_the_width():
    gated = replace(
        MODEL,
        norm="rms",
        gated_mlp=True,
        position="rotary",
        bias=False,
        qkv_bias=False,
        proj_bias=False,
    )
    plan = plan_of(model=gated)
    traffic = memory_traffic(plan)
    assert size(named(plan, "forward.norm1.all_reduce").nbytes) == 4 * 32
    assert size(named(plan, "forward.up.gemm").n) == 2 * 256 / 4
    assert size(named(plan, "forward.down.gemm").k) == 256 / 4
    assert traffic["forward", "forward.activation"] == 2 * MLP + MLP
    assert traffic["backward", "backward.activation"] == 2 * 2 * MLP + MLP
    # Rotary embedding turns q and k, not v.
    assert traffic["forward", "forward.rotary"] == 2 * QKV * 2 / 3
    assert traffic["backward", "backward.rotary"] == 2 * QKV * 2 / 3
    assert not [name for _, name in traffic if name.endswith(".bias")]


def test_each_bias_has_a_gradient():
    """Llama's kin may have a bias on q, k, v alone."""
    only_qkv = memory_traffic(
        plan_of(model=replace(MODEL, bias=False, qkv_bias=True, proj_bias=False))
    )
    assert {name for _, name in only_qkv if name.endswith(".bias")} == {"backward.qkv.bias"}


def test_full_recomputation_turns_q_and_k_again():
    plan = plan_of("full", model=replace(MODEL, position="rotary"))
    names = [op.name for op in operations(plan, "backward")]
    at = names.index("recompute.rotary")
    assert names[at - 1 : at + 2] == [
        "recompute.qkv.all_reduce",
        "recompute.rotary",
        "recompute.attention",
    ]


@pytest.mark.parametrize("position", ["learned", "rotary", "none"])
def test_only_learned_positions_are_added_to_the_embedding(position):
    """Without them the first block is the first that waits for the embedding's all-reduce."""
    plan = plan_of(model=replace(MODEL, position=position))
    names = {op.name for op in operations(plan)}
    learned = {"forward.embedding.position", "backward.embedding.position"}
    assert learned & names == (learned if position == "learned" else set())
    rotary = {"forward.rotary", "backward.rotary"}
    assert rotary & names == (rotary if position == "rotary" else set())
    waiting = [op for op in operations(plan) if "forward.embedding.all_reduce" in op.waits_for]
    first = "forward.embedding.position" if position == "learned" else "forward.norm1.sums"
    assert waiting[0].name == first


def test_without_x_a_norm_needs_no_pass_for_its_sums():
    traffic = memory_traffic(plan_of(grid=grid_layout(1, 4, 2, 4)))
    residual = 2 * 32 * 64
    assert traffic["forward", "forward.norm1.sums"] == 0
    assert traffic["forward", "forward.norm1"] == 2 * residual
    assert traffic["backward", "backward.norm1.sums"] == 0
    assert traffic["backward", "backward.norm1"] == 3 * residual


def test_collectives_of_the_embedding_the_loss_and_the_step_end():
    plan = plan_of()
    found = {
        op.name: (op.kind, op.axis, size(op.nbytes), size(op.n_calls))
        for phase in ("embedding", "head", "embedding_backward", "step_end")
        for op in operations(plan, phase)
        if isinstance(op, Collective)
    }
    sums, per_token = 2 * 4 * 32, 4 * 32
    assert found == {
        "forward.embedding.all_gather": ("all_gather", "z", EMBEDDING, 1),
        "forward.qkv.all_gather": ("all_gather", "z", 2 * 64 * 192 / 8, 1),
        "forward.embedding.all_reduce": ("all_reduce", "y", RESIDUAL, 1),
        "forward.norm.all_reduce": ("all_reduce", "x", sums, 1),
        "forward.head.all_reduce": ("all_reduce", "x", 2 * LOGITS, 1),
        "loss.maximum.all_reduce": ("all_reduce", "y", per_token, 1),
        "loss.sum.all_reduce": ("all_reduce", "y", 2 * per_token, 1),
        "backward.head.all_gather": ("all_gather", "z", EMBEDDING, 1),
        "backward.head.all_reduce": ("all_reduce", "y", RESIDUAL, 1),
        "backward.head.reduce_scatter": ("reduce_scatter", "z", EMBEDDING, 1),
        "backward.down.all_gather": ("all_gather", "z", 2 * 64 * 256 / 8, 1),
        "backward.norm.all_reduce": ("all_reduce", "x", sums, 1),
        "backward.embedding.reduce_scatter": ("reduce_scatter", "z", EMBEDDING, 1),
        # Vectors are whole on every Z rank, so their gradients are summed over Z too.
        "gradient.vectors.all_reduce": ("all_reduce", "z", 4 * VECTORS, 1),
        "gradient.all_reduce": ("all_reduce", "data", 4 * (SHARDED + VECTORS), 1),
        "gradient.norm.all_reduce_x": ("all_reduce", "x", 4, 1),
        "gradient.norm.all_reduce_y": ("all_reduce", "y", 4, 1),
        "gradient.norm.all_reduce_z": ("all_reduce", "z", 4, 1),
    }


def test_gradients_travel_in_buckets_of_25_mebibytes(gpt_80b):
    grid = grid_layout(4, 4, 4, 16)
    plan = plan_of(job=Job(1024, 1024, 2048), model=gpt_80b, grid=grid, micro_batch=1)
    op = named(plan, "gradient.all_reduce")
    assert size(op.n_calls) == -(-size(op.nbytes) // (25 * 2**20))
    # 80 billion parameters of 4 bytes over 64 ranks are about 5 GB: some 190 buckets;
    # vectors are split over fewer ranks.
    assert size(op.nbytes) == pytest.approx(4 * gpt_80b.parameters / 64, rel=1e-2)
    assert 180 < size(op.n_calls) < 200


def test_stored_parameters_by_hand():
    table = CandidateTable.single(Configuration(GRID))
    assert [size(v) for v in stored_parameters(MODEL, table, MODEL.n_layers, True, True)] == [
        SHARDED,
        VECTORS,
    ]


@pytest.mark.parametrize(
    ("recompute", "saved", "working"),
    [
        # Saved: six residual-wide tensors less those that X does not split, q k v, the MLP twice.
        # In work: the loss, or what is recomputed and the gradient of the MLP's activation.
        ("none", 4 * RESIDUAL + QKV + 2 * 32 * 64 / 4 + 2 * MLP, 10 * LOGITS + RESIDUAL),
        ("selective", 2 * RESIDUAL + QKV + 2 * 32 * 64 / 4 + MLP, 10 * LOGITS + RESIDUAL),
        ("full", RESIDUAL, 3 * RESIDUAL + QKV + 2 * 32 * 64 / 4 + 2 * MLP + MLP),
    ],
)
def test_activations_by_hand(recompute, saved, working):
    table = CandidateTable.single(Configuration(GRID, micro_batch=2))
    terms = AXONN.memory(MODEL, JOB, table.executed(recompute, 1))
    assert size(terms["activations"]) == 3 * saved + RESIDUAL
    assert size(terms["working_set"]) == working


def test_fp32_keeps_no_master_copy():
    table = CandidateTable.single(Configuration(GRID, micro_batch=2))
    terms = AXONN.memory(MODEL, replace(JOB, dtype="fp32"), table.executed("none", 1))
    stored = SHARDED + VECTORS
    assert size(terms["weights"]) == 4 * stored
    assert size(terms["gradients"]) == (4 + 4) * stored
    assert size(terms["optimizer_states"]) == 8 * stored
    plan = plan_of(job=replace(JOB, dtype="fp32"))
    # The gradient read and cleared, two moments and the weight read and written.
    assert size(named(plan, "optimizer.step").nbytes) == (2 * 4 + 2 * 8 + 2 * 4) * stored
    assert size(named(plan, "gradient.accumulate").nbytes) == (4 + 2 * 4) * stored
    assert size(named(plan, "forward.qkv.all_reduce").nbytes) == 4 * 32 * 192 / 4
    assert size(named(plan, "gradient.all_reduce").nbytes) == 4 * stored


def test_without_z_a_shared_weight_has_one_gradient_to_add_to():
    """Neither is a block cleared for the embedding's rows, nor are two shards added up."""
    alone = memory_traffic(plan_of(grid=grid_layout(2, 4, 1, 4)))
    assert alone["embedding_backward", "backward.embedding.scatter_add"] == 3 * RESIDUAL
    assert alone["accumulate", "gradient.tied"] == 0
    untied = replace(MODEL, tied_embeddings=False)
    alone = memory_traffic(plan_of(grid=grid_layout(2, 4, 1, 4), model=untied))
    assert alone["embedding_backward", "backward.embedding.scatter_add"] == EMBEDDING + 3 * RESIDUAL
    assert ("accumulate", "gradient.tied") not in alone
