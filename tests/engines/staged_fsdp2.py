"""Prints what FSDP2 does in the first stage of a pipeline, in order, one JSON list.

It runs torch's 1F1B on the first of four ranks (two stages, two shards) whose process group sends
nothing. The stage has an embedding and two blocks of one matrix each.
"""

import json
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

HIDDEN, VOCABULARY, N_BLOCKS, N_MICRO, TOKENS = 64, 256, 2, 4, 8


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(N_BLOCKS))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def noting(events, kind, function, nbytes):
    def call(*args, **named):
        events.append([kind, nbytes((*args, *named.values()))])
        return function(*args, **named)

    return call


def full_bytes(args):
    """The bytes of the larger tensor, which is the whole buffer."""
    return max(each.nbytes for each in args if isinstance(each, torch.Tensor))


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stage = Stage()
    sharded = partial(fully_shard, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    for block in stage.blocks:
        sharded(block)
    sharded(stage)
    events = []
    for block in stage.blocks:
        block.register_forward_hook(lambda *_: events.append(["forward", 0]))
        block.register_full_backward_hook(lambda *_: events.append(["backward", 0]))
    watched = {
        "all_gather_single": ("all_gather", full_bytes),
        "reduce_scatter_single": ("reduce_scatter", full_bytes),
        "P2POp": ("send_recv", lambda args: args[1].nbytes),
    }
    with ExitStack() as patches:
        for name, (kind, nbytes) in watched.items():
            call = noting(events, kind, getattr(dist, name), nbytes)
            patches.enter_context(patch.object(dist, name, call))
        # The other stage says so that it knows the shapes of what it sends.
        patches.enter_context(patch.object(dist, "recv", lambda vote, **_: vote.fill_(1)))
        tokens = torch.zeros(N_MICRO, TOKENS, dtype=torch.long)
        output = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        piped = PipelineStage(
            stage,
            stage_index=0,
            num_stages=2,
            device=torch.device("cpu"),
            input_args=tokens[:1],
            output_args=output,
            output_grads=output,
            group=mesh["pp"].get_group(),
        )
        Schedule1F1B(piped, N_MICRO, loss_fn=lambda *_: None).step(tokens)
    print(json.dumps(events))


if __name__ == "__main__":
    main()
