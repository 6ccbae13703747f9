"""DeepSpeed with ALST: tiles of MLPs and logits, and inputs of layers in the host's memory."""

from dataclasses import replace

import pytest
from build import collectives, memory_terms, number, operations, plan_of, table_of

import axonn_tune
from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.spec.engine import MemoryForm
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Gemm, HostCopy
from axonn_tune.strategies.zero.zero import zero3

ALST = load_engine("deepspeed-alst")
LLAMA = Model(
    "llama",
    n_layers=8,
    hidden_size=256,
    n_heads=8,
    n_kv_heads=4,
    vocab_size=4096,
    seq_len=1024,
    ffn_hidden_size=1024,
    gated_mlp=True,
    norm="rms",
    position="rotary",
    bias=False,
)
JOB = Job(8, 2, 1024)
LAYOUT = {"context": 4, "shard": 2}
# A rank's part of the residual stream.
STREAM = 1024 / 4 * 256 * 2.0
MLP_FLOPS = 2.0 * 1024 / 4 * 3 * 256 * 1024


def strategy_of(**facts):
    return zero3(replace(ALST, memory=MemoryForm(**facts)), context_kind="ulysses")


def planned(job=JOB, **facts):
    return plan_of(strategy_of(**facts), LLAMA, job, recompute="full", **LAYOUT)


def memory(job=JOB, recompute="full", **facts):
    return memory_terms(strategy_of(**facts), LLAMA, job, recompute=recompute, **LAYOUT)


def flops(plan):
    return sum(number(op.flops) for op in operations(plan.microstep) if isinstance(op, Gemm))


def test_an_mlp_in_tiles_is_formed_once_more():
    assert flops(planned(tiles_mlp=True)) - flops(planned()) == pytest.approx(8 * MLP_FLOPS)


def test_nothing_of_an_mlp_in_tiles_is_saved():
    """The gate, what is above it and their product are each four times as wide as the stream."""
    saved = {tiles: memory(recompute="none", tiles_mlp=tiles)["activations"] for tiles in (0, 1)}
    assert saved[False] - saved[True] == pytest.approx(8 * 12 * STREAM)


def test_a_block_in_work_is_smaller_in_tiles_and_over_its_gates():
    """Where gradients overwrite the gate and what is above it, they take no memory of their own."""
    usual = memory(tiles_logits=True)["working_set"]
    overwriting = memory(tiles_logits=True, overwrites_gates=True)["working_set"]
    assert usual - overwriting == pytest.approx(8 * STREAM)
    assert memory(tiles_logits=True, tiles_mlp=True)["working_set"] < overwriting


def test_logits_in_tiles_take_nothing():
    model = replace(LLAMA, vocab_size=2**20)
    terms = [
        memory_terms(strategy_of(tiles_logits=tiles), model, JOB, recompute="full", **LAYOUT)
        for tiles in (False, True)
    ]
    logits = 1024 / 4 * 2.0**20
    assert terms[0]["working_set"] == pytest.approx(logits * (2 + 4))
    assert terms[1]["working_set"] == memory(tiles_logits=True)["working_set"]


def test_inputs_of_all_layers_but_the_last_move_out_and_come_back():
    moving = replace(JOB, offload_modules="layer_inputs")
    copies = [op for op in operations(planned(moving).microstep) if isinstance(op, HostCopy)]
    for direction in (TO_HOST, FROM_HOST):
        moved = [number(op.nbytes) for op in copies if op.direction == direction]
        assert moved == [STREAM] * 7
    before, after = memory(), memory(moving)
    assert before["activations"] - after["activations"] == pytest.approx(7 * STREAM)
    assert after["host_activations"] == pytest.approx(7 * STREAM)
    on_its_way_back = after["working_set"] - before["working_set"]
    assert on_its_way_back == pytest.approx(STREAM)


@pytest.mark.parametrize(("context", "is_broken"), [(4, False), (8, False), (16, True)])
def test_more_ranks_than_kv_heads_have_copies_of_them(context, is_broken):
    """There are 8 heads, and 4 of keys and values."""
    strategy = strategy_of()
    placements = table_of(strategy, context=context).placements
    reasons = strategy.rejections(LLAMA, replace(JOB, n_gpus=context), placements)
    kv_rule = reasons["KV heads not divisible by context"]
    assert (
        not kv_rule.any() and reasons["attention heads not divisible by context"].all() == is_broken
    )


def test_copies_of_kv_heads_travel_and_are_saved():
    sent, saved = [], []
    for n_kv_heads in (8, 4):
        model = replace(LLAMA, n_kv_heads=n_kv_heads)
        job = Job(8, 1, 1024)
        plan = plan_of(strategy_of(), model, job, recompute="full", context=8)
        exchanges = [op for op in collectives(plan, plan.microstep) if op.kind == "all_to_all"]
        sent.append(sum(number(op.nbytes) for op in exchanges))
        terms = memory_terms(strategy_of(), model, job, recompute="none", context=8)
        saved.append(terms["activations"])
    assert sent[0] == sent[1]
    # Four heads of keys and values before the copies are made, which are saved as well.
    assert saved[0] == pytest.approx(saved[1])


OPTIONS = {
    "strategy": "zero3",
    "engine": "deepspeed-alst",
    "machine": "dgx-h100",
    "global_batch": 8,
    "offload_modules": "layer_inputs",
}


def test_a_search_recomputes_whole_layers_whose_inputs_move():
    assert build_search("llama3-8b", 8, **OPTIONS).recomputes == ("full",)
    with pytest.raises(InputError, match="recompute is 'none'; allowed with --offload-modules"):
        build_search("llama3-8b", 8, recompute="none", **OPTIONS)
    with pytest.raises(InputError, match="with its engine moves only layer_inputs"):
        build_search("llama3-8b", 8, **{**OPTIONS, "offload_modules": "core_attn"})


def test_no_script_is_written_that_would_not_do_so():
    with pytest.raises(InputError, match="computes MLPs in tiles, and the programs"):
        axonn_tune.launch("llama3-8b", 8, **OPTIONS)
