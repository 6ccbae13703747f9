"""Recomputing single modules: what runs again is the modules, and what is not saved is theirs."""

from dataclasses import replace

import numpy as np
import pytest
from build import memory_terms, number, operations, plan_of
from worlds import quantity

from axonn_tune.api.answers import predict
from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import Experts, LatentAttention
from axonn_tune.spec.engine import Engine, MemoryForm
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, Gemm, GroupedGemm
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.recomputation import (
    MODULES,
    recompute_code,
    recompute_text,
    recomputed_modules,
)
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

DENSE = Model(
    "dense", n_layers=4, hidden_size=256, n_heads=8, vocab_size=1024, seq_len=128,
    ffn_hidden_size=512, gated_mlp=True, norm="rms", position="rotary", bias=False,
    tied_embeddings=False,
)  # fmt: skip
LATENT = replace(
    DENSE,
    name="latent",
    experts=Experts(8, 2, 128, shared_hidden_size=64, first_layer=1),
    latent_attention=LatentAttention(64, 96, 32, 16, 32),
)
JOB = Job(16, 32, 128)
LOW = replace(JOB, precision="mxfp8")
STRATEGY = Megatron3D(has_experts=True)
SIZES = {"data": 16, "expert": 4}
TOKENS, ELEMENT = 2 * 128, 2.0
N_EXPERT_LAYERS = 3
PAIRS = pytest.mark.parametrize(
    ("first", "second"), [("mlp", "moe"), ("core_attn", "mla_up_proj"), ("layernorm", "moe_act")]
)


def plan(recompute, job=JOB, model=LATENT):
    return plan_of(STRATEGY, model, job, 2, recompute, **SIZES)


def activation_bytes(recompute, job=JOB, model=LATENT):
    return memory_terms(STRATEGY, model, job, 2, recompute, **SIZES)["activations"]


def of_chain(ops, chain):
    return [op for op in ops if op.name.startswith(f"{chain}.")]


def flops(op):
    """FLOPs of a product, or of attention over the full score matrix."""
    if isinstance(op, GroupedGemm):
        return 2.0 * number(op.n_groups) * number(op.m) * number(op.n) * number(op.k)
    if isinstance(op, Gemm):
        return 2.0 * number(op.m) * number(op.n) * number(op.k)
    return number(op.flops) if isinstance(op, Attention) else 0.0


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("job", [JOB, LOW], ids=["bf16", "mxfp8"])
def test_nothing_but_the_recomputed_chain_is_added(module, job):
    none = operations(plan("none", job).microstep)
    again = operations(plan(f"selective:{module}", job).microstep)
    kept = [op for op in again if not op.name.startswith("recompute.")]
    assert [op.name for op in kept] == [op.name for op in none]
    assert len(again) > len(none)


@pytest.mark.parametrize("module", MODULES)
def test_kernels_that_run_again_are_kernels_of_the_forward_pass(module):
    ops = operations(plan(f"selective:{module}").microstep)
    forward = {op.name.partition(".")[2]: op for op in of_chain(ops, "forward")}
    for op in of_chain(ops, "recompute"):
        once = forward[op.name.partition(".")[2]]
        assert type(op) is type(once)
        assert flops(op) == flops(once)
        if not isinstance(op, Attention | Gemm | GroupedGemm):
            assert number(op.nbytes) == number(once.nbytes)


def test_checkpoint_of_experts_runs_all_of_them_again_with_their_messages():
    ops = operations(plan("selective:moe").microstep)
    forward, again = ([op.name for op in of_chain(ops, c)] for c in ("forward", "recompute"))
    words = ("router", "choice", "permute", "dispatch", "sort", "experts", "combine", "shared")
    words = (*words, "counts", "probabilities")
    of_experts = [name for name in forward if any(word in name for word in words)]
    assert len(again) == len(of_experts) == 3 * len(set(of_experts))
    messages = [op for op in of_chain(ops, "recompute") if isinstance(op, Collective)]
    assert sum(op.kind == "all_to_all" for op in messages) == 3 * N_EXPERT_LAYERS


@pytest.mark.parametrize("module", MODULES)
def test_flops_of_the_plan_are_those_that_utilization_counts(module):
    ops = operations(plan(f"selective:{module}").microstep)
    counted = LATENT.recomputed_module_flops(TOKENS, 128, {module})
    assert sum(map(flops, of_chain(ops, "recompute"))) == pytest.approx(counted, rel=1e-12)


def test_hardware_flops_count_what_runs_again():
    given = {"strategy": "megatron", "global_batch": 64, "micro_batch": 1, "machine": "dgx-h100"}
    none, mlp, full = (
        predict("llama3-8b", 8, "tensor=2,data=4", recompute=recompute, **given)
        for recompute in ("none", "selective:mlp", "full")
    )
    assert mlp.mfu == pytest.approx(none.mfu * none.step_seconds / mlp.step_seconds)
    added = mlp.hfu * mlp.step_seconds - none.hfu * none.step_seconds
    model, job = none.scenario.model, none.scenario.job
    inner = 3 * model.hidden_size * model.ffn_hidden_size * model.n_layers
    of_model = model.model_flops(job.tokens, job.seq_len)
    share = added / (none.hfu * none.step_seconds)
    assert share == pytest.approx(2 * inner * job.tokens / of_model)
    assert none.step_seconds < mlp.step_seconds < full.step_seconds
    assert none.memory_bytes > mlp.memory_bytes > full.memory_bytes


def saved_by_hand(module, element):
    """Bytes of all layers that a module leaves out; saved inputs of products have `element`."""
    copies = TOKENS * 2  # each token goes to two experts; all ranks' tokens spread evenly
    heads = 8
    norm = TOKENS * 256 * element
    return {
        "core_attn": 0.0,
        # The normed latent vectors; queries, whole keys, and keys' parts with values.
        "mla_up_proj": 4 * TOKENS * (96 + 64 + 16 + heads * (48 + 48 + 32 + 32)) * 2.0,
        # The first norm of all layers, which two weights read that cast it for themselves, and the
        # second one before experts, whose router reads it uncast.
        "layernorm": 4 * norm * (2 if element < 2 else 1) + N_EXPERT_LAYERS * TOKENS * 256 * 2.0,
        # Gate and value, what is activated, and the norm, which is a part of the product.
        "mlp": TOKENS * 2 * 512 * 2.0 + TOKENS * 512 * element + norm,
        "moe_act": N_EXPERT_LAYERS * copies * 128 * element,
        "shared_experts": N_EXPERT_LAYERS * TOKENS * 3 * 64 * 2.0,
    }[module]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "moe"])
@pytest.mark.parametrize(("job", "element"), [(JOB, 2.0), (LOW, 33 / 32)], ids=["bf16", "mxfp8"])
def test_a_module_leaves_its_output_out(module, job, element):
    left_out = activation_bytes("none", job) - activation_bytes(f"selective:{module}", job)
    assert left_out == pytest.approx(saved_by_hand(module, element), rel=1e-12)


def test_attention_leaves_its_output_out_where_the_product_saves_a_cast_copy():
    job = replace(JOB, precision="fp8-delayed")
    left_out = activation_bytes("none", job) - activation_bytes("selective:core_attn", job)
    assert left_out == 4 * TOKENS * 8 * 32 * 2.0


def test_experts_as_a_whole_leave_out_the_same_as_all_their_parts_and_more():
    parts = activation_bytes("selective:moe_act,shared_experts")
    whole = activation_bytes("selective:moe")
    assert whole < parts
    assert activation_bytes("selective:moe,moe_act,shared_experts") == whole


@PAIRS
def test_independent_modules_add_up(first, second):
    none, one, two, both = (
        activation_bytes(recompute)
        for recompute in (
            "none", f"selective:{first}", f"selective:{second}", f"selective:{first},{second}"
        )
    )  # fmt: skip
    assert none - both == pytest.approx((none - one) + (none - two))


def test_all_modules_leave_no_more_than_full_recomputation():
    assert activation_bytes(f"selective:{','.join(MODULES)}") > activation_bytes("full")


def test_unfused_attention_is_what_selective_alone_recomputes():
    job = replace(JOB, attention="unfused")
    model = replace(DENSE, experts=Experts(8, 2, 128))
    plain, module = (plan(r, job, model).microstep for r in ("selective", "selective:core_attn"))
    assert [op.name for op in operations(plain)] == [op.name for op in operations(module)]
    assert activation_bytes("selective", job, model) == activation_bytes(
        "selective:core_attn", job, model
    )


# Texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number_of_set", range(1, 1 << len(MODULES)))
def test_texts_and_numbers_of_sets_are_one(number_of_set):
    chosen = [name for bit, name in enumerate(MODULES) if number_of_set >> bit & 1]
    text = f"selective:{','.join(reversed(chosen))}"
    code = recompute_code(text)
    assert code > recompute_code("full:9999")
    assert recomputed_modules(recompute_text(code)) == set(chosen)
    assert recompute_code(recompute_text(code)) == code


def test_kinds_name_no_modules():
    assert not any(map(recomputed_modules, ("none", "selective", "full", "full:4")))


@pytest.mark.parametrize(
    ("strategy", "model", "recompute", "message"),
    [
        ("megatron", "llama3-8b", "selective:moe_act", "the model has no moe_act"),
        ("megatron", "llama3-8b", "selective:mla_up_proj", "the model has no mla_up_proj"),
        ("megatron", "mixtral-8x7b", "selective:shared_experts", "no shared_experts; allowed: c"),
        ("megatron", "llama3-8b", "selective:norm", "no module 'norm'; allowed: core_attn"),
        ("megatron", "llama3-8b", "selective:", "no module ''"),
        ("zero3", "llama3-8b", "selective:mlp", "allowed: none, selective, full, no single"),
        ("axonn", "llama3-8b", "selective:mlp", "allowed: none, selective, full, no single"),
    ],
)
def test_modules_that_are_not_there_are_refused(strategy, model, recompute, message):
    layouts = {"megatron": "tensor=2,data=4", "zero3": "shard=8", "axonn": "2x2x2x1"}
    with pytest.raises(InputError, match=message):
        predict(model, 8, layouts[strategy], strategy=strategy, recompute=recompute)


def test_more_modules_never_take_less_time():
    given = {"strategy": "megatron", "global_batch": 64, "micro_batch": 1, "machine": "dgx-h100"}
    sets = ["none", *(f"selective:{','.join(MODULES[:n])}" for n in range(1, len(MODULES) + 1))]
    seconds = [
        predict("deepseek-v2", 64, "data=64,expert=32", recompute=each, **given).step_seconds
        for each in sets
    ]
    assert (np.diff(seconds) >= 0).all() and seconds[-1] > seconds[0]


def test_selective_recomputation_of_megatron_core_runs_fused_attention_again():
    core = Megatron3D(engine=Engine(megatron=MegatronProgram(reruns_attention=True)))
    by_name, by_module, by_others = (
        operations(plan_of(strategy, DENSE, JOB, 2, recompute, data=16).microstep)
        for strategy, recompute in (
            (core, "selective"),
            (core, "selective:core_attn"),
            (Megatron3D(), "selective"),
        )
    )
    assert [op.name for op in by_name] == [op.name for op in by_module]
    n_again, n_once = (sum(isinstance(op, Attention) for op in ops) for ops in (by_name, by_others))
    assert n_again / n_once == 3 / 2


@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_hardware_flops_count_attention_that_selective_recomputation_runs_again(attention):
    given = {"strategy": "megatron", "global_batch": 64, "micro_batch": 1, "machine": "dgx-h100"}
    given |= {"attention": attention, "include_oom": True}
    usual, by_module = (
        predict("gpt-5b", 8, "tensor=2,data=4", recompute=recompute, **given)
        for recompute in ("selective", "selective:core_attn")
    )
    assert usual.hfu / usual.mfu == pytest.approx(by_module.hfu / by_module.mfu)
    assert usual.hfu > usual.mfu


@pytest.mark.parametrize("shared_hidden_size", [0, 64])
@pytest.mark.parametrize(
    ("precision", "with_shared"), [("mxfp8", 0.0), ("fp8-current", 0.0), ("fp8-delayed", 1.0)]
)
def test_the_router_saves_its_input_uncast(shared_hidden_size, precision, with_shared):
    """Shared experts save the same tensor, but for scales that come from earlier steps."""
    experts = replace(LATENT.experts, first_layer=0, shared_hidden_size=shared_hidden_size)
    mixture = replace(DENSE, experts=experts)
    job = replace(JOB, precision=precision)
    kept, left_out = (
        activation_bytes(f"selective:{m}", job, mixture) for m in ("moe_act", "moe_act,layernorm")
    )
    cast = with_shared * bool(shared_hidden_size)
    assert kept - left_out == pytest.approx(4 * TOKENS * 256 * (2.0 + cast))


def test_tensors_that_stand_for_gradients_are_those_of_a_stages_matrices():
    """Transformer Engine keeps one for each shape of a weight (module/base.py, get_dummy_wgrad)."""
    dummies = quantity(1.0)
    engine = Engine(memory=MemoryForm(dummy_gradient_bytes=dummies))
    strategy = replace(STRATEGY, engine=engine)
    attention = 256 * 3 * 256 + 256 * 256
    head, dense, expert = 1024 * 256, 3 * 256 * 512, 3 * 256 * 128
    mixtures = {0: Experts(8, 2, 128), 1: Experts(8, 2, 128, first_layer=1), 4: None}
    for n_dense, mlps in {0: expert, 1: dense + expert, 4: dense}.items():
        model = replace(DENSE, experts=mixtures[n_dense])
        with_them, without = (
            memory_terms(each, model, JOB, **SIZES)["working_set"] for each in (strategy, STRATEGY)
        )
        assert with_them - without == attention + head + mlps
