"""torchtitan: flags of its own training program, for the models that it builds.

The flags are those of its release 0.2.2 (73a0e697, config/job_config.py), which names a model and a
flavor of it. Later commits (from 9810191b on) refuse --model.name: a run is named by ``--module``
and ``--config`` there.
"""

from __future__ import annotations

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import N_STEPS, Start
from axonn_tune.spec.layout import CONTEXT, EXPERT, PIPELINE, TENSOR
from axonn_tune.spec.model import RECOMPUTES
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.pipeline import cut_layers
from axonn_tune.strategies.zero import Zero

PROGRAM = ("python", "-m", "torchtitan.train")
# Name and flavor of each model in torchtitan (models/*/__init__.py at 73a0e697).
MODELS = {
    "deepseek-v3": ("deepseek_v3", "671B"),
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "llama4-scout": ("llama4", "17bx16e"),
    "llama4-maverick": ("llama4", "17bx128e"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_DEGREES = {
    "shard": "data_parallel_shard_degree",
    "replica": "data_parallel_replicate_degree",
    TENSOR: "tensor_parallel_degree",
    EXPERT: "expert_parallel_degree",
}
_TO_FILL_IN = (
    "Activate an environment in which python finds torchtitan 0.2.2: later ones refuse the flags.",
    "It trains on c4_test with a tokenizer for tests: add --training.dataset and "
    "--model.hf_assets_path.",
)


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how torchtitan is started; `train` is a program that takes its place."""
    program = PROGRAM if train is None else ("python", train)
    return Start({}, (program, *(tuple(line.split()) for line in flags(prediction))), _TO_FILL_IN)


def flags(prediction: Prediction) -> list[str]:
    """Return the flags with their values, one per line.

    Raises
    ------
    InputError
        torchtitan does not build the model, or does not run it like this.
    """
    scenario, configuration = prediction.scenario, prediction.configuration
    job, engine = scenario.job, scenario.strategy.engine
    for what, value, allowed in (
        ("model", scenario.model.name, MODELS),
        ("dtype", job.dtype, _DTYPES),
        ("recompute", configuration.recompute, RECOMPUTES),
        ("attention", job.attention, ("flash",)),
    ):
        if value not in allowed:
            raise InputError(
                f"{what} is '{value}'; allowed with --framework torchtitan: {', '.join(allowed)}"
            )
    if job.dropout:
        raise InputError("--dropout: torchtitan's models have no dropout; leave it out")
    if engine.zero.reduces_once:
        raise InputError(
            "torchtitan reduces gradients in every micro-step; leave out --reduces-once, or take "
            "--framework fsdp2"
        )
    name, flavor = MODELS[scenario.model.name]
    lines = [
        f"--model.name {name}",
        f"--model.flavor {flavor}",
        f"--training.steps {N_STEPS}",
        f"--training.seq_len {job.seq_len}",
        f"--training.local_batch_size {_local_batch(prediction)}",
        f"--training.global_batch_size {job.global_batch}",
        f"--training.mixed_precision_param {_DTYPES[job.dtype]}",
        *_degrees(prediction),
        *_stages(prediction),
        f"--activation_checkpoint.mode {configuration.recompute}",
    ]
    if configuration.recompute == "selective":
        lines.append("--activation_checkpoint.selective_ac_option op")
    if job.offloads_optimizer:
        lines.append("--training.enable_cpu_offload")
    return lines if engine.zero.runs_eagerly else [*lines, "--compile.enable"]


def _degrees(prediction: Prediction) -> list[str]:
    """Return a flag for each axis; experts are whole within a tensor group."""
    sizes = {axis: prediction.layout.size(axis) for axis in _DEGREES}
    lines = [f"--parallelism.{flag} {sizes[axis]}" for axis, flag in _DEGREES.items()]
    if sizes[EXPERT] > 1:
        lines.append("--parallelism.expert_tensor_parallel_degree 1")
    n_context = prediction.layout.size(CONTEXT)
    if n_context > 1:
        lines.append(f"--parallelism.context_parallel_degree {n_context}")
    strategy = prediction.scenario.strategy
    if isinstance(strategy, Zero) and strategy.overlaps_tensor and sizes[TENSOR] > 1:
        lines.append("--parallelism.enable_async_tensor_parallel")
    return lines


def _local_batch(prediction: Prediction) -> int:
    """Return the sequences that go through a rank's model, or its pipeline, at once."""
    n_at_once = prediction.n_microsteps if prediction.layout.size(PIPELINE) > 1 else 1
    return n_at_once * prediction.configuration.micro_batch


def _stages(prediction: Prediction) -> list[str]:
    """Return the flags of a pipeline.

    torchtitan counts the embedding and the head as layers unless it is told not to
    (distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part).
    """
    n_stages = prediction.layout.size(PIPELINE)
    if n_stages == 1:
        return []
    configuration, n_layers = prediction.configuration, prediction.scenario.model.n_layers
    n_chunks = n_stages * configuration.n_virtual
    n_of_ends = int(n_layers % n_chunks > 0)
    schedule = "Interleaved1F1B" if configuration.n_virtual > 1 else "1F1B"
    values = {
        "degree": n_stages,
        "schedule": schedule,
        "microbatch_size": configuration.micro_batch,
        "layers_per_stage": max(cut_layers(n_layers, n_chunks)),
        "first_stage_less_layers": n_of_ends,
        "last_stage_less_layers": n_of_ends,
    }
    return [f"--parallelism.pipeline_parallel_{name} {value}" for name, value in values.items()]
