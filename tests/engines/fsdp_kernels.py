"""Prints the bytes that kernels around torch's FSDP move, for each element, as one JSON list.

It trains one of eight ranks whose process group sends nothing. The argument is a JSON list of
cases, each of which has the version of FSDP, the types of the weights and of messages with
gradients, the number of micro-steps, whether only the last of them reduces gradients, whether the
root is told to be sharded after the forward pass, and the optimizer's implementation.

The values are means over a step: `copy_in` for each element of a shard that is gathered, `copy_out`
for each element that has been gathered, `pack` for each whole gradient that is reduced, and `after`
for each element of a shard of it. The others are for each element of a shard, once in a step, but
`n_gathers`, which counts.
"""

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HIDDEN, VOCABULARY, N_BLOCKS, TOKENS, N_RANKS = 64, 256, 2, 8, 8
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GATHER, REDUCE = ("allgather_", "_allgather_base_"), ("_reduce_scatter_base_",)
TERMS = {
    "_foreach_copy_": "copy_in",
    "all_gather_copy_in": "copy_in",
    "copy_": "copy_in",
    "split_with_sizes_copy": "copy_out",
    "chunk_cat": "pack",
    "cat": "pack",
    "add_": "after",
}
# Kernels that FSDP runs before it sends gradients, and others after it has reduced them.
AROUND_REDUCTIONS = ("div_", "_to_copy")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(N_BLOCKS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tensors(tree):
    found = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return [tensor for tensor in found.values() if tensor.numel() > 1]


def nbytes(tree):
    return sum(tensor.nbytes for tensor in tensors(tree))


class Recorder(TorchDispatchMode):
    """Counts bytes by term: of the micro-steps by the kernels' names, later by what is said."""

    def __init__(self):
        super().__init__()
        self.moved = Counter()
        self.gathered = self.reduced = self.n_gathers = 0
        self.term = None
        self.is_packing = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in GATHER:
            self.n_gathers += 1
            self.gathered += sum(each.numel() for each in tensors(args[0]))
        elif name in REDUCE:
            self.reduced += max(each.numel() for each in tensors((args, kwargs)))
            self.is_packing = False
        elif not func.is_view:
            self._note(func, name, args, kwargs, result)
        return result

    def _note(self, func, name, args, kwargs, result):
        term = self.term or TERMS.get(name)
        if term is None and name in AROUND_REDUCTIONS:
            term = "pack" if self.is_packing else "after"
        self.is_packing |= term == "pack"
        if term is not None:
            self.moved[term] += moved_bytes(func, name, args, kwargs, result)


def moved_bytes(func, name, args, kwargs, result):
    """What a kernel reads and writes; those that copy or join do not read what they write."""
    if name == "all_gather_copy_in":  # It writes this rank's part of the buffer.
        return 2 * nbytes(args[0])
    written, read = [], []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # torch's fused kernel writes gradients only where it undoes a scale.
        is_written = is_written and not (name == "_fused_adamw_" and argument.name == "grads")
        (written if is_written else read).append(value)
    written.append(kwargs.get("out"))
    is_copy = "copy" in name or "cat" in name
    formed = [] if tensors(written) else result
    times = 1 if is_copy else 2
    return nbytes(read) + times * nbytes(written) + nbytes(formed)


def sharded(version, weights, messages, reshards_root):
    model = Model().to(DTYPES[weights])
    reduce_dtype = DTYPES[messages]
    if version == 1:
        policy = MixedPrecision(torch.bfloat16, reduce_dtype, torch.bfloat16)
        wrapped = ModuleWrapPolicy({Block})
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=wrapped, mixed_precision=policy, device_id=device
        )
    mesh = init_device_mesh("cpu", (N_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    options = {"reshard_after_forward": True} if reshards_root else {}
    return fully_shard(model, mesh=mesh, mp_policy=policy, **options)


def step(model, optimizer, n_micro, is_once, recorder):
    optimizer.zero_grad()
    tokens = torch.zeros(1, TOKENS, dtype=torch.long)
    for number in range(n_micro):
        if is_once:
            model.set_requires_gradient_sync(number == n_micro - 1)
        model(tokens).sum().backward()
    recorder.term = "clip"
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    recorder.term = "update"
    optimizer.step()
    recorder.term = None


def main(version, weights, messages, n_micro, reductions, root, implementation):
    model = sharded(version, weights, messages, root == "sharded")
    options = {"weight_decay": 0.0 if weights == "bf16" else 0.1, implementation: True}
    kind = torch.optim.Adam if weights == "bf16" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3, **options)
    is_once = reductions == "once"
    step(model, optimizer, n_micro, is_once, Recorder())
    with Recorder() as recorder:
        step(model, optimizer, n_micro, is_once, recorder)
    n_owned = sum(each.numel() for each in Model().parameters()) / N_RANKS
    per = {
        "copy_in": recorder.gathered / N_RANKS,
        "copy_out": recorder.gathered,
        "pack": recorder.reduced,
        "after": n_micro * n_owned,
        "clip": n_owned,
        "update": n_owned,
    }
    of_terms = {term: recorder.moved[term] / count for term, count in per.items()}
    return {**of_terms, "n_gathers": recorder.n_gathers}


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    print(json.dumps([main(*case) for case in json.loads(sys.argv[1])]))
