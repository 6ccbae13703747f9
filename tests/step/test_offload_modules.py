"""Activations in the host's memory: what moves comes back, beside what is computed."""

from dataclasses import replace
from functools import partial

import pytest
from build import layout_of, memory_terms, number, operations, plan_of
from worlds import machine_of, with_host

import axonn_tune
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.offload import OFFLOAD_MODULES
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, HostCopy
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

DENSE = Model("dense", n_layers=8, hidden_size=256, n_heads=8, vocab_size=512, seq_len=128)
MIXTURE = replace(DENSE, experts=Experts(4, 2, 512, first_layer=1))
STRATEGY = Megatron3D()
OF_EXPERTS = Megatron3D(has_experts=True)
JOB = Job(8, 32, 128)
EVERY = ",".join(OFFLOAD_MODULES)
TOKENS = 2 * 128


def predicted(modules, machine, model=DENSE, recompute="none", n_virtual=1, job=JOB, **sizes):
    strategy = STRATEGY if model.is_dense else OF_EXPERTS
    layout = layout_of(strategy, **(sizes or {"data": 8}))
    scenario = Scenario(model, replace(job, offload_modules=modules), machine, strategy)
    return predict(scenario, Configuration(layout, "xyzd", 2, recompute, n_virtual))


def copies(parts, direction):
    ops = operations(*parts)
    return [op for op in ops if isinstance(op, HostCopy) and op.direction == direction]


def bytes_by_hand(module):
    """Bytes of a dense layer's inputs of a module; attention's inputs are q, k and v."""
    stream = TOKENS * 256 * 2.0
    return {"core_attn": 3 * stream}.get(module, stream)


@pytest.mark.parametrize("modules", ["core_attn", "attn_norm,mlp_norm", "core_attn,attn_proj"])
def test_all_layers_but_the_last_move_out_and_come_back(modules):
    plan = plan_of(STRATEGY, DENSE, replace(JOB, offload_modules=modules), 2, data=8)
    of_layer = sum(map(bytes_by_hand, modules.split(",")))
    for direction in (TO_HOST, FROM_HOST):
        moved = [number(op.nbytes) for op in copies([plan.microstep], direction)]
        assert moved == [of_layer] * 7


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "experts"])
@pytest.mark.parametrize("n_virtual", [1, 2])
def test_every_stage_brings_back_what_it_has_moved_out(model, n_virtual):
    strategy = STRATEGY if model.is_dense else OF_EXPERTS
    modules = EVERY if not model.is_dense else "core_attn,mlp_norm"
    job = replace(JOB, offload_modules=modules)
    plan = plan_of(strategy, model, job, 2, n_virtual=n_virtual, data=4, pipeline=2)
    for stage in (plan.pipeline.first, plan.pipeline.last):
        out, back = (
            sum(number(op.nbytes) for op in copies([part], direction))
            for part, direction in ((stage.forward, TO_HOST), (stage.backward, FROM_HOST))
        )
        assert out == back > 0
        assert not copies([stage.forward], FROM_HOST) and not copies([stage.backward], TO_HOST)


def test_nothing_moves_without_the_option():
    plan = plan_of(STRATEGY, DENSE, JOB, 2, data=8)
    assert not any(copies([plan.microstep], direction) for direction in (TO_HOST, FROM_HOST))


@pytest.mark.parametrize("module", ["attn_norm", "qkv_linear", "core_attn", "mlp_norm"])
def test_a_host_that_takes_no_time_costs_nothing(module):
    instant = with_host(machine_of(slowdown=0.3), link=1e24, bandwidth=1e24)
    without, moved = (predicted(modules, instant) for modules in ("", module))
    assert moved.step_seconds == pytest.approx(without.step_seconds, rel=1e-9)


def test_a_slow_link_takes_its_time_twice():
    """Each micro-step copies everything out, and then back; nothing else takes any time."""
    link = 1e6
    slow = with_host(machine_of(), link=link, bandwidth=1e24)
    moved_bytes = 7 * (bytes_by_hand("core_attn") + bytes_by_hand("attn_proj"))
    prediction = predicted("core_attn,attn_proj", slow)
    assert prediction.n_microsteps == 2
    seconds = prediction.n_microsteps * 2 * moved_bytes / link
    assert seconds < prediction.step_seconds < 1.02 * seconds


def test_copies_hide_where_the_link_is_fast_enough():
    """A copy runs beside the next block; only what a block cannot hide is exposed."""
    usual = partial(predicted, "attn_norm")
    base = predicted("", with_host(machine_of()))
    of_block = base.step_seconds / 2 / 3 / 9  # micro-steps; thirds of them forward; layers
    link = bytes_by_hand("attn_norm") / (0.3 * of_block)
    hidden = usual(with_host(machine_of(), link=link, bandwidth=1e24))
    assert hidden.step_seconds == pytest.approx(base.step_seconds, rel=0.02)
    exposed = usual(with_host(machine_of(), link=link / 20, bandwidth=1e24))
    assert exposed.step_seconds > 1.5 * base.step_seconds


@pytest.mark.parametrize("modules", ["core_attn", "core_attn,attn_proj", "attn_norm,qkv_linear"])
def test_memory_moves_to_the_host_but_for_the_last_layer(modules):
    machine = with_host(machine_of())
    without, moved = (predicted(each, machine) for each in ("", modules))
    of_layer = sum(map(bytes_by_hand, modules.split(",")))
    terms, before = moved.memory_terms_bytes, without.memory_terms_bytes
    assert before["activations"] - terms["activations"] == pytest.approx(7 * of_layer)
    # The next layer's are on their way back while one layer's gradients are formed.
    assert terms["working_set"] - before["working_set"] == pytest.approx(of_layer)
    assert moved.host_memory_bytes == pytest.approx(4 * 7 * of_layer)  # four ranks a node
    assert without.host_memory_bytes == 0.0


def test_a_stage_keeps_one_layer_of_each_micro_batch_in_flight():
    job = replace(JOB, offload_modules="core_attn")
    of = partial(memory_terms, STRATEGY, DENSE, micro_batch=2, data=4, pipeline=2)
    held = of(job=JOB)["activations"] - of(job=job)["activations"]
    assert held == pytest.approx(2 * 3 * bytes_by_hand("core_attn"))


def test_what_is_not_saved_does_not_move():
    machine = with_host(machine_of())
    for recompute, modules in (("moe", "moe_act"), ("moe", "expert_fc1")):
        again = partial(predicted, model=MIXTURE, recompute=f"selective:{recompute}")
        moved = again(modules, machine, data=8, expert=4)
        assert moved.host_memory_bytes == 0.0
        without = again("", machine, data=8, expert=4)
        assert moved.step_seconds == pytest.approx(without.step_seconds, rel=1e-9)


def test_no_more_moves_than_is_saved():
    for precision in ("bf16", "fp8-delayed", "mxfp8"):
        job = replace(JOB, offload_modules=EVERY, precision=precision)
        terms = memory_terms(OF_EXPERTS, MIXTURE, job, 2, data=8, expert=4)
        assert 0.0 < terms["activations"] < terms["host_activations"]


# What is refused, and what a launcher writes ----------------------------------------------------

MEGATRON = {"strategy": "megatron", "machine": "dgx-h100", "global_batch": 64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload_modules": "attn_proj"}, "attn_proj shares its input with core_attn"),
        ({"offload_modules": "mlp"}, "no module 'mlp'; allowed: attn_norm"),
        ({"offload_modules": "moe_act"}, "llama3-8b has no experts"),
        ({"offload_modules": "core_attn", "strategy": "zero3"}, "keeps activations on the GPU"),
        ({"offload_modules": "layer_inputs"}, "engine moves only attn_norm, qkv_linear"),
        ({"offload_modules": "layer_inputs,core_attn"}, "allowed: layer_inputs alone"),
        ({"offload_modules": "core_attn", "recompute": "full:4"}, "allowed with --offload-mod"),
        ({"offload_modules": "core_attn", "machine": "aws-p5"}, "no facts for --offload"),
    ],
)
def test_what_cannot_move_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        build_search("llama3-8b", 8, **{**MEGATRON, **options})


def test_a_search_leaves_out_recomputation_of_whole_layers():
    search = build_search("llama3-8b", 8, offload_modules="core_attn", **MEGATRON)
    assert search.recomputes == ("none", "selective") and not search.partial_recompute


def test_megatron_core_is_told_the_modules():
    files = axonn_tune.launch(
        "llama3-8b", 8, grid="tensor=2,data=4", offload_modules="core_attn,attn_proj", **MEGATRON
    )
    text = " ".join("\n".join(files.values()).replace("\\\n", " ").split())
    assert "--fine-grained-activation-offloading --offload-modules core_attn attn_proj -" in text
