"""What torch's FSDP2 does with adapters beside frozen weights, seen in a world of one rank."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axonn_tune.runtime.rehearsal.world import rehearsed
from axonn_tune.spec.rehearsal import Message

N_RANKS, HIDDEN, RANK, TOKENS, BLOCKS = 4, 64, 8, 16, 3


class Block(nn.Module):
    """A frozen weight in bf16 with an adapter in fp32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16), False)
        self.a = nn.Parameter(torch.ones(HIDDEN, RANK))
        self.b = nn.Parameter(torch.ones(RANK, HIDDEN))

    def forward(self, x):
        return x @ self.weight + (x @ self.a) @ self.b


def messages_of_a_step():
    with rehearsed(N_RANKS) as tape:
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        policy = MixedPrecisionPolicy(torch.bfloat16)
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        stored = {p.to_local().dtype: p.to_local().numel() for p in model[0].parameters()}
        tape.begin_step()
        model(torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)).sum().backward()
        found = [op for op, n in tape.counts.items() for _ in range(n) if isinstance(op, Message)]
    return stored, [(op.kind, op.nbytes) for op in found]


@pytest.mark.slow
def test_frozen_weights_are_gathered_and_never_reduced():
    """Each block is gathered in both passes, frozen weight and adapter in one message."""
    stored, messages = messages_of_a_step()
    assert stored[torch.bfloat16] == HIDDEN * HIDDEN / N_RANKS
    assert set(stored) == {torch.bfloat16, torch.float32}
    adapter = 2 * HIDDEN * RANK
    gathers = [nbytes for kind, nbytes in messages if kind == "all_gather"]
    assert set(gathers) == {2 * (HIDDEN * HIDDEN + adapter)}
    assert len(gathers) == 2 * BLOCKS
    reductions = [nbytes for kind, nbytes in messages if kind == "reduce_scatter"]
    assert reductions == [2 * adapter] * BLOCKS
