"""Prints which products a compiled block forms again in its backward pass, by recomputation.

It prints the columns of each product in a JSON object. The block is written after the facts of the
engine torchtitan, with sums in the place of attention. Its checkpoint does not stop early, so that
only the compiler leaves out what no gradient needs.
"""

import json
from collections import Counter

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import silu
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

HIDDEN, FFN, TOKENS = 64, 128, 8
# Columns of the gradients of the five products' inputs.
OF_GRADIENTS = Counter({HIDDEN: 4, FFN: 1})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        query, key, value = self.qkv(self.attention_norm(x)).chunk(3, -1)
        x = x + self.proj(query * key + value)
        normed = self.mlp_norm(x)
        return x + self.down(silu(self.gate(normed)) * self.up(normed))


def every_second():
    """A policy that keeps the first product, forms the second one again, and so on."""
    counted = Counter()

    def policy(context, operation, *_, **__):
        if operation != torch.ops.aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counted[context.is_recompute] += 1
        is_kept = counted[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def columns_again(**options):
    columns = Counter()

    def compiler(module, _):
        products = [node for node in module.graph.nodes if "aten.mm" in str(node.target)]
        shapes = [tuple(node.meta["val"].shape) for node in products]
        columns.clear()
        columns.update(width for rows, width in shapes if rows == TOKENS)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    block = checkpoint_wrapper(Block(), early_stop=False, **options)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    torch.compile(block, backend=backend, fullgraph=True)(x).sum().backward()
    return sorted((columns - OF_GRADIENTS).elements())


def main():
    selective = columns_again(context_fn=every_second)
    print(json.dumps({"selective": selective, "full": columns_again()}))


if __name__ == "__main__":
    main()
