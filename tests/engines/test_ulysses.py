"""DeepSpeed's Ulysses exchanges tokens for heads on gloo ranks, as the plan of its engine says."""

import importlib.metadata
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from build import collectives, number, plan_of
from runtime.ranks import on_ranks

from axonn_tune.io.presets import load_engine
from axonn_tune.runtime.released.deepspeed import import_deepspeed
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.strategies.zero.zero import zero3

pytest.importorskip("deepspeed")

N_RANKS = 2
LLAMA = Model(
    "llama",
    1,
    32,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=64,
    seq_len=16,
    norm="rms",
    position="rotary",
    bias=False,
)


class Exchanges:
    """Exchanges of equal parts, which gloo does not have, through a gather; notes their bytes."""

    def __init__(self):
        self.sent_bytes = []

    def __call__(self, output, input, group=None, async_op=False, **options):
        assert not async_op, "the host waits for each of them"
        self.sent_bytes.append(input.nbytes)
        everyone = [torch.empty_like(input) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, input, group=group)
        rank = dist.get_rank(group)
        output.copy_(torch.cat([sent.chunk(len(everyone))[rank] for sent in everyone]))

    def taken(self):
        taken, self.sent_bytes = self.sent_bytes, []
        return taken


def attention_of(model):
    """DeepSpeed's exchanges around an attention that returns the queries."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    def attend(module, query, key, value, mask, **options):
        return (query + key.sum() + value.sum()).transpose(1, 2), None

    # It asks for the version of Transformers, of which it uses nothing here.
    with patch.object(importlib.metadata, "version", lambda name: "5.0"):
        return UlyssesSPAttentionHF(
            attend,
            batch_size=1,
            attn_head_count=model.n_heads,
            attn_head_size=model.head_dim,
            kv_head_count=model.n_kv_heads,
            num_hidden_layers=1,
            process_group=dist.group.WORLD,
            local_seq_length=model.seq_len // N_RANKS,
            global_seq_length=model.seq_len,
        )


def planned_bytes(model):
    """The bytes of the plan's exchanges by pass, in the order of their starts."""
    engine = load_engine("deepspeed")
    strategy = zero3(engine, context_kind=engine.zero.context_kind)
    plan = plan_of(strategy, model, Job(N_RANKS, 1, model.seq_len), context=N_RANKS)
    exchanges = [op for op in collectives(plan, plan.microstep) if op.kind == "all_to_all"]
    assert {op.axis for op in exchanges} == {"context"}
    found = {"forward": [], "backward": []}
    for op in exchanges:
        found[op.name.partition(".")[0]].append(number(op.nbytes))
    return found


def exchanged(model, rank, exchanges):
    """The bytes that a rank exchanges in the forward and in the backward pass of attention."""
    n_tokens = model.seq_len // N_RANKS
    inputs = [
        torch.ones(1, n_heads, n_tokens, model.head_dim, dtype=torch.bfloat16).requires_grad_()
        for n_heads in (model.n_heads, model.n_kv_heads, model.n_kv_heads)
    ]
    positions = torch.arange(n_tokens)[None] + rank * n_tokens
    output, _ = attention_of(model)(torch.nn.Module(), *inputs, None, position_ids=positions)
    forward = exchanges.taken()
    output.sum().backward()
    return forward, exchanges.taken()


def check_rank(rank):
    exchanges = Exchanges()
    deepspeed = import_deepspeed(torch.device("cpu"))
    with patch.object(dist, "all_to_all_single", exchanges):
        deepspeed.init_distributed("gloo", verbose=False)
        for n_kv_heads in (2, 1):  # a single one is copied for the second rank
            model = replace(LLAMA, n_kv_heads=n_kv_heads)
            forward, backward = exchanged(model, rank, exchanges)
            planned = planned_bytes(model)
            assert forward == planned["forward"]
            # After the output's gradient, autograd takes those of the inputs in its own order.
            assert backward[0] == planned["backward"][0]
            assert sorted(backward) == sorted(planned["backward"])


@pytest.mark.slow
def test_deepspeed_exchanges_what_the_plan_says():
    on_ranks(N_RANKS, check_rank)
