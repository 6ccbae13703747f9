"""The groups of options of searches, validations and calibrations, each declared in one place.

Annotations are not put off in this module, since `declared` reads them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypedDict

from axonn_tune.options.declaration import Option
from axonn_tune.spec.calibration import PARTS
from axonn_tune.spec.layout import PAPER_ORDER

if TYPE_CHECKING:
    from axonn_tune.spec.strategy import Strategy

    StrategyLike: TypeAlias = str | Strategy
else:
    # Help texts are printed without NumPy, which the protocol would import.
    StrategyLike = str


class SubjectOptions(TypedDict, total=False):
    """The options that name the subject of a search."""

    gpus: Annotated[int, Option("Number of GPUs (dies on MI250X).")]
    model: Annotated[str, Option("Model: a preset (80b), YAML file, or Hugging Face config.json.")]
    machine: Annotated[str, Option("Machine: a preset or a YAML file.", None, "perlmutter")]


class BatchOptions(TypedDict, total=False):
    """The options of batch sizes, precision and recomputation."""

    global_batch: Annotated[int | None, Option("Number of sequences per step.")]
    global_batch_tokens: Annotated[
        int | str | None,
        Option(
            "Number of tokens per step, such as 16777216, or 16M with --within.",
            None,
            "the nearest to 16777216, as AxoNN's weak scaling, that the GPUs can share",
        ),
    ]
    within: Annotated[
        float | str | None,
        Option(
            "Try several global batches this near, such as 5%, and take the fastest per token.",
            None,
            metavar="PERCENT",
        ),
    ]
    micro_batch: Annotated[
        int | None, Option("Number of sequences that a rank takes at once.", None, "search")
    ]
    dtype: Annotated[
        str | None,
        Option("Number type: bf16, fp16 or fp32.", None, "the first of these that the machine has"),
    ]
    precision: Annotated[
        str,
        Option(
            "Format of the products of blocks: bf16 (which stands for --dtype), fp8-delayed, "
            "fp8-current, fp8-block, mxfp8, nvfp4, or fp8 for the engine's usual one.",
            "bf16",
        ),
    ]
    recompute: Annotated[
        str,
        Option(
            "Recomputation: none, selective, full, full:4 (4 layers of each stage), "
            "selective:moe_act,layernorm (single modules, Megatron-Core's) or auto.",
            "auto",
        ),
    ]


class TuningOptions(TypedDict, total=False):
    """The options of what is trained: further tokens, adapters, or some parts of the model."""

    mtp_modules: Annotated[
        int,
        Option(
            "Number of modules of multi-token prediction that are trained (megatron).",
            0,
            minimum=0,
        ),
    ]

    lora_rank: Annotated[
        int | None,
        Option("Train low-rank adapters of this rank (LoRA) and freeze all weights."),
    ]
    lora_targets: Annotated[
        str,
        Option(
            "Weights that get adapters, with commas: attention, mlp, qkv, proj, up, down.",
            "attention,mlp",
        ),
    ]
    lora_dropout: Annotated[bool, Option("Drop inputs of adapters at random.", False, is_flag=True)]
    frozen: Annotated[
        str,
        Option(
            "Freeze parts of the model, with commas: embedding, layers:0-N (the first ones), head.",
            "",
            "nothing",
        ),
    ]
    samples_per_sequence: Annotated[
        float,
        Option("Mean number of samples packed into a sequence, which ignore one another.", 1.0),
    ]


class ExecutionOptions(TypedDict, total=False):
    """The options of how a step is executed, predicted or real."""

    seq_len: Annotated[int | None, Option("Sequence length.", None, "the model's")]
    attention: Annotated[str, Option("Kind of attention: flash or unfused.", "flash")]
    overlap: Annotated[
        bool | None,
        Option("Use all three overlaps, as far as the strategy has them.", None, "overlap"),
    ]
    oar: Annotated[bool | None, Option("Overlap the backward all-reduce (axonn, megatron).")]
    ors: Annotated[bool | None, Option("Overlap the reduce-scatter (axonn, and all of ZeRO).")]
    oag: Annotated[bool | None, Option("Overlap the all-gather (axonn, zero3, zeropp, zero-topo).")]
    overlap_grad_reduce: Annotated[
        bool | None,
        Option(
            "Reduce gradients over data during the last backward pass (megatron, axonn).",
            None,
            "as the engine, axonn no",
        ),
    ]
    kernel_tuning: Annotated[
        bool, Option("Take the fastest of NN, NT and TN for each product.", True)
    ]
    keep_gathered_weights: Annotated[
        bool, Option("Gather each weight once per micro-step and keep it (axonn).", False)
    ]


class SwitchOptions(TypedDict, total=False):
    """The switches of strategies; one that a strategy does not have is refused."""

    max_tp: Annotated[int | None, Option("Largest product G_x*G_y*G_z, or largest tensor group.")]
    sequence_parallel: Annotated[
        bool | None,
        Option("Split the residual stream by tokens (megatron).", None, "as the engine"),
    ]
    distributed_optimizer: Annotated[
        bool | None,
        Option("Shard optimizer states over replicas (ZeRO-1).", None, "as the engine, axonn no"),
    ]
    shard_gradients: Annotated[
        bool,
        Option(
            "Shard gradients over replicas, too, and reduce them in every micro-step (ZeRO-2; "
            "axonn and megatron).",
            False,
        ),
    ]
    reduces_once: Annotated[
        bool | None,
        Option(
            "Reduce gradients in the last micro-step of a step only, and keep them whole until "
            "then (zero3 with FSDP2, as with set_requires_gradient_sync).",
            None,
            "as the engine",
        ),
    ]
    split_experts: Annotated[
        bool,
        Option("Split each expert over the tensor group, as MLPs are split (megatron).", False),
    ]
    sends_once: Annotated[
        bool | None,
        Option(
            "Send a token once to each rank that holds any of its experts (megatron).",
            None,
            "as the engine",
        ),
    ]
    overlaps_tensor: Annotated[
        bool | None,
        Option(
            "Let tokens travel within the tensor group beside their products (megatron, and zero3 "
            "with torchtitan).",
            None,
            "as the engine",
        ),
    ]
    overlaps_experts: Annotated[
        bool | None,
        Option(
            "Let tokens travel to and from experts while another micro-batch computes (megatron).",
            None,
            "as the engine",
        ),
    ]
    low_weights: Annotated[
        bool | None,
        Option(
            "Store and gather weights in the format of --precision only (megatron), or gather them "
            "in it (zero3).",
            None,
            "as the engine",
        ),
    ]
    stage_layout: Annotated[
        str,
        Option(
            "Layers of each virtual stage of megatron's pipeline, as Megatron-Core writes them: "
            "Et*3|(tt|)*14t|L.",
            "",
            "as many in each",
        ),
    ]
    schedule: Annotated[
        str,
        Option(
            "Schedule of megatron's pipeline: 1f1b (interleaved with virtual stages), zb-h1 "
            "(gradients of weights fill the bubble) or dualpipe (micro-batches from both ends).",
            "1f1b",
        ),
    ]
    context_kind: Annotated[
        str | None,
        Option(
            "Kind of context parallelism: ring, all_gather, ulysses or ulysses_ring (axonn, "
            "megatron, and zero3 with FSDP2 or DeepSpeed).",
            None,
            "as the engine, axonn and zero3 none",
        ),
    ]
    virtual_stages: Annotated[
        int | None,
        Option(
            "Number of virtual stages of a rank's pipeline (megatron, and zero3 with torchtitan).",
            None,
            "try 1, 2, 4",
        ),
    ]
    engine: Annotated[
        str | None,
        Option(
            "Engine that carries out the strategy: a name that `engines list` shows, or a file; "
            "compare takes several, with commas.",
            None,
            "the strategy's usual one",
        ),
    ]
    qwz: Annotated[bool, Option("Gather weights in INT8 (zeropp, zero-topo).", True)]
    hpz: Annotated[bool, Option("Keep a second copy of the weights (zeropp).", True)]
    qgz: Annotated[bool, Option("Reduce gradients in INT4 (zeropp, zero-topo).", True)]
    dropout: Annotated[bool, Option("Train with dropout.", False)]
    expert_imbalance: Annotated[
        float,
        Option("Ratio of the tokens of the busiest rank's experts to the mean of all ranks.", 1.0),
    ]


class MemoryOptions(TypedDict, total=False):
    """The options of the memory that a rank may take."""

    optimizer: Annotated[
        str, Option("Optimizer: adamw, or muon or ademamix if the engine has it.", "adamw")
    ]
    muon_mode: Annotated[
        str,
        Option(
            "How Muon treats a matrix that tensor ranks split: duplicated (all form the whole), "
            "blockwise (each its own part), or distributed (products are summed).",
            "duplicated",
        ),
    ]
    moments: Annotated[
        str,
        Option(
            "Type of the optimizer's moments: fp32, or bf16 or fp8 if the engine has it.", "fp32"
        ),
    ]
    offload: Annotated[
        str, Option("What moves to the host's memory: none, or optimizer (its states).", "none")
    ]
    offload_modules: Annotated[
        str,
        Option(
            "Modules whose inputs are in the host's memory between forward and backward pass: "
            "core_attn,attn_proj (megatron; also attn_norm, qkv_linear, mlp_norm, expert_fc1, "
            "moe_act), layer_inputs (zero3 with deepspeed-alst), or layers:N (all that N layers "
            "save; zero3 with megatron-fsdp).",
            "",
            "no module",
        ),
    ]
    memory_margin: Annotated[
        str | None,
        Option(
            "Memory of a GPU to keep free: 2GiB, 5%; with -1GiB, 1 GiB may be missing.",
            None,
            "none",
            metavar="SIZE",
        ),
    ]


class JobOptions(
    BatchOptions, TuningOptions, ExecutionOptions, MemoryOptions, SwitchOptions, total=False
):
    """Joins all options that do not choose a strategy or its layouts."""


class ComparisonOptions(TypedDict, total=False):
    """The option of everything that compares all strategies."""

    every_strategy: Annotated[
        bool,
        Option(
            "Compare also what changes the numerics or is not released (zeropp, zero-topo).",
            False,
            is_flag=True,
        ),
    ]


# What is taken without the option --strategy.
USUAL_STRATEGY = "that of --engine, or axonn, or megatron for experts and latent attention"


class LayoutOptions(TypedDict, total=False):
    """The options that choose a strategy and restrict its layouts."""

    strategy: Annotated[
        StrategyLike | None,
        Option(
            "axonn, axonn-pipeline, megatron, zero1, zero2, zero3, zeropp or zero-topo.",
            None,
            USUAL_STRATEGY,
        ),
    ]
    order: Annotated[
        str,
        Option("Rank order, fastest varying axis first; 'all' searches every order.", PAPER_ORDER),
    ]
    gx: Annotated[int | None, Option("Fix G_x.")]
    gy: Annotated[int | None, Option("Fix G_y.")]
    gz: Annotated[int | None, Option("Fix G_z.")]
    gdata: Annotated[int | None, Option("Fix G_data.")]
    fix: Annotated[
        Mapping[str, int] | Sequence[str],
        Option("Fix an axis of any strategy: tensor=8, or tp=8.", (), metavar="AXIS=SIZE"),
    ]


class ConfigurationsOptions(TypedDict, total=False):
    """The option of a ranking that says what its rows are."""

    every_configuration: Annotated[
        bool,
        Option(
            "Show every micro-batch and recomputation of a layout, not only its best.",
            False,
            is_flag=True,
        ),
    ]


class RankingOptions(ConfigurationsOptions, total=False):
    """The options of a ranking: its rows and their order."""

    cost_model: Annotated[
        str, Option("Cost model: full, or paper (AxoNN's bandwidth-only equations).", "full")
    ]
    include_oom: Annotated[
        bool, Option("Show what does not fit in memory, too.", False, is_flag=True)
    ]
    exhaustive: Annotated[
        bool,
        Option(
            "Time every configuration, even where a bound shows that its layout has a faster one.",
            False,
            is_flag=True,
        ),
    ]


class SearchOptions(JobOptions, LayoutOptions, RankingOptions, ComparisonOptions, total=False):
    """Joins all options of a search."""


class ProgressOptions(TypedDict, total=False):
    """The option of everything that may take long."""

    quiet: Annotated[bool, Option("Show no progress.", False, is_flag=True)]


class RankOptions(ProgressOptions, total=False):
    """The options of everything that starts ranks on this machine, or joins ranks."""

    device: Annotated[str, Option("Device: auto, cpu or cuda (which AMD GPUs are, too).", "auto")]
    timeout: Annotated[float, Option("Seconds after which a collective counts as hung.", 300.0)]


class LoggedOptions(TypedDict, total=False):
    """The options that say of logged runs what their logs do not say, or say it better."""

    model: Annotated[
        str | None, Option("Model: a preset (80b), YAML file, or Hugging Face config.json.")
    ]
    gpus: Annotated[int | None, Option("Number of GPUs (dies on MI250X).")]
    layout: Annotated[str | None, Option("Layout, such as tensor=8,data=16 or 8x4x4x8.")]
    global_batch: Annotated[int | None, Option("Number of sequences per step.")]
    micro_batch: Annotated[int | None, Option("Number of sequences that a rank takes at once.")]
    seq_len: Annotated[int | None, Option("Sequence length.")]
    dtype: Annotated[str | None, Option("Number type: bf16, fp16 or fp32.")]
    recompute: Annotated[
        str | None, Option("Recomputation: none, selective, full, or full:4 (4 layers).")
    ]
    engine: Annotated[str | None, Option("Engine: a name that `engines list` shows, or a file.")]
    machine: Annotated[str | None, Option("Machine: a preset or a YAML file.")]


class RunsOptions(TypedDict, total=False):
    """The options of a validation that say which layouts run, and for how long."""

    grids: Annotated[
        str,
        Option(
            "Grids to run: all, top:N (the best), or spread:N (evenly over the ranking).", "all"
        ),
    ]
    grid: Annotated[
        tuple[str, ...], Option("Run this grid; may be given again.", (), metavar="GRID")
    ]
    steps: Annotated[int, Option("Steps of each run.", 10, minimum=3)]


class ValidationOptions(SearchOptions, RunsOptions, RankOptions, total=False):
    """The options of a validation; see `VALIDATION` for those that it does not have."""


class ProfileOptions(TypedDict, total=False):
    """The options of the profile that a calibration writes."""

    name: Annotated[str | None, Option("Name of the machine.", None, "the file's name")]
    resume: Annotated[
        bool, Option("Go on with a calibration that was interrupted.", False, is_flag=True)
    ]


class PartsOptions(TypedDict, total=False):
    """The options that say what a calibration measures, and on which ranks."""

    quick: Annotated[
        bool,
        Option("Take about a minute instead of a thorough calibration.", False, is_flag=True),
    ]
    only: Annotated[
        tuple[str, ...],
        Option(
            "Measure this part and take the rest from --machine; may be given again.",
            (),
            choices=PARTS,
        ),
    ]
    machine: Annotated[
        str | None, Option("Profile (preset or YAML file) from which comes what is not measured.")
    ]
    model: Annotated[
        str | None, Option("Measure products and attention for the search of this model, too.")
    ]
    gpus: Annotated[int | None, Option("Number of GPUs of that search.")]
    micro_batch: Annotated[int | None, Option("Micro-batch of that search.")]
    global_batch: Annotated[int | None, Option("Global batch of that search.")]
    seq_len: Annotated[int | None, Option("Sequence length of that search.")]
    most_shapes: Annotated[
        int | None,
        Option(
            "Largest number of products to measure for that search, or to keep of an import.",
            None,
            "600; --quick 60; import all",
        ),
    ]
    dtype: Annotated[
        tuple[str, ...],
        Option(
            "bf16, fp16 or fp32; may be given again.",
            (),
            "all on a GPU, --quick bf16; CPU fp32",
        ),
    ]
    levels: Annotated[
        str | None, Option("Number of ranks in a unit of each link level.", metavar="2,8")
    ]
    ranks: Annotated[
        int | None,
        Option("Number of ranks to start here.", None, "one per GPU, else one per core"),
    ]


class CalibrationOptions(PartsOptions, RankOptions, total=False):
    """The options of a calibration without those of the profile that it writes."""
