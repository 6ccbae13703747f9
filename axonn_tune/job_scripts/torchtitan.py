"""torchtitan: a configuration in Python for its training program, for the models that it builds.

A run of its release 0.3.0 and of its main branch of August 2026 (b5bcd76c) is a function that
``--module`` and ``--config`` name. Flags are still read there, but cannot say all: its
Llama 3 405B trains in 8 bits, and its DeepSeek-V3 compiles the loss only. The engines of 2024
and 2025 are started by the flags of release 0.2.2.
"""

from __future__ import annotations

import json

from axonn_tune.errors import InputError
from axonn_tune.io.package_data import training_program
from axonn_tune.job_scripts import torchtitan_flags
from axonn_tune.job_scripts.framework import Start
from axonn_tune.job_scripts.settings import NAME as SETTINGS
from axonn_tune.job_scripts.torchtitan_common import (
    PROGRAM,
    compiles,
    n_microbatches,
    parallelism,
    require_trained,
    sends_beside_products,
    training,
)
from axonn_tune.job_scripts.torchtitan_models import FLAVORS, flavor_of
from axonn_tune.spec.layout import EXPERT, PIPELINE
from axonn_tune.spec.programs import ALL_GATHER
from axonn_tune.step.prediction import Prediction

CONFIGURATION = "torchtitan_job.py"
_FLAVORS = {preset: flavor for preset, flavor in FLAVORS.items() if flavor.recipe}
_RELEASES = "since 0.3.0"
_TO_FILL_IN = (
    "Activate an environment in which python finds torchtitan 0.3.0, or its main branch of August "
    "2026. For 0.2.2 take --engine torchtitan-2025.",
    "It trains on C4, which Hugging Face streams: add --hf_assets_path with the folder of the "
    f"tokenizer, and set config.dataloader in {CONFIGURATION} for other data.",
)


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how torchtitan is started; `train` is a program that takes its place."""
    if prediction.scenario.strategy.engine.name in torchtitan_flags.ENGINES:
        return torchtitan_flags.start(prediction, train)
    files = {
        CONFIGURATION: training_program(CONFIGURATION),
        SETTINGS: json.dumps(settings(prediction), indent=2) + "\n",
    }
    program = PROGRAM if train is None else ("python", train)
    named = ("--module", CONFIGURATION.removesuffix(".py"), "--config", "job")
    return Start(files, (program, named), _TO_FILL_IN)


def settings(prediction: Prediction) -> dict[str, object]:
    """Return what the configuration reads: its own choices, and values under torchtitan's names.

    Raises
    ------
    InputError
        torchtitan does not build the model, or does not run it like this.
    """
    configuration, job = prediction.configuration, prediction.scenario.job
    flavor = flavor_of(prediction.scenario.model, _RELEASES, _FLAVORS)
    require_trained(prediction, ALL_GATHER)
    if job.seq_len > flavor.longest:
        raise InputError(
            f"--seq-len {job.seq_len}; allowed with torchtitan {_RELEASES}'s "
            f"{flavor.module} {flavor.name}: at most {flavor.longest}"
        )
    return {
        "module": flavor.module,
        "flavor": flavor.name,
        "recipe": flavor.recipe,
        "batch": {
            "seq_len": job.seq_len,
            "micro_batch": configuration.micro_batch,
            "n_microbatches": n_microbatches(prediction),
            "global_batch": job.global_batch,
        },
        "training": {
            **training(prediction),
            "enable_cpu_offload": job.offloads_optimizer,
            "disable_cuda_graphs": not _is_graph(prediction),
        },
        "parallelism": parallelism(prediction),
        "activation_checkpoint": configuration.recompute,
        "compile": {
            "enable": compiles(prediction),
            "enable_async_tensor_parallel": sends_beside_products(prediction),
        },
    }


def _is_graph(prediction: Prediction) -> bool:
    """Return whether a CUDA graph can hold a micro-step.

    torchtitan refuses one with stages and with its usual exchange of tokens between experts
    (trainer.py, _validate_cuda_graphs). FSDP2 waits for gradients that go to the host's memory
    (torch 2.13, fully_shard/_fsdp_param_group.py, finalize_backward), which no graph holds.
    """
    layout = prediction.layout
    is_offloaded = prediction.scenario.job.offloads_optimizer
    return layout.size(PIPELINE) == layout.size(EXPERT) == 1 and not is_offloaded
