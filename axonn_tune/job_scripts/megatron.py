"""Megatron-LM: the flags of ``pretrain_gpt.py``.

Names as in NVIDIA/Megatron-LM, megatron/training/arguments.py and the configurations of Megatron
Core from which it builds its arguments (core_v0.19.0, and d98e8a64 of August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import N_STEPS, Start
from axonn_tune.job_scripts.megatron_model import model_flags
from axonn_tune.job_scripts.megatron_rules import require_accepted, require_distributed_optimizer
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import MUON, Job
from axonn_tune.spec.layout import EXPERT, PIPELINE
from axonn_tune.spec.plan import FLASH_ATTENTION
from axonn_tune.spec.programs import ALL_GATHER, RING, ULYSSES, ULYSSES_RING
from axonn_tune.spec.recomputation import is_partial, recomputed_modules
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.context import context_axes
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.megatron.muon_matrices import NEWTON_SCHULZ_STEPS
from axonn_tune.strategies.pipeline import cut_layers
from axonn_tune.strategies.shapes import FP32_BYTES

PROGRAM = "Megatron-LM/pretrain_gpt.py"
# validate_args asserts one with tensor or context parallelism on GPUs before Blackwell, so that
# kernels run in the order in which they were issued. Elsewhere transfers between stages run beside
# kernels with many (Megatron-Bridge v0.4.0, scripts/performance/perf_plugins.py). Exchanges of
# experts hardly run beside kernels then: on 64 H100, overlap made 14 layers of DeepSeek-V3 3.7 %
# faster with one connection, and 7.8 % with 32 (pull request 6311), which validate_args allows
# where exchanges are overlapped.
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_FEW, _MANY = "1", "32"
# validate_args asserts it with Transformer Engine 2.10 or newer, which would move weights, too.
_OFFLOADS_INPUTS_ALONE = {"NVTE_CPU_OFFLOAD_V1": "1"}
# The names of Transformer Engine, which Megatron-Core passes on.
_CONTEXT_KINDS = {RING: "p2p", ALL_GATHER: "all_gather", ULYSSES: "a2a"}
# Transformer Engine chooses cuDNN by itself where that is faster.
_ATTENTION_BACKENDS = {
    FLASH_ATTENTION: "flash",
    "cudnn": "auto",
    "cudnn-9.13": "auto",
    "unfused": "unfused",
}

TRAINING_FLAGS = (
    "--mock-data",
    f"--train-iters {N_STEPS}",
    "--lr 1e-4",
    "--min-lr 1e-5",
    "--lr-decay-style cosine",
    "--clip-grad 1.0",
    "--eval-iters 0",
    "--log-interval 1",
    "--log-throughput",
    "--distributed-backend nccl",
    "--cross-entropy-loss-fusion",
)


# Transformer Engine's own formats of each recipe: gradients have e5m2 where a tensor has one scale.
_PRECISION_FLAGS = {
    "bf16": (),
    "fp8-delayed": ("--fp8-format hybrid", "--fp8-recipe delayed"),
    "fp8-current": ("--fp8-format hybrid", "--fp8-recipe tensorwise"),
    "fp8-block": ("--fp8-format e4m3", "--fp8-recipe blockwise"),
    "mxfp8": ("--fp8-format e4m3", "--fp8-recipe mxfp8"),
    "nvfp4": ("--fp4-format e2m1", "--fp4-recipe nvfp4"),
}


# Megatron-FSDP as ZeRO-2, which asserts its own format of checkpoints.
_SHARDED_GRADIENTS = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads",
    "--ckpt-format fsdp_dtensor",
)


# A graph of a whole step, within which nobody may read a loss.
_GRAPH = ("--cuda-graph-impl full_iteration", "--no-check-for-nan-in-loss-and-grad")


# With --overlap-grad-reduce, validate_args asserts Transformer Engine 2.8 for it.
_DELAYED = "--delay-wgrad-compute"

# Modules that Megatron-Core 0.16 (TransformerConfig) refuses with delayed scaling.
_NOT_DELAYED = {"layernorm", "moe_act"}


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how Megatron-LM is started; `train` is the path of its pretrain_gpt.py."""
    strategy = prediction.scenario.strategy
    assert isinstance(strategy, Megatron3D)
    return start_of(prediction, train, flags(prediction), _environment(prediction, strategy))


def _environment(prediction: Prediction, strategy: Megatron3D) -> dict[str, str]:
    """Return the variables that validate_args asserts.

    It asserts one connection of a CUDA graph, too, whose kernels do not wait in one queue.
    """
    environment = {}
    if prediction.scenario.job.offload_modules:
        environment.update(_OFFLOADS_INPUTS_ALONE)
    # Megatron-FSDP asserts that the variable is not set.
    if not strategy.shards_gradients:
        n_split = prod(prediction.layout.size(axis) for axis in strategy.split_axes)
        one_queue = prediction.scenario.machine.gpu.one_queue
        has_one = strategy.has_one_connection(one_queue, n_split)
        environment[_CONNECTIONS] = _FEW if has_one else _MANY
    return environment


def start_of(
    prediction: Prediction,
    train: str | None,
    lines: Sequence[str],
    environment: Mapping[str, str],
) -> Start:
    """Return how Megatron-LM is started with some lines of flags, and variables of each rank."""
    program = train or PROGRAM
    command = (("python", program), *(tuple(line.split()) for line in lines))
    to_fill_in: tuple[str, ...] = (
        "Activate an environment in which python finds what Megatron-LM needs.",
        "Take Megatron-LM core_v0.19.0 or newer, which knows all of these flags.",
        f"Clone it so that {program} exists (--train names another path).",
        "It trains on mock data; replace --mock-data by --data-path, and the tokenizer by yours.",
    )
    if prediction.scenario.job.optimizer == MUON:
        to_fill_in += ("Install NVIDIA-NeMo/Emerging-Optimizers, which has Muon.",)
    if any(_DELAYED in line for line in lines):
        to_fill_in += (
            "Install Transformer Engine 2.8 or newer, which delays the gradients of weights while "
            "others are reduced.",
        )
    return Start({}, command, to_fill_in, environment, _log_remarks(prediction))


def _log_remarks(prediction: Prediction) -> tuple[str, ...]:
    """Say how many TFLOP/s the log shows for the predicted step, if it counts as we do.

    It counts the causal half of attention's scores, and windows as if they were not there
    (num_floating_point_operations of core_v0.19.0, megatron/training/training.py).
    """
    if any(block.window for block in prediction.scenario.model.blocks):
        return ()
    return (
        "Megatron-LM's log counts the causal half of attention only: for this step it shows about "
        f"{prediction.causal_tflops_per_gpu:.1f} TFLOP/s per GPU.",
    )


def flags(prediction: Prediction) -> list[str]:
    """Return the flags with their values, one per line; no name or text is among them."""
    scenario = prediction.scenario
    configuration = prediction.configuration
    model = scenario.model
    job = scenario.job
    strategy = scenario.strategy
    sizes = prediction.layout.sizes
    assert isinstance(strategy, Megatron3D)
    if strategy.schedule != ONE_F_ONE_B:
        raise InputError(
            f"schedule is '{strategy.schedule}'; allowed for Megatron-Core: {ONE_F_ONE_B}"
        )
    require_accepted(prediction, strategy)
    lines = [
        *model_flags(model, job.seq_len),
        *TRAINING_FLAGS,
        *([f"--mtp-num-layers {job.mtp_modules}"] if job.mtp_modules else []),
        f"--tensor-model-parallel-size {sizes['tensor']}",
        f"--pipeline-model-parallel-size {sizes[PIPELINE]}",
        *_context_flags(prediction, strategy),
        *_expert_flags(prediction, strategy),
        f"--micro-batch-size {configuration.micro_batch}",
        f"--global-batch-size {job.global_batch}",
    ]
    if strategy.stage_layout and sizes[PIPELINE] > 1:
        lines.append(f"--pipeline-model-parallel-layout {''.join(strategy.stage_layout.split())}")
    else:
        lines += _stage_flags(scenario, sizes[PIPELINE], configuration.n_virtual)
    if strategy.sequence_parallel and sizes["tensor"] > 1:
        lines.append("--sequence-parallel")
        if strategy.overlaps_tensor:
            lines.append("--tp-comm-overlap")
    lines += [*_optimizer_flags(job), *_replica_flags(strategy)]
    lines += _memory_flags(job, strategy)
    if not strategy.fused_accumulation:
        lines.append("--no-gradient-accumulation-fusion")
    lines += recompute_flags(configuration.recompute, job.precision)
    lines += [*type_flags(job), *_gradient_flags(job, strategy)]
    if strategy.stores_low_weights(job):
        lines.append("--fp4-param-gather" if job.precision == "nvfp4" else "--fp8-param-gather")
        if not strategy.gathers_low_weights(job):
            lines.append("--reuse-grad-buf-for-mxfp8-param-ag")
    if strategy.engine.megatron.has_graph:
        lines += _GRAPH
    return [*lines, *attention_flags(job, strategy.engine)]


def type_flags(job: Job) -> tuple[str, ...]:
    """Return the flags of the job's number type and of the recipe of its low products."""
    of_dtype = () if job.dtype == "fp32" else (f"--{job.dtype}",)
    return (*of_dtype, *_PRECISION_FLAGS[job.precision])


def _gradient_flags(job: Job, strategy: Megatron3D) -> tuple[str, ...]:
    """Return the flag of the gradients' type, where --bf16 or --fp16 implies the other one."""
    are_in_fp32 = strategy.gradient_bytes(job) == FP32_BYTES
    if job.dtype == "fp16" and are_in_fp32:
        return ("--accumulate-allreduce-grads-in-fp32",)
    if job.dtype == "bf16" and not are_in_fp32:
        return ("--grad-reduce-in-bf16",)
    return ()


def attention_flags(job: Job, engine: Engine) -> tuple[str, ...]:
    """Return the flags of the kernels of attention, and of dropout."""
    kind = engine.attention_library if job.attention == "flash" else job.attention
    rate = 0.1 if job.dropout else 0.0
    return (
        f"--attention-backend {_ATTENTION_BACKENDS[kind]}",
        f"--attention-dropout {rate}",
        f"--hidden-dropout {rate}",
    )


def _context_flags(prediction: Prediction, strategy: Megatron3D) -> tuple[str, ...]:
    """Return the flags of the ranks that share a sequence, and of what these exchange.

    Where two kinds work together, a group of one rank leaves the other kind alone.
    """
    axes = context_axes(strategy.context_kind)
    sizes = [prediction.layout.size(axis) for axis in axes]
    n_ranks = f"--context-parallel-size {prod(sizes)}"
    if prod(sizes) == 1:
        return (n_ranks,)
    if strategy.context_kind != ULYSSES_RING:
        return (n_ranks, f"--cp-comm-type {_CONTEXT_KINDS[strategy.context_kind]}")
    if min(sizes) == 1:
        kind = ULYSSES if sizes[1] == 1 else RING
        return (n_ranks, f"--cp-comm-type {_CONTEXT_KINDS[kind]}")
    levels = " ".join(map(str, sizes))
    return (n_ranks, "--cp-comm-type a2a+p2p", f"--hierarchical-context-parallel-sizes {levels}")


def recompute_flags(recompute: str, precision: str) -> tuple[str, ...]:
    """Return the flags of what the backward pass recomputes."""
    if recompute == "full":
        uniform = "--recompute-method uniform --recompute-num-layers 1"
        return (f"--recompute-granularity full {uniform}",)
    if is_partial(recompute):
        n_layers = recompute.removeprefix("full:")
        block = f"--recompute-method block --recompute-num-layers {n_layers}"
        return (f"--recompute-granularity full {block}",)
    if recompute == "selective":
        return ("--recompute-granularity selective",)
    modules = recomputed_modules(recompute)
    if precision == "fp8-delayed" and modules & _NOT_DELAYED:
        raise InputError(
            f"recompute is '{recompute}'; Megatron-Core does not recompute moe_act or layernorm "
            "with --precision fp8-delayed; allowed: other modules or precisions"
        )
    if not modules:
        return ()
    return ("--recompute-granularity selective", f"--recompute-modules {' '.join(sorted(modules))}")


def _expert_flags(prediction: Prediction, strategy: Megatron3D) -> tuple[str, ...]:
    """Return the flags that spread experts over ranks and exchange tokens, as predicted."""
    if not strategy.has_experts:
        return ()
    layout = prediction.layout
    tensor = layout.size("tensor") if strategy.splits_experts else 1
    return (
        f"--expert-model-parallel-size {layout.size(EXPERT)}",
        f"--expert-tensor-parallel-size {tensor}",
        *_dispatcher_flags(strategy, prediction.scenario.job),
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-dtype fp32",
    )


def _dispatcher_flags(strategy: Megatron3D, job: Job) -> tuple[str, ...]:
    """Return the flags that say how tokens travel to and from experts.

    Copies of tokens that came once are padded for low products as they are made.
    """
    flags: tuple[str, ...] = ("--moe-token-dispatcher-type alltoall",)
    if strategy.sends_once:
        flags = ("--moe-token-dispatcher-type flex", "--moe-flex-dispatcher-backend deepep")
        if job.recipe is not None:
            flags = (*flags, "--moe-router-padding-for-quantization")
    if strategy.overlaps_experts:
        flags = (*flags, "--overlap-moe-expert-parallel-comm", _DELAYED)
    return flags


def _optimizer_flags(job: Job) -> tuple[str, ...]:
    """Return the flags of another optimizer than Adam, as predicted.

    The usual mode is blockwise in core_v0.19.0, and duplicated at d98e8a64.
    """
    if job.optimizer != MUON:
        return ()
    mode = f"--muon-tp-mode {job.muon_mode}"
    return ("--optimizer muon", f"--muon-num-ns-steps {NEWTON_SCHULZ_STEPS}", mode)


def _replica_flags(strategy: Megatron3D) -> list[str]:
    """Return the flags of what replicas share, and of when they exchange it."""
    lines = []
    if strategy.distributed_optimizer:
        lines.append("--use-distributed-optimizer")
    if strategy.shards_gradients:
        lines += _SHARDED_GRADIENTS
    if strategy.overlap_grad_reduce:
        lines.append("--overlap-grad-reduce")
    if strategy.overlap_grad_reduce and strategy.distributed_optimizer:
        lines.append("--overlap-param-gather")
    return lines


def _memory_flags(job: Job, strategy: Megatron3D) -> list[str]:
    """Return the flags of what is in the host's memory, and of the type of moments."""
    lines: list[str] = []
    if job.offloads_optimizer:
        lines += _offload_flags(strategy)
    if job.offload_modules:
        lines.append("--fine-grained-activation-offloading")
        lines.append(f"--offload-modules {job.offload_modules.replace(',', ' ')}")
    if job.moments != "fp32":
        require_distributed_optimizer(strategy, "has other moments than fp32", "--moments")
        lines.append("--use-precision-aware-optimizer")
        lines += [f"--exp-avg-dtype {job.moments}", f"--exp-avg-sq-dtype {job.moments}"]
    return lines


def _stage_flags(scenario: Scenario, n_stages: int, n_virtual: int) -> tuple[str, ...]:
    """Return the flags that cut layers into virtual stages.

    A layout states what the other flags cannot: a last stage that is shorter than all others.
    """
    n_layers = scenario.model.n_layers
    n_chunks = n_stages * n_virtual
    interleaved = (f"--num-virtual-stages-per-pipeline-rank {n_virtual}",) if n_virtual > 1 else ()
    if n_layers % n_chunks == 0:
        return interleaved
    if (n_layers + 2) % n_chunks == 0:
        return (
            *interleaved,
            "--account-for-embedding-in-pipeline-split",
            "--account-for-loss-in-pipeline-split",
        )
    first, *middle, last = ("t" * layers for layers in cut_layers(n_layers, n_chunks))
    last += "m" * scenario.job.mtp_modules
    layout = "|".join(("E" + first, *middle, last + "L"))
    return (f"--pipeline-model-parallel-layout {layout}",)


def _offload_flags(strategy: Megatron3D) -> tuple[str, ...]:
    """Return the flags of offload; copies run one after another, as predicted."""
    require_distributed_optimizer(strategy, "offloads the optimizer states", "--offload")
    return (
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction 1.0",
        "--use-precision-aware-optimizer",
    )
