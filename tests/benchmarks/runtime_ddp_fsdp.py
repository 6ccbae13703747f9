"""Compare whole training steps with torch's own DistributedDataParallel and FSDP2.

Run: python tests/benchmarks/runtime_ddp_fsdp.py [--rounds 21]

One GPT trains in fp32 on 4 ranks of one thread. The runtime on grid 1x1x1x4 is compared with DDP,
and on 1x1x4x1 with `fully_shard` (each block, then the rest; weights are gathered again for the
backward pass). A step is forward, backward, reduction, clipping and a fused AdamW. Both start from
the same weights; that both reach the same loss shows that they do the same work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from runtime_common import compared, header, in_turn, on_ranks, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from axonn_tune.runtime import GPT, Engine, Mesh, Optimizer, grid_layout
from axonn_tune.runtime.axonn.boxes import BlockLayout
from axonn_tune.runtime.axonn.trainer import RandomTokens
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model

N_RANKS, MICRO_BATCH = 4, 2
N_COMPARED = 8  # steps whose losses are compared
SPEC = Model(
    "small",
    n_layers=4,
    hidden_size=256,
    n_heads=8,
    vocab_size=2048,
    seq_len=128,
    tied_embeddings=False,
)
LR, BETAS, DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0
Step = Callable[[torch.Tensor], torch.Tensor]  # tokens (b, s + 1) to the mean loss of the rank


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = SPEC.hidden_size
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        b, s, _ = stream.shape
        qkv = self.qkv(self.norm1(stream)).view(b, s, SPEC.n_heads, 3, SPEC.head_dim)
        queries, keys, values = qkv.permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        stream = stream + self.proj(heads.transpose(1, 2).flatten(2))
        return stream + self.down(F.gelu(self.up(self.norm2(stream)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The same model, written for one device."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SPEC.vocab_size, SPEC.hidden_size)
        self.position = nn.Parameter(torch.empty(SPEC.seq_len, SPEC.hidden_size))
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(SPEC.n_layers))
        self.norm = nn.LayerNorm(SPEC.hidden_size)
        self.head = nn.Linear(SPEC.hidden_size, SPEC.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream))

    @torch.no_grad()
    def start_as(self, model: GPT) -> PlainGPT:
        """Take the weights of a model that has all of them on this rank."""
        own = {name: p.view(module.layout.shape) for name, module, p in _stored(model)}
        self.embedding.weight.copy_(own["embedding.matrix"])
        self.position.copy_(own["embedding.position"])
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(own[f"{name}.matrix"].flatten(1).t())
                if module.bias is not None:
                    module.bias.copy_(own[f"{name}.bias"].flatten())
        return self  # norms start as ones and zeros in both


def _stored(model: GPT) -> list[tuple[str, nn.Module, torch.Tensor]]:
    return [
        (name, module, module.shard.detach())
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layout", None), BlockLayout)
    ]


def own_model(grid: Layout) -> tuple[GPT, Step]:
    engine = Engine(Mesh(grid))
    model = GPT(engine, SPEC)
    optimizer = Optimizer(
        model,
        engine,
        LR,
        BETAS,
        weight_decay=DECAY,
        clip_norm=CLIP_NORM,
        one_microstep=True,
    )
    n_counted = float(N_RANKS * MICRO_BATCH * SPEC.seq_len)

    def step(text: torch.Tensor) -> torch.Tensor:
        loss = model.loss(text[:, :-1], text[:, 1:], n_counted)
        loss.backward()
        optimizer.step()
        return loss.detach() * N_RANKS

    return model, step


def plain_step(model: nn.Module) -> Step:
    decayed = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    others = [p for p in model.parameters() if all(p is not d for d in decayed)]
    groups = [
        {"params": decayed, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def step(text: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def sharded(model: PlainGPT) -> nn.Module:
    mesh = dist.device_mesh.init_device_mesh("cpu", (N_RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def measure(n_rounds: int) -> None:
    text = RandomTokens(SPEC.vocab_size, SPEC.seq_len).sequences(
        0, dist.get_rank() * MICRO_BATCH, MICRO_BATCH, torch.device("cpu")
    )
    over_data, data_step = own_model(grid_layout(1, 1, 1, N_RANKS))
    plain = [PlainGPT().start_as(over_data) for _ in range(2)]
    ddp_step = plain_step(DistributedDataParallel(plain[0], gradient_as_bucket_view=True))
    fsdp_step = plain_step(sharded(plain[1]))
    _, z_step = own_model(grid_layout(1, 1, N_RANKS, 1))
    say(f"{'plain':>8}{'own grid':>10}{header('plain', 'own')}")
    for name, grid, own, base in (
        ("DDP", "1x1x1x4", data_step, ddp_step),
        ("FSDP2", "1x1x4x1", z_step, fsdp_step),
    ):
        # In later steps the model has learnt the batch by heart, and rounding errors grow.
        losses = torch.stack([torch.stack((base(text), own(text))) for _ in range(N_COMPARED)])
        torch.testing.assert_close(losses[:, 1], losses[:, 0], rtol=1e-5, atol=0)
        timed = in_turn({"plain": partial(base, text), "own": partial(own, text)}, n_rounds, 2)
        say(
            f"{name:>8}{grid:>10}{compared(timed['own'], timed['plain'])}   loss "
            f"{losses[0, 0]:.4f} to {losses[-1, 0]:.5f} (plain), {losses[-1, 1]:.5f} (own)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    on_ranks(N_RANKS, measure, parser.parse_args().rounds)


if __name__ == "__main__":
    main()
