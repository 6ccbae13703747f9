"""Frozen parts of a model against autograd, torch's FSDP2, and smaller models."""

from dataclasses import replace

import pytest
import torch
from build import collectives, memory_terms, number, operations, plan_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from worlds import FFN, HIDDEN, SEQ, VOCAB, machine_of, small_llama

from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.plan import Attention, Gemm
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.tuning import Adapters, Frozen
from axonn_tune.step.predict import predict
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3, zero_topo, zeropp

LAYERS = 6
MODEL = small_llama(LAYERS)
MIXTURE = replace(MODEL, experts=Experts(8, 2, 256, first_layer=2))
SIDES = ((HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))
BLOCK = sum(k * n for k, n in SIDES) + 2 * HIDDEN
HEAD = VOCAB * HIDDEN + HIDDEN
ALL = Job(16, 32, SEQ)
FSDP2 = zero3(Engine(zero=ZeroProgram(is_fsdp2=True)))
DEEPSPEED = zero3(Engine(zero=ZeroProgram(keeps_vectors=True, bucket_elements=10**6)))
GRID = Axonn4D()
MEGATRON = Megatron3D()
LAYOUTS = [
    (FSDP2, {"shard": 8, "replica": 2}),
    (DEEPSPEED, {"shard": 16}),
    (zero3(Engine(zero=ZeroProgram(is_fsdp2=True, splits_layers=True))), {"tensor": 4, "shard": 4}),
    (zeropp(), {"secondary": 8, "across": 2}),
    (zero_topo(), {"weights": 2, "gradients": 4, "states": 2}),
    (GRID, {"y": 2, "z": 4, "data": 2}),
    (Axonn4D(sharded_optimizer=True, sharded_gradients=True), {"x": 2, "z": 2, "data": 4}),
    (MEGATRON, {"tensor": 2, "data": 8}),
    (Megatron3D(overlap_grad_reduce=False), {"data": 16}),
    (Megatron3D(shards_gradients=True), {"tensor": 4, "data": 4}),
]
EVERY_LAYOUT = pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
PARTS = ["embedding", "embedding,layers:0-3", "embedding,layers:0-4,head", "head"]


def freezing(text):
    return replace(ALL, frozen=Frozen.of_text(text))


def step(strategy, job, model=MODEL, **sizes):
    """The operations of a step, by phase in order."""
    plan = plan_of(strategy, model, job, **sizes)
    return operations(plan.microstep, plan.step_end)


def flops_of(found):
    return sum(number(op.flops) for op in found if isinstance(op, Gemm | Attention))


# Autograd ----------------------------------------------------------------------------------------


class Stack(nn.Module):
    """An embedding, products of the sizes of blocks, and a head, in torch."""

    def __init__(self, frozen):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        block = [nn.Linear(k, n, bias=False) for k, n in SIDES for _ in range(LAYERS)]
        self.blocks = nn.ModuleList(nn.ModuleList(block[layer::LAYERS]) for layer in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.embedding.requires_grad_(not frozen.embedding)
        self.head.requires_grad_(not frozen.head)
        for block in self.blocks[: frozen.n_layers]:
            block.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for qkv, proj, up, down in self.blocks:
            # The sum of the input stands for norms, whose gains need the gradient of the input.
            x = x + proj(qkv(x)[..., :HIDDEN])
            x = x + down(up(x)[..., :FFN])
        return self.head(x)


@pytest.mark.parametrize("text", ["", *PARTS])
@pytest.mark.parametrize(("strategy", "sizes"), [(FSDP2, {"shard": 16}), (GRID, {"data": 16})])
def test_products_are_those_of_autograd(text, strategy, sizes):
    """Autograd forms no gradient of the lowest trained input, which here belongs to a norm."""
    job = freezing(text)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        stack = Stack(job.frozen)
        tokens = torch.zeros(SEQ, dtype=torch.long)
        y = stack(tokens)
        y.backward(torch.ones_like(y))
    found = [op for op in step(strategy, job, **sizes) if isinstance(op, Gemm)]
    without_norm = 0.0
    if job.frozen.embedding:
        without_norm = 2 * SEQ * SIDES[0][0] * SIDES[0][1]
    assert flops_of(found) == counter.get_total_flops() + without_norm


def test_the_flops_of_the_model_are_those_of_the_plan():
    for text in ["", *PARTS]:
        job = freezing(text)
        planned = flops_of(step(FSDP2, job, shard=16))
        assert planned == pytest.approx(MODEL.model_flops(SEQ, SEQ, frozen=job.frozen), rel=1e-12)


@pytest.mark.parametrize("model", [MODEL, MIXTURE, replace(MODEL, tied_embeddings=True)])
def test_trained_parameters_are_those_that_are_not_frozen(model):
    frozen = Frozen.of_text("embedding,layers:0-3,head")
    experts = model.experts and replace(model.experts, first_layer=0)
    fewer = replace(model, n_layers=LAYERS - 4, experts=experts)
    ends = fewer.head.parameters * (1 if model.tied_embeddings else 2) + HIDDEN
    assert model.trained_parameters(None, frozen) == fewer.parameters - ends
    assert model.trained_parameters(None, Frozen()) == model.parameters


# Every strategy ----------------------------------------------------------------------------------


@EVERY_LAYOUT
def test_the_forward_pass_is_that_of_training_all_weights(strategy, sizes):
    def kernels(job):
        return [
            op.name
            for op in step(strategy, job, **sizes)
            if op.name.startswith("forward.") and isinstance(op, Gemm | Attention)
        ]

    assert kernels(freezing(PARTS[2])) == kernels(ALL)


@EVERY_LAYOUT
@pytest.mark.parametrize("text", PARTS)
def test_frozen_weights_have_no_gradients(strategy, sizes, text):
    frozen = Frozen.of_text(text)
    names = [op.name for op in step(strategy, freezing(text), **sizes)]
    above = LAYERS - frozen.n_layers
    assert names.count("backward.down.gemm_weight") == above
    assert names.count("backward.down.gemm_input") == above
    assert names.count("backward.head.gemm_weight") == (not frozen.head)
    assert names.count("backward.head.gemm_input") == 1
    assert names.count("backward.embedding.scatter_add") == (not frozen.embedding)


@EVERY_LAYOUT
@pytest.mark.parametrize("text", PARTS)
def test_less_is_sent_and_no_rank_waits_longer(strategy, sizes, text):
    def sent(job):
        total = {}
        plan = plan_of(strategy, MODEL, job, **sizes)
        for op in collectives(plan, plan.microstep, plan.step_end):
            if "gradient" in op.name or op.kind == "reduce_scatter":
                total[op.kind] = total.get(op.kind, 0.0) + number(op.nbytes)
        return sum(total.values())

    def seconds(job):
        layout = Layout({axis: sizes.get(axis, 1) for axis in strategy.axes.sized})
        configuration = Configuration(layout, micro_batch=1, recompute="none")
        world = Scenario(
            replace(MODEL, seq_len=4096), replace(job, seq_len=4096), machine_of(), strategy
        )
        return predict(world, configuration).step_seconds

    assert sent(freezing(text)) < sent(ALL)
    assert seconds(freezing(text)) < seconds(ALL)


@EVERY_LAYOUT
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_of_trained_layers_is_that_of_a_model_with_them_alone(strategy, sizes, recompute):
    """States, gradients and activations of the two upper layers; the ends are trained in both."""
    fewer = replace(MODEL, n_layers=2)
    frozen = freezing("embedding,layers:0-3")
    terms = memory_terms(strategy, MODEL, frozen, recompute=recompute, **sizes)
    alone = memory_terms(strategy, fewer, freezing("embedding"), recompute=recompute, **sizes)
    for term in ("optimizer_states", "gradients", "activations", "working_set"):
        assert terms[term] == pytest.approx(alone[term], rel=1e-12), term
    assert terms["weights"] > alone["weights"]


@EVERY_LAYOUT
def test_states_are_those_of_the_trained_parameters(strategy, sizes):
    """Whatever is sharded, parts of states add up: embedding, four layers, two layers and head."""

    def states(text):
        terms = memory_terms(strategy, MODEL, freezing(text), **sizes)
        return terms["optimizer_states"]

    whole, embedding, lower = states(""), states(PARTS[0]), states(PARTS[1])
    head = states("embedding,head")
    share = whole / (LAYERS * BLOCK + HEAD + VOCAB * HIDDEN)
    if sizes.get("tensor", 1) * sizes.get("x", 1) * sizes.get("y", 1) * sizes.get("z", 1) == 1:
        assert whole - embedding == pytest.approx(share * VOCAB * HIDDEN)
        assert embedding - lower == pytest.approx(share * 4 * BLOCK)
        assert embedding - head == pytest.approx(share * HEAD)
    assert whole > embedding > lower > states(PARTS[2]) > 0


# FSDP --------------------------------------------------------------------------------------------


def test_fsdp_gathers_frozen_layers_once_and_reduces_nothing_of_them():
    found = step(FSDP2, freezing("embedding,layers:0-3"), shard=16)
    gathers = [op.name for op in found if op.name == "forward.block.all_gather"]
    again = [op.name for op in found if op.name == "backward.block.all_gather"]
    reductions = [
        number(op.nbytes)
        for op in found
        if op.name.startswith("gradient.block") and getattr(op, "kind", "") == "reduce_scatter"
    ]
    root = [
        number(op.nbytes)
        for op in found
        if op.name.startswith("gradient.root") and getattr(op, "kind", "") == "reduce_scatter"
    ]
    assert (len(gathers), len(again)) == (LAYERS, 2)
    assert reductions == [2 * BLOCK] * 2
    assert root == [2 * HEAD]


def test_fsdp_stores_frozen_weights_in_the_jobs_type():
    terms = memory_terms(FSDP2, MODEL, freezing("embedding,layers:0-3"), shard=16)
    trained, frozen = 2 * BLOCK + HEAD, 4 * BLOCK + VOCAB * HIDDEN
    assert terms["weights"] == (4 * trained + 2 * frozen) / 16
    assert terms["gradients"] == 4 * trained / 16 * (32 > 16)
    assert terms["optimizer_states"] == 8 * trained / 16


def test_layers_of_experts_above_frozen_dense_ones_count_whole():
    """The mean of all layers is not that of the trained ones."""
    strategy = zero3(Engine(zero=ZeroProgram(is_fsdp2=True)), has_experts=True)
    frozen = memory_terms(strategy, MIXTURE, freezing("embedding,layers:0-1"), shard=16, expert=4)
    above = replace(MIXTURE, n_layers=4, experts=replace(MIXTURE.experts, first_layer=0))
    alone = memory_terms(strategy, above, freezing("embedding"), shard=16, expert=4)
    for term in ("optimizer_states", "gradients", "activations"):
        assert frozen[term] == pytest.approx(alone[term], rel=1e-12)


# What cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "culprit"),
    [
        ("layers:0-3", "embedding,layers:0-3"),
        ("embedding,layers:2-3", "'layers:2-3' is not a part"),
        ("embedding,norm", "'norm' is not a part"),
    ],
)
def test_impossible_parts_are_refused(text, culprit):
    with pytest.raises(InputError, match=culprit):
        Frozen.of_text(text)


@pytest.mark.parametrize("text", PARTS)
def test_a_text_is_read_back(text):
    assert str(Frozen.of_text(text)) == text


@pytest.mark.parametrize(
    "others", [{"adapters": Adapters(8)}, {"mtp_modules": 1}, {"offload": "optimizer"}]
)
def test_parts_are_not_frozen_beside_what_is_not_predicted(others):
    with pytest.raises(InputError, match="frozen is 'head'"):
        replace(freezing("head"), **others)


@pytest.mark.parametrize("strategy", [Axonn4D(pipelined=True), MEGATRON])
def test_a_stage_may_have_no_layers(strategy):
    """Embedding and head count as layers, so that two layers have four stages."""
    few = replace(MODEL, n_layers=2)
    terms = memory_terms(strategy, few, ALL, data=4, pipeline=4)
    assert terms["weights"] > 0
