"""Train a GPT with DeepSpeed on the layout of settings.json, by the switches of ds_config.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from gpt import GPT
from training import joined, load_settings, mean_loss, parse_arguments, train

# The default of torch's AdamW.
WEIGHT_DECAY = 0.01


def load_config() -> dict[str, Any]:
    """Return DeepSpeed's configuration, which the file next to this one holds."""
    return json.loads(Path(__file__).with_name("ds_config.json").read_text())


def make_optimizer(
    model: torch.nn.Module, config: dict[str, Any], lr: float
) -> torch.optim.Optimizer:
    """Return AdamW, which runs on the host's cores where its states are in the host's memory."""
    if "offload_optimizer" in config["zero_optimization"]:
        return DeepSpeedCPUAdam(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)


def run(
    settings: SimpleNamespace,
    config: dict[str, Any],
    arguments: argparse.Namespace,
    device: torch.device,
) -> list[float]:
    """Train in the process group that exists, and return the losses."""
    deepspeed.init_distributed(auto_mpi_discovery=False)
    torch.manual_seed(0)
    shards_weights = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=shards_weights):
        model = GPT(settings, reentrant=True)
    optimizer = make_optimizer(model, config, arguments.lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train_step(texts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for text in texts:
            loss = mean_loss(engine(text[:, :-1]), text[:, 1:])
            engine.backward(loss)
            engine.step()  # DeepSpeed updates the weights in the last micro-step.
            total += loss.detach() / len(texts)
        return total

    return train(settings, arguments, device, dist.get_rank(), dist.get_world_size(), train_step)


if __name__ == "__main__":
    given = parse_arguments("Train a GPT with DeepSpeed.")
    with joined() as own_device:
        run(load_settings(), load_config(), given, own_device)
