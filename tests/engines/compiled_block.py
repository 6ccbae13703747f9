"""Prints the collectives of a compiled block with DTensor's tensor parallelism, by graph and kind.

The block is written after the description in the file of the engine kempnerforge, with a sum in the
place of attention, which sends nothing. It is recomputed in the backward pass. This is the first of
four ranks, whose process group sends nothing.
"""

import json
from collections import Counter

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import silu
from torch.testing._internal.distributed.fake_pg import FakeStore

N_RANKS, HIDDEN, FFN = 4, 64, 128
COLUMNS = ("query", "key", "value", "gate", "up")
ROWS = ("proj", "down")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("attention_norm", "mlp_norm"):
            setattr(self, name, nn.RMSNorm(HIDDEN))
        for name in COLUMNS:
            width = HIDDEN if name in ("query", "key", "value") else FFN
            setattr(self, name, nn.Linear(HIDDEN, width, bias=False))
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        normed = self.attention_norm(x)
        attended = self.query(normed) * self.key(normed) + self.value(normed)
        x = x + self.proj(attended)
        normed = self.mlp_norm(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


def counted(kinds, graph):
    """A compiler that counts the collectives of a graph, and runs it as it is."""

    def compiler(module, _):
        names = [str(node.target) for node in module.graph.nodes]
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            kinds[graph][kind] += sum(f"_c10d_functional.{kind}" in name for name in names)
        return make_boxed_func(module.forward)

    return compiler


def main():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    mesh = init_device_mesh("cpu", (N_RANKS,))
    split_tokens = Shard(1)
    plan = {name: ColwiseParallel(input_layouts=split_tokens) for name in COLUMNS}
    for name in ROWS:
        plan[name] = RowwiseParallel(output_layouts=split_tokens, use_local_output=False)
    for name in ("attention_norm", "mlp_norm"):
        plan[name] = SequenceParallel()
    block = parallelize_module(Block(), mesh, plan)
    block = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    kinds = {"forward": Counter(), "backward": Counter()}
    backend = aot_autograd(
        fw_compiler=counted(kinds, "forward"),
        bw_compiler=counted(kinds, "backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    tokens = torch.randn(2, 8, HIDDEN, requires_grad=True)
    output = torch.compile(block, backend=backend)(DTensor.from_local(tokens, mesh, [split_tokens]))
    output.to_local().sum().backward()
    print(json.dumps(kinds))


if __name__ == "__main__":
    main()
