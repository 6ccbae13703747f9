"""What torch's FSDP2 does with frozen blocks below trained ones, seen in a world of one rank."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axonn_tune.runtime.rehearsal.world import rehearsed
from axonn_tune.spec.rehearsal import Message

N_RANKS, HIDDEN, TOKENS, BLOCKS, FROZEN = 4, 64, 16, 5, 3


def messages_of_a_step():
    """Messages of blocks in torch, of which the first are frozen and stored in bf16."""
    with rehearsed(N_RANKS) as tape:
        blocks = [nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(BLOCKS)]
        for block in blocks[:FROZEN]:
            block.requires_grad_(False).to(torch.bfloat16)
        model = nn.Sequential(*blocks)
        policy = MixedPrecisionPolicy(torch.bfloat16)
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        tape.begin_step()
        y = model(torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16))
        n_forward = sum(n for op, n in tape.counts.items() if isinstance(op, Message))
        y.sum().backward()
        found = [op for op, n in tape.counts.items() for _ in range(n) if isinstance(op, Message)]
    return n_forward, [op.kind for op in found]


@pytest.mark.slow
def test_frozen_blocks_are_gathered_in_the_forward_pass_and_never_reduced():
    n_forward, kinds = messages_of_a_step()
    assert n_forward == BLOCKS
    assert kinds.count("reduce_scatter") == BLOCKS - FROZEN
    prefetched = 1  # The lowest trained block gathers the one below it, which nothing uses.
    assert kinds.count("all_gather") == BLOCKS + BLOCKS - FROZEN + prefetched
