"""The configuration in Python by which torchtitan trains what settings.json next to it says.

Start it with ``torchtitan.train --module torchtitan_job --config job``. Options of torchtitan's
own behind that, such as ``--hf_assets_path``, take precedence. Both its release 0.3.0, which counts
a batch in sequences, and its main branch of August 2026, which counts tokens, read it.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

POLICIES = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}


def job() -> Trainer.Config:
    """Return the configuration, which takes the optimizer and the data from the model's recipe."""
    settings = json.loads(Path(__file__).with_name("settings.json").read_text())
    models = f"torchtitan.models.{settings['module']}"
    recipe = importlib.import_module(f"{models}.config_registry")
    config = getattr(recipe, settings["recipe"])()
    # Recipes may convert the model to 8 bits, compile a part of it only, and write profiles.
    config.model_spec = importlib.import_module(models).model_registry(settings["flavor"])
    config.compile = CompileConfig(**settings["compile"])
    config.profiler.enable_profiling = False
    policy = POLICIES[settings["activation_checkpoint"]]
    config.activation_checkpoint = None if policy is None else policy()
    of_training, of_pipeline = batches(**settings["batch"])
    config.training = TrainingConfig(**settings["training"], **of_training)
    config.parallelism = ParallelismConfig(**settings["parallelism"], **of_pipeline)
    return config


def batches(
    seq_len: int, micro_batch: int, n_microbatches: int, global_batch: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the batch as this torchtitan counts it, for training and for a pipeline.

    Parameters
    ----------
    micro_batch, global_batch : int
        Sequences that a rank takes at once, and sequences of a step.
    n_microbatches : int
        Micro-batches that go through a rank's pipeline at once; 1 without stages.
    """
    if "seq_len" in {field.name for field in fields(TrainingConfig)}:
        of_training = {
            "seq_len": seq_len,
            "local_batch_size": n_microbatches * micro_batch,
            "global_batch_size": global_batch,
        }
        return of_training, {"pipeline_parallel_microbatch_size": micro_batch}
    of_training = {
        "max_context_length": seq_len,
        "num_tokens_per_microbatch_per_dp_rank": micro_batch * seq_len,
        "num_tokens_per_train_step": global_batch * seq_len,
    }
    return of_training, {"num_pp_microbatches": n_microbatches}
