"""What Megatron-LM refuses although it can be predicted: each rule with where it is asserted.

Read in NVIDIA/Megatron-LM at d98e8a64; core_v0.16.1 and core_v0.19.0 assert the same.
"""

from __future__ import annotations

from axonn_tune.errors import InputError
from axonn_tune.spec.job import ADAMW, ADEMAMIX, MUON, Job
from axonn_tune.spec.layout import EXPERT, PIPELINE
from axonn_tune.spec.recomputation import recomputed_modules
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

# --fp4-param-gather is not asked for.
_LOW_WEIGHTS_UPDATED_ON_HOST = ("fp8-delayed", "nvfp4")

_WITH_DROPOUT = {"core_attn", "mlp", "moe"}
_WITHIN_EXPERTS = {"expert_fc1", "moe_act"}


def require_accepted(prediction: Prediction, strategy: Megatron3D) -> None:
    """Raise InputError if Megatron-LM would end before the first step, and say what it accepts."""
    scenario = prediction.scenario
    job = scenario.job
    if job.optimizer == ADEMAMIX:
        raise InputError(
            f"--optimizer {ADEMAMIX}: NVIDIA's Megatron-LM has no such optimizer, only the fork "
            f"swiss-ai/Megatron-LM has, which needs other flags; allowed: {ADAMW}, {MUON}"
        )
    if strategy.has_experts and strategy.overlaps_experts:
        _require_overlap(prediction)
    model = scenario.model
    if job.mtp_modules and (model.position == "learned" or model.scaled_rotary):
        raise InputError(
            f"--mtp-modules {job.mtp_modules}: Megatron-LM predicts several tokens with rope or "
            f"without positions only, and {model.name} has others; allowed: 0"
        )
    within = _WITHIN_EXPERTS & set(job.offload_modules.split(","))
    if within and "moe" in recomputed_modules(prediction.configuration.recompute):
        raise InputError(
            f"--offload-modules {job.offload_modules}: Megatron-Core offloads nothing of experts "
            f"that are recomputed as a whole; allowed: without {', '.join(sorted(within))}, or "
            "without --recompute selective:moe"
        )
    may_store_low = job.precision in _LOW_WEIGHTS_UPDATED_ON_HOST
    if job.offloads_optimizer and strategy.stores_low_weights(job) and not may_store_low:
        raise InputError(
            "--offload optimizer: Megatron-Core updates weights in 8 bits on the host with "
            "--precision fp8-delayed only; allowed: --no-low-weights"
        )
    if strategy.engine.megatron.has_graph:
        _require_captured(job, prediction.configuration.recompute)


def _require_captured(job: Job, recompute: str) -> None:
    """Raise InputError if a CUDA graph of a whole step does not hold the step."""
    if job.offload_modules:
        raise InputError(
            f"--offload-modules {job.offload_modules}: Megatron-Core offloads no modules in a CUDA "
            "graph of a whole step without further options; allowed: --engine megatron-core"
        )
    modules = {"core_attn"} if recompute == "selective" else recomputed_modules(recompute)
    if job.dropout and modules & _WITH_DROPOUT:
        raise InputError(
            "--dropout: Megatron-Core draws no random numbers again in a CUDA graph, and "
            f"recompute is {recompute}; allowed: none, full, or --engine megatron-core"
        )


def _require_overlap(prediction: Prediction) -> None:
    """Raise InputError if exchanges of experts do not overlap (TransformerConfig)."""
    job = prediction.scenario.job
    if job.dtype == "fp32":
        raise InputError(
            "--overlaps-experts: Megatron-Core does not overlap in fp32; allowed: --dtype bf16 or "
            "fp16, or --no-overlaps-experts"
        )
    if job.mtp_modules > 1:
        raise InputError(
            f"--overlaps-experts: Megatron-Core does not overlap with --mtp-modules "
            f"{job.mtp_modules}; allowed: 0, 1, or --no-overlaps-experts"
        )
    recompute = prediction.configuration.recompute
    if recompute.startswith("full") or "moe" in recomputed_modules(recompute):
        raise InputError(
            f"--overlaps-experts: Megatron-Core does not overlap with recompute {recompute}; "
            "allowed: none, selective, modules but moe"
        )
    if prediction.layout.size(EXPERT) == 1:
        raise InputError(
            "--overlaps-experts: Megatron-Core overlaps exchanges between ranks with other experts "
            f"only, and {prediction.layout} has none; allowed: --no-overlaps-experts, or a layout "
            "with expert=2 or more"
        )
    if prediction.layout.size(PIPELINE) > 1 and prediction.configuration.n_virtual == 1:
        raise InputError(
            "--overlaps-experts: Megatron-Core does not overlap in a pipeline without virtual "
            "stages; allowed: --virtual-stages 2 or more, or a layout with pipeline=1"
        )


def require_distributed_optimizer(strategy: Megatron3D, what: str, option: str) -> None:
    """Raise InputError without the distributed optimizer.

    OptimizerConfig asserts it with a precision-aware one, which offload and other types of moments
    need.
    """
    if not strategy.distributed_optimizer:
        raise InputError(
            f"--no-distributed-optimizer: Megatron-Core {what} only with its distributed "
            f"optimizer; leave out --no-distributed-optimizer or {option}"
        )
