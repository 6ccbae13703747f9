"""What all versions of torchtitan have in common: what they train, and names of their values."""

from __future__ import annotations

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import N_STEPS
from axonn_tune.spec.layout import CONTEXT, EXPERT, PIPELINE, TENSOR
from axonn_tune.spec.model import RECOMPUTES
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.pipeline import cut_layers
from axonn_tune.strategies.zero.zero import Zero

PROGRAM = ("python", "-m", "torchtitan.train")
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_DEGREES = {
    "shard": "data_parallel_shard_degree",
    "replica": "data_parallel_replicate_degree",
    TENSOR: "tensor_parallel_degree",
    CONTEXT: "context_parallel_degree",
    EXPERT: "expert_parallel_degree",
}


def require_trained(prediction: Prediction, context_kind: str) -> None:
    """Raise InputError if torchtitan does not train like this, whatever the model.

    `context_kind` is how its ranks share sequences.
    """
    strategy, job = prediction.scenario.strategy, prediction.scenario.job
    is_shared = isinstance(strategy, Zero) and prediction.layout.size(CONTEXT) > 1
    kind = strategy.context_kind if isinstance(strategy, Zero) and is_shared else context_kind
    for what, value, allowed in (
        ("dtype", job.dtype, tuple(_DTYPES)),
        ("recompute", prediction.configuration.recompute, RECOMPUTES),
        ("attention", job.attention, ("flash",)),
        ("context_kind", kind, (context_kind,)),
    ):
        if value not in allowed:
            raise InputError(
                f"{what} is '{value}'; allowed with --framework torchtitan: {', '.join(allowed)}"
            )
    if job.dropout:
        raise InputError("--dropout: torchtitan's models have no dropout; leave it out")
    if strategy.engine.zero.reduces_once:
        raise InputError(
            "torchtitan reduces gradients in every micro-step; leave out --reduces-once, or take "
            "--framework fsdp2"
        )
    if sends_beside_products(prediction) and not compiles(prediction):
        raise InputError(
            "--overlaps-tensor: torchtitan's compiler does it, and engine "
            f"{strategy.engine.name} runs eagerly; allowed: an engine that compiles"
        )


def training(prediction: Prediction) -> dict[str, int | str]:
    """Return the values of the section training that do not depend on how a batch is counted."""
    dtype = _DTYPES[prediction.scenario.job.dtype]
    return {"steps": N_STEPS, "mixed_precision_param": dtype}


def parallelism(prediction: Prediction) -> dict[str, int | str]:
    """Return the values of the section parallelism that do not depend on how a batch is counted."""
    degrees = {name: prediction.layout.size(axis) for axis, name in _DEGREES.items()}
    return {**degrees, **_stages(prediction)}


def n_microbatches(prediction: Prediction) -> int:
    """Return how many micro-batches go through a rank's model, or its pipeline, at once."""
    return prediction.n_microsteps if prediction.layout.size(PIPELINE) > 1 else 1


def sends_beside_products(prediction: Prediction) -> bool:
    """Return whether tokens travel within the tensor group beside its products."""
    strategy = prediction.scenario.strategy
    overlaps = isinstance(strategy, Zero) and strategy.overlaps_tensor
    return overlaps and prediction.layout.size(TENSOR) > 1


def compiles(prediction: Prediction) -> bool:
    """Return whether the model and the loss go through torch.compile."""
    return not prediction.scenario.strategy.engine.zero.runs_eagerly


def _stages(prediction: Prediction) -> dict[str, int | str]:
    """Return what cuts a model into the stages of a pipeline.

    torchtitan counts the embedding and the head as layers unless it is told not to
    (distributed/pipeline_parallel.py: generate_llm_fqn_per_model_part in 0.2.2, later with _).
    """
    n_stages = prediction.layout.size(PIPELINE)
    if n_stages == 1:
        return {}
    configuration, n_layers = prediction.configuration, prediction.scenario.model.n_layers
    n_chunks = n_stages * configuration.n_virtual
    n_of_ends = int(n_layers % n_chunks > 0)
    return {
        "pipeline_parallel_degree": n_stages,
        "pipeline_parallel_schedule": "Interleaved1F1B" if configuration.n_virtual > 1 else "1F1B",
        "pipeline_parallel_layers_per_stage": max(cut_layers(n_layers, n_chunks)),
        "pipeline_parallel_first_stage_less_layers": n_of_ends,
        "pipeline_parallel_last_stage_less_layers": n_of_ends,
    }
