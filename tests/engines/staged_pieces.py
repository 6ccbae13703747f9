"""Prints what FSDP2 sends in the last stage of a pipeline whose loss runs in pieces, in order.

It prints a JSON list of kinds and elements. It runs torch's 1F1B on the third of four ranks (two
stages, two shards) whose process group sends nothing. The step is the second one, since what the
first one switches in the head's unit stays.
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
from wrapped_fsdp2 import HIDDEN, TOKENS, VOCABULARY, loss_in_pieces

N_BLOCKS, N_MICRO, N_PIECES = 2, 4, 4


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(N_BLOCKS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def noting(events, kind, function):
    def call(*args, **named):
        tensors = [each for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
        events.append([kind, max(each.numel() for each in tensors)])
        return function(*args, **named)

    return call


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stage = Stage()
    sharded = partial(fully_shard, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    sharded([stage.norm, stage.head])
    for block in stage.blocks:
        sharded(block)
    sharded(stage)
    events = []
    kinds = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
    with ExitStack() as patches:
        for name, kind in kinds.items():
            call = noting(events, kind, getattr(dist, name))
            patches.enter_context(patch.object(dist, name, call))
        # The other stage says so that it knows the shapes of what it sends.
        patches.enter_context(patch.object(dist, "recv", lambda vote, **_: vote.fill_(1)))
        hidden = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        piped = PipelineStage(
            stage,
            stage_index=1,
            num_stages=2,
            device=torch.device("cpu"),
            input_args=hidden,
            output_args=hidden,
            group=mesh["pp"].get_group(),
        )
        schedule = Schedule1F1B(
            piped, N_MICRO, loss_fn=lambda hidden, _: loss_in_pieces(stage.head, hidden, N_PIECES)
        )
        for _ in range(2):
            events.clear()
            schedule.step(target=torch.zeros(N_MICRO, TOKENS))
    print(json.dumps(events))


if __name__ == "__main__":
    main()
