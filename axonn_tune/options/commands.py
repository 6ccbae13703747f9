"""The options of each command and of the Python functions, by name in order."""

from __future__ import annotations

from axonn_tune.options.declaration import Option, declared
from axonn_tune.options.groups import (
    BatchOptions,
    CalibrationOptions,
    ConfigurationsOptions,
    ExecutionOptions,
    LayoutOptions,
    ProfileOptions,
    RankOptions,
    RunsOptions,
    SearchOptions,
    SubjectOptions,
    SwitchOptions,
)
from axonn_tune.spec.layout import PAPER_ORDER

SEARCH = declared(SubjectOptions, SearchOptions)
CALIBRATION = declared(ProfileOptions, CalibrationOptions)

# A run and a validation execute a step: their defaults are a run's, not a search's.
_NOT_EXECUTED = ("global_batch_tokens", "within", "precision", "gx", "gy", "gz", "gdata", "fix")
_AT_HAND = "the ranks or GPUs at hand"
_DTYPE = Option("Number type: bf16 or fp32.", None, "bf16 on a GPU, fp32 on a CPU")
_MICRO_BATCH = "Number of sequences that a rank takes at once."
_GLOBAL_BATCH = "Number of sequences per step."
_STRATEGY = Option(
    "Strategy: axonn, or through torch zero3 (FSDP2), hsdp (with replicas) or megatron-tp.",
    None,
    "that of --engine, or axonn",
)
_ENGINE = Option(
    "Released engine that trains instead, and is predicted: axonn, deepspeed (with zero3) or "
    "megatron-core (with megatron).",
    None,
    "the bundled runtime, or torch",
)
_NO_SWITCHES = tuple(name for name in declared(SwitchOptions) if name not in ("max_tp", "engine"))

RUN = declared(
    SubjectOptions,
    BatchOptions,
    ExecutionOptions,
    SwitchOptions,
    LayoutOptions,
    RankOptions,
    changed={
        "gpus": Option("Number of ranks that --suggest plans for.", None, _AT_HAND),
        "machine": Option("Profile of this machine, for predictions and --suggest."),
        "global_batch": Option(_GLOBAL_BATCH, None, "one micro-batch per rank of Z and data"),
        "micro_batch": Option(
            _MICRO_BATCH, None, "1; the best where --machine and --global-batch are given"
        ),
        "dtype": _DTYPE,
        "recompute": Option(
            "Recomputation: none, selective, full, or auto, the fastest that fits --machine.",
            None,
            "none",
        ),
        "order": Option("Rank order, fastest varying axis first.", "xyzd"),
        "strategy": _STRATEGY,
        "engine": _ENGINE,
    },
    without=(*_NOT_EXECUTED, *_NO_SWITCHES, "max_tp"),
)

VALIDATION = declared(
    RunsOptions,
    ConfigurationsOptions,
    SubjectOptions,
    BatchOptions,
    ExecutionOptions,
    SwitchOptions,
    LayoutOptions,
    RankOptions,
    changed={
        "gpus": Option("Number of ranks.", None, _AT_HAND),
        "machine": Option("The calibrated profile of this machine."),
        "global_batch": Option(_GLOBAL_BATCH, None, "one per rank"),
        "micro_batch": Option(_MICRO_BATCH, None, "the best"),
        "dtype": _DTYPE,
        "order": Option("Rank order, fastest varying axis first; 'all' tries all.", "xyzd"),
        "strategy": _STRATEGY,
        "engine": _ENGINE,
    },
    without=(*_NOT_EXECUTED, *_NO_SWITCHES),
)

# A rehearsal runs what the runtime can run of a search's layouts; nothing is timed in it.
REHEARSAL = declared(
    SubjectOptions,
    BatchOptions,
    ExecutionOptions,
    LayoutOptions,
    changed={
        "order": Option("Rank order, fastest varying axis first.", PAPER_ORDER),
        "recompute": Option(
            "Recomputation: none, selective, full, or auto, the fastest that fits.", "auto"
        ),
        "strategy": Option(
            "Strategy: axonn, through torch zero3 (FSDP2), hsdp (with replicas) or megatron-tp, or "
            "megatron with --engine megatron-core.",
            None,
            "that of --engine, or axonn",
        ),
    },
    without=("within", "precision", "kernel_tuning", "gx", "gy", "gz", "gdata", "fix"),
) | {
    "engine": (
        str | None,
        Option(
            "Engine: bundled, fsdp2-eager, fsdp2 or megatron-core.",
            None,
            "what is run: bundled or fsdp2-eager",
        ),
    )
}
