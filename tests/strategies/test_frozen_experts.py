"""Adapters beside attention in a mixture whose experts are frozen."""

from dataclasses import replace

import pytest
import torch
from build import collectives, memory_terms, number, operations, plan_of
from worlds import llama

from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Attention, Gemm, MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.tuning import Adapters
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3

LAYERS, HIDDEN, SEQ, N_EXPERTS, TOP_K, INNER, RANK = 4, 256, 128, 8, 2, 128, 16
MODEL = llama(
    n_layers=LAYERS,
    hidden_size=HIDDEN,
    n_heads=8,
    n_kv_heads=8,
    ffn_hidden_size=512,
    vocab_size=1024,
    seq_len=SEQ,
    experts=Experts(N_EXPERTS, TOP_K, INNER),
)
SHARED = replace(MODEL, experts=replace(MODEL.experts, shared_hidden_size=64))
ALL = Job(16, 32, SEQ)
LORA = replace(ALL, adapters=Adapters(RANK, ("attention",)))
TRAINED = LAYERS * RANK * (HIDDEN + 3 * HIDDEN + HIDDEN + HIDDEN)
MEGATRON = Megatron3D(has_experts=True)
FSDP = zero3(Engine(zero=ZeroProgram(is_fsdp2=True)), has_experts=True)
LAYOUTS = [(MEGATRON, {"data": 16, "expert": 4}), (FSDP, {"shard": 16, "expert": 4})]
EVERY_LAYOUT = pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS, ids=["megatron", "fsdp"])


def microstep(strategy, job, model=MODEL, **sizes):
    return operations(plan_of(strategy, model, job, **sizes).microstep)


@EVERY_LAYOUT
@pytest.mark.parametrize("model", [MODEL, SHARED], ids=["routed", "shared"])
def test_the_plan_has_the_flops_of_the_model(strategy, sizes, model):
    ops = microstep(strategy, LORA, model, **sizes)
    done = sum(number(op.flops) for op in ops if isinstance(op, Gemm | Attention))
    assert done == pytest.approx(model.model_flops(SEQ, SEQ, LORA.adapters), rel=1e-9)


@EVERY_LAYOUT
def test_only_adapters_of_attention_have_gradients(strategy, sizes):
    gradients = {op.name for op in microstep(strategy, LORA, **sizes) if "gemm_weight" in op.name}
    assert {name.split(".")[1] for name in gradients} == {"qkv", "proj"}
    assert all(".adapter_" in name for name in gradients)


@EVERY_LAYOUT
def test_tokens_travel_as_in_pre_training_and_no_gradient_of_an_expert_does(strategy, sizes):
    def messages(job, axis):
        plan = plan_of(strategy, MODEL, job, **sizes)
        parts = [plan.microstep, plan.step_end] + [plan.sync_microstep] * bool(plan.sync_microstep)
        found = [op for op in collectives(plan, *parts) if op.axis == axis]
        return [(op.name, op.kind, number(op.nbytes)) for op in found if number(op.nbytes)]

    tuned, usual = (messages(job, "expert") for job in (LORA, ALL))
    assert set(tuned) == set(usual) and tuned
    kinds = {kind for _, kind, _ in messages(LORA, "expert_replicas")}
    assert kinds == ({"all_gather"} if strategy is FSDP else set())


@EVERY_LAYOUT
def test_states_are_those_of_the_adapters(strategy, sizes):
    terms = memory_terms(strategy, MODEL, LORA, **sizes)
    per_parameter = {"megatron": 12, "zero3": 8}[strategy.name]
    assert terms["optimizer_states"] == per_parameter * TRAINED / 16
    usual = memory_terms(strategy, MODEL, ALL, **sizes)
    assert terms["weights"] < 1.1 * usual["weights"]


def saved_by_a_frozen_expert(n_tokens):
    """Bytes that autograd saves of a gated MLP, whose activation is one kernel, beside weights."""

    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            gate, up = x.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

    x = torch.ones(n_tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(HIDDEN, 2 * INNER), torch.ones(INNER, HIDDEN)
    up, down = (weight.to(torch.bfloat16) for weight in weights)
    saved = {}

    def save(tensor):
        if tensor.data_ptr() not in (up.data_ptr(), down.data_ptr()):
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        assert (Gated.apply(x @ up) @ down).requires_grad
    return sum(saved.values())


def test_frozen_experts_save_what_autograd_saves():
    """Besides, a block saves norms' inputs, q, k, v, attention, scores and adapters' inputs."""
    terms = memory_terms(MEGATRON, MODEL, LORA, data=16, expert=4)
    widths = 2 * HIDDEN + 3 * HIDDEN + HIDDEN + HIDDEN + 2 * RANK
    scores = 4 * SEQ * N_EXPERTS
    saved = 2 * SEQ * widths + scores + saved_by_a_frozen_expert(SEQ * TOP_K)
    assert terms["activations"] == LAYERS * saved


@pytest.mark.parametrize("module", ["moe_act", "shared_experts"])
def test_recomputation_saves_nothing_of_what_frozen_experts_do_not_save(module):
    usual = memory_terms(MEGATRON, SHARED, LORA, data=16, expert=4)["activations"]
    recompute = f"selective:{module}"
    again = memory_terms(MEGATRON, SHARED, LORA, recompute=recompute, data=16, expert=4)
    left_out = 2 * SEQ * 2 * 64 * LAYERS if module == "shared_experts" else 0
    assert usual - again["activations"] == left_out


@pytest.mark.parametrize("transposes", [True, False])
def test_inputs_of_frozen_experts_are_cast_once(transposes):
    job = replace(LORA, precision="fp8-current", transposes_operands=transposes)
    ops = microstep(MEGATRON, job, data=16, expert=4)
    casts = {
        op.name: number(op.nbytes)
        for op in ops
        if isinstance(op, MemoryBound) and op.kernel == "cast" and "experts_up" in op.name
    }
    tokens = SEQ * TOP_K
    expected = {
        "forward.experts_up.cast": (2 * 2 + 1) * tokens * HIDDEN,
        "backward.experts_up.cast": (2 * 2 + 1) * tokens * 2 * INNER,
    }
    weights = N_EXPERTS / 4 * HIDDEN * 2 * INNER
    if transposes:
        expected["backward.experts_up.transposed"] = 2 * weights
    assert casts == expected
