"""Train a small GPT on the bytes of a text file, on any grid; go on from a checkpoint on another.

These commands train on four ranks of one machine, then go on with two ranks and another grid::

    torchrun --nproc-per-node 4 train_text.py book.txt --grid 1x2x2x1 --steps 50 --save saved
    torchrun --nproc-per-node 2 train_text.py book.txt --grid 1x1x1x2 --steps 100 --load saved
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_tune.runtime import (
    GPT,
    Engine,
    Mesh,
    Optimizer,
    joined,
    load,
    parse_layout,
    pick_device,
    place_in_job,
    save,
)
from axonn_tune.spec.model import Model

MODEL = Model(
    "bytes", n_layers=2, hidden_size=64, n_heads=4, vocab_size=256, seq_len=64, bias=False
)
BATCH = 16  # sequences in one step


def sequences(text: torch.Tensor, step: int, rows: range) -> torch.Tensor:
    """Return rows of a step's batch, shape (rows, s + 1); the step decides where each starts."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - MODEL.seq_len - 1, (BATCH,), generator=generator)
    return torch.stack([text[i : i + MODEL.seq_len + 1] for i in starts[rows.start : rows.stop]])


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train until `arguments.steps` are done, from a checkpoint if one is given."""
    text = torch.tensor(list(Path(arguments.text).read_bytes()), device=device)
    mesh = Mesh(parse_layout(arguments.grid), device=device)
    model = GPT(Engine(mesh), MODEL)
    optimizer = Optimizer(model, model.engine, lr=3e-3)
    first = load(arguments.load, model, optimizer) if arguments.load else 0
    n_parts = mesh.size("z") * mesh.size("data")
    rows = range(BATCH // n_parts * mesh.batch_index, BATCH // n_parts * (mesh.batch_index + 1))
    for step in range(first, arguments.steps):
        batch = sequences(text, step, rows)
        loss = model.loss(batch[:, :-1], batch[:, 1:], n_counted=BATCH * MODEL.seq_len)
        loss.backward()
        optimizer.step()
        # Each rank has its share of the mean loss; along X and Y all ranks have the same share.
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            mean = total.item() / (mesh.size("x") * mesh.size("y"))
            print(f"step {step + 1}: loss {mean:.5f}", flush=True)
    if arguments.save:
        save(arguments.save, model, optimizer, arguments.steps)


def main() -> None:
    """Read the command line, join the other ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="any file; each byte is a token")
    parser.add_argument("--grid", default="1x1x1x1", help="G_x x G_y x G_z x G_data")
    parser.add_argument("--steps", type=int, default=100, help="steps in all")
    parser.add_argument("--save", help="folder for a checkpoint at the end")
    parser.add_argument("--load", help="folder of a checkpoint to go on from")
    arguments = parser.parse_args()
    place = place_in_job(os.environ)
    if place is None:
        parser.error("start me with torchrun or srun")
    device = pick_device("auto", place)
    with joined(place, device, timeout_seconds=300):
        train(arguments, device)


if __name__ == "__main__":
    main()
