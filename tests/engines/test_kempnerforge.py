"""The facts of KempnerForge's engine, against torch's compiler and its measured steps."""

from collections import Counter

import pytest
from build import collectives, number, plan_of
from engines.programs_here import printed_by
from worlds import llama

from axonn_tune.io.presets import load_engine, load_model
from axonn_tune.spec.job import Job
from axonn_tune.strategies.zero.zero import zero3

ENGINE = load_engine("kempnerforge")
MODEL = llama(
    n_layers=4,
    hidden_size=256,
    n_heads=8,
    n_kv_heads=8,
    vocab_size=1024,
    ffn_hidden_size=512,
    seq_len=64,
)
CHAINS = {"forward": ("forward",), "backward": ("recompute", "backward")}


@pytest.mark.slow
def test_the_compiler_joins_gathers_of_one_input_and_no_sums_as_the_plan_says():
    recorded = printed_by("compiled_block.py")
    plan = plan_of(zero3(ENGINE), MODEL, Job(16, 16, 64), recompute="full", shard=4, tensor=4)
    layers = {linear.name for linear in MODEL.block_linears}
    planned = {graph: Counter(all_reduce=0) for graph in CHAINS}
    for op in collectives(plan, plan.microstep):
        chain, layer = op.name.split(".")[:2]
        for graph, chains in CHAINS.items():
            if chain in chains and layer in layers:
                planned[graph][op.kind] += number(op.n_calls) / MODEL.n_layers
    assert planned == recorded
    assert recorded["backward"] == {"all_gather": 4, "reduce_scatter": 6, "all_reduce": 0}


def test_rotation_and_repeated_keys_move_what_the_engine_says():
    model = load_model("llama3-8b")
    queries, keys = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    # Queries are read and written; keys and values are read, and written for each query.
    moved = 2 * queries + 2 * (keys + queries)
    one_kernel = 2 * (queries + keys)
    assert ENGINE.kernels["rotary"].traffic.value == pytest.approx(moved / one_kernel)
