"""Prints what FSDP2 gathers and reduces in a step if embedding, and norm with head, are units.

It prints a JSON list for each case: whether head and embedding share their weight, and the number
of pieces of the tokens for which logits and loss are formed one after another, after the
description in the docstring of ZeroProgram. The step is the second one, since what the first one
switches in the head's unit stays. The process group of four ranks sends nothing.
"""

import json
import sys
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

HIDDEN, VOCABULARY, N_BLOCKS, TOKENS, N_RANKS = 64, 256, 4, 16, 4


class Model(nn.Module):
    def __init__(self, is_tied, has_loss):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(N_BLOCKS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.has_loss = has_loss
        if is_tied:
            self.embedding.weight = self.head.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x).float().sum() if self.has_loss else x


class Joined(torch.autograd.Function):
    """Hands the gradients that the pieces have formed on to the model."""

    @staticmethod
    def forward(context, hidden, gradient):
        context.save_for_backward(gradient)
        return hidden.new_zeros(())

    @staticmethod
    def backward(context, _):
        return *context.saved_tensors, None


def loss_in_pieces(head, hidden, n_pieces):
    """Form logits and gradients of each piece; the last one reduces the head's gradient."""
    pieces = [piece.detach().requires_grad_() for piece in hidden.split(TOKENS // n_pieces)]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for piece in pieces:
        if piece is pieces[-1]:
            head.set_requires_gradient_sync(True, recurse=False)
        head(piece).float().sum().backward()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    return Joined.apply(hidden, torch.cat([piece.grad for piece in pieces]))


def recorded(is_tied, n_pieces, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded = partial(fully_shard, mesh=mesh, mp_policy=policy)
    model = Model(is_tied, n_pieces == 1)
    if is_tied:
        ends = [model.embedding, model.norm, model.head]
        sharded(ends, reshard_after_forward=False)
    else:
        sharded(model.embedding, reshard_after_forward=True)
        sharded([model.norm, model.head], reshard_after_forward=False)
    for block in model.blocks:
        sharded(block, reshard_after_forward=True)
    sharded(model)
    events = []

    def noting(kind, function):
        def call(*args, **named):
            tensors = [each for each in (*args, *named.values()) if hasattr(each, "numel")]
            events.append([kind, max(each.numel() for each in tensors)])
            return function(*args, **named)

        return call

    kinds = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}
    with ExitStack() as patches:
        for name, kind in kinds.items():
            patches.enter_context(patch.object(dist, name, noting(kind, getattr(dist, name))))
        for _ in range(2):
            events.clear()
            output = model(torch.zeros(TOKENS, dtype=torch.long))
            if n_pieces > 1:
                output = loss_in_pieces(model.head, output, n_pieces)
            output.backward()
    return events


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    mesh = init_device_mesh("cpu", (N_RANKS,))
    print(json.dumps([recorded(*case, mesh) for case in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
