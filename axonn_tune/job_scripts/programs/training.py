"""What the training programs in this folder share: settings, ranks, tokens, and timed steps."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CLIP_NORM = 1.0
# The first steps allocate memory and start communicators; the median leaves them out.
WARM_UP_STEPS = 2


def load_settings() -> SimpleNamespace:
    """Return what is to be trained, which the file settings.json next to this one holds."""
    text = Path(__file__).with_name("settings.json").read_text()
    return json.loads(text, object_hook=lambda entries: SimpleNamespace(**entries))


def parse_arguments(description: str) -> argparse.Namespace:
    """Read the command line of a training program."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20, help="steps to train; default: 20")
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate; default: 1e-4")
    parser.add_argument(
        "--data", help="file of tokens, each a 32-bit integer; default: random tokens"
    )
    return parser.parse_args()


@contextmanager
def joined(gpu_backend: str | None = None) -> Iterator[torch.device]:
    """Join the other ranks, whose places the environment holds, and yield this rank's device.

    `gpu_backend` names what ranks with GPUs communicate through, by default NCCL.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group((gpu_backend or "nccl") if device.type == "cuda" else "gloo")
    # All ranks form a communicator in this call, before a few of them exchange anything.
    dist.all_reduce(torch.zeros(1, device=device))
    try:
        yield device
    finally:
        dist.destroy_process_group()


class Tokens:
    """The sequences of every step: those of a file, or random ones.

    A sequence depends on its step and its number in the global batch alone, so that the ranks
    share a batch without any communication.
    """

    def __init__(self, settings: SimpleNamespace, path: str | None) -> None:
        self._settings = settings
        self._file = None if path is None else np.memmap(path, dtype=np.uint32, mode="r")

    def sequence(self, step: int, number: int) -> torch.Tensor:
        """Return one sequence and the token that follows it, shape (s + 1)."""
        length = self._settings.seq_len + 1
        place = step * self._settings.global_batch + number
        if self._file is not None:
            start = place * length % (len(self._file) - length + 1)
            return torch.from_numpy(self._file[start : start + length].astype(np.int64))
        generator = torch.Generator().manual_seed(place)
        return torch.randint(self._settings.model.vocab_size, (length,), generator=generator)

    def share(self, step: int, share: int, n_shares: int) -> list[torch.Tensor]:
        """Return the sequences of one of the shares of a batch by micro-step, shape (b, s + 1)."""
        per_share = self._settings.global_batch // n_shares
        numbers = range(share * per_share, (share + 1) * per_share)
        texts = torch.stack([self.sequence(step, number) for number in numbers])
        return list(texts.split(self._settings.micro_batch))


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy; the shapes are (b, s, v) and (b, s)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(
    settings: SimpleNamespace,
    arguments: argparse.Namespace,
    device: torch.device,
    share: int,
    n_shares: int,
    train_step: Callable[[list[torch.Tensor]], torch.Tensor],
) -> list[float]:
    """Train, print the settings and every step, and return the losses.

    Parameters
    ----------
    share, n_shares : int
        The share of the global batch on which this rank works, and how many there are.
    train_step : callable
        Trains on the micro-steps of this rank's share of a batch and returns their mean loss.
    """
    tokens = Tokens(settings, arguments.data)
    say(f"settings: {json.dumps(settings, default=vars)}")
    seconds, losses = [], []
    for step in range(arguments.steps):
        texts = [text.to(device) for text in tokens.share(step, share, n_shares)]
        synchronize(device)
        start = time.perf_counter()
        loss = train_step(texts)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        say(f"step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s")
    measured = statistics.median(seconds[WARM_UP_STEPS:] or seconds)
    say(f"median {measured:.3f} s a step, predicted {settings.predicted_step_seconds:.3f} s")
    return losses


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was issued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(text: str) -> None:
    """Print a line on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)
