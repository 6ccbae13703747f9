"""torchtitan 0.2.2: flags of its training program (73a0e697, config/job_config.py)."""

from __future__ import annotations

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import Start
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
from axonn_tune.spec.layout import CONTEXT, EXPERT, PIPELINE
from axonn_tune.spec.programs import RING
from axonn_tune.step.prediction import Prediction

# Engines with the facts of torchtitan before 0.3.0, which had flags like these.
ENGINES = ("torchtitan-2024-eager", "torchtitan-2024", "torchtitan-2025")
# Their ranks share no sequences (73a0e697, models/deepseek_v3/model/args.py, update_from_config).
_WITH_FLEX_ATTENTION = ("deepseek_v3",)
_TO_FILL_IN = (
    "Activate an environment in which python finds torchtitan 0.2.2. Later ones refuse these "
    "flags: for them take --engine torchtitan.",
    "It trains on c4_test with a tokenizer for tests: add --training.dataset and "
    "--model.hf_assets_path.",
)


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how torchtitan 0.2.2 is started; `train` is a program that takes its place."""
    program = PROGRAM if train is None else ("python", train)
    return Start({}, (program, *(tuple(line.split()) for line in flags(prediction))), _TO_FILL_IN)


def flags(prediction: Prediction) -> list[str]:
    """Return the flags with their values, one per line.

    Raises
    ------
    InputError
        torchtitan 0.2.2 does not build the model, or does not run it like this.
    """
    flavor = flavor_of(prediction.scenario.model, "0.2.2", FLAVORS)
    # The name of torch's context_parallel here, whichever context_parallel_rotate_method it has.
    require_trained(prediction, RING)
    n_context = prediction.layout.size(CONTEXT)
    if flavor.module in _WITH_FLEX_ATTENTION and n_context > 1:
        raise InputError(
            f"layout has context={n_context}; allowed with torchtitan 0.2.2's {flavor.module}: "
            "context=1, or --engine torchtitan"
        )
    configuration, job = prediction.configuration, prediction.scenario.job
    of_training = {
        **training(prediction),
        "seq_len": job.seq_len,
        "local_batch_size": n_microbatches(prediction) * configuration.micro_batch,
        "global_batch_size": job.global_batch,
    }
    of_layout = parallelism(prediction)
    if prediction.layout.size(EXPERT) > 1:
        # Experts are whole within a tensor group.
        of_layout["expert_tensor_parallel_degree"] = 1
    if prediction.layout.size(PIPELINE) > 1:
        of_layout["pipeline_parallel_microbatch_size"] = configuration.micro_batch
    lines = [
        f"--model.name {flavor.module}",
        f"--model.flavor {flavor.name}",
        *(f"--training.{name} {value}" for name, value in of_training.items()),
        *(f"--parallelism.{name} {value}" for name, value in of_layout.items()),
        f"--activation_checkpoint.mode {configuration.recompute}",
    ]
    if configuration.recompute == "selective":
        lines.append("--activation_checkpoint.selective_ac_option op")
    if sends_beside_products(prediction):
        lines.append("--parallelism.enable_async_tensor_parallel")
    if job.offloads_optimizer:
        lines.append("--training.enable_cpu_offload")
    return [*lines, "--compile.enable"] if compiles(prediction) else lines
