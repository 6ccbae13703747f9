"""All options of searches, validations and calibrations, each declared in one place.

A declaration gives the name, the type, the help text and the default. The parameter of the Python
functions (`with_options`) with its documentation, and the option of the command line
(`cli.options`), are made from it. The key under which JSON reports an assumption is the option's
name. Annotations are not put off in this module, which reads them.
"""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeAlias, TypedDict, TypeVar

from axonn_tune.errors import InputError, choices_hint
from axonn_tune.spec.calibration import PARTS
from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.layout import PAPER_ORDER

if TYPE_CHECKING:
    from axonn_tune.spec.strategy import Strategy

    StrategyLike: TypeAlias = str | Strategy
else:
    # Help texts are printed without NumPy, which the protocol would import.
    StrategyLike = str

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Option:
    """The declaration of an option, which has its name and its type next to it.

    help
        A phrase that says what the option does.
    default
        Value of the option where the user gives none.
    shown_default
        What happens without the option, if the default is None.
    metavar
        Word that stands for the value in the help of the command line, if the type does not do.
    is_flag
        Whether the command line has no ``--no-`` form of a bool, which is then False by default.
    minimum
        Smallest value of a number.
    choices
        Allowed values of the texts of an option that may be given again.
    """

    help: str
    default: Any = None
    shown_default: str = ""
    metavar: str = ""
    is_flag: bool = False
    minimum: float = 1
    choices: tuple[str, ...] = ()

    def check(self, owner: str, name: str, value: Any) -> None:
        """Refuse a value that the command line would refuse for its size or as no choice.

        Counts of at least 1 are left to what they enter, which knows more about them.

        Raises
        ------
        InputError
            The message names the option, its value and what is allowed.
        """
        if self.choices:
            for item in value:
                require_choice(owner, name, item, self.choices)
        elif self.minimum > 1 and value < self.minimum:
            raise InputError(f"{owner}: {name} is {value}; allowed: at least {self.minimum:g}")


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
            "Try several batches this near, such as 5%, and take the fastest for each token.",
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
    overlap: Annotated[bool | None, Option("Use all three overlaps.", None, "overlap")]
    oar: Annotated[bool | None, Option("Overlap the backward all-reduce.")]
    ors: Annotated[bool | None, Option("Overlap the reduce-scatter.")]
    oag: Annotated[bool | None, Option("Overlap the all-gather.")]
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
        bool, Option("Gather each weight once per micro-step and keep it.", False)
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
        Option("Split each expert over the tensor group, as the MLP is (megatron).", False),
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
        Option("Tokens of the busiest rank's experts, over the mean (models with experts).", 1.0),
    ]


class MemoryOptions(TypedDict, total=False):
    """The options of the memory that a rank may take."""

    moments: Annotated[
        str,
        Option("Type of the optimizer's moments: fp32, bf16 or fp8, as the engine has.", "fp32"),
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
            "none",
        ),
    ]
    memory_margin: Annotated[
        str | None,
        Option(
            "Memory of a GPU to keep free: 2GiB, 5%; or -1GiB, which may be missing.",
            None,
            "none",
            metavar="SIZE",
        ),
    ]


class JobOptions(
    BatchOptions, TuningOptions, ExecutionOptions, MemoryOptions, SwitchOptions, total=False
):
    """All options that do not choose a strategy or its layouts."""


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
    """All options of a search."""


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
        Option("Grids to run: all, top:N, or spread:N, which is evenly over the ranking.", "all"),
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
        str | None, Option("Profile (preset or YAML file) that says what is not measured.")
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


# The type and the declaration of every option of a command or a function, by name in order.
Declarations: TypeAlias = dict[str, tuple[Any, Option]]


def declared(
    *groups: type, changed: Mapping[str, Option] | None = None, without: Collection[str] = ()
) -> Declarations:
    """Return the declarations of some groups.

    Parameters
    ----------
    groups : TypedDicts
        The groups in the order in which a help text lists them.
    changed : mapping of str to Option
        Declarations that replace those of the groups.
    without : collection of str
        Names of the options that are left out.
    """
    declarations = {
        name: (hint.__origin__, hint.__metadata__[0])
        for group in groups
        for name, hint in group.__annotations__.items()
        if name not in without
    }
    for name, option in (changed or {}).items():
        declarations[name] = (declarations[name][0], option)
    return declarations


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


def defaults(declarations: Declarations) -> dict[str, Any]:
    """Return the default of every option."""
    return {name: option.default for name, (_, option) in declarations.items()}


def with_options(known: Declarations) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function some options as named, documented, checked parameters.

    The function takes them as ``**options``. An unknown name raises an `InputError` that suggests
    the nearest known one. ``{options}`` in the docstring becomes their documentation.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in explicit]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=_type_text(hint),
            )
            for name, (hint, option) in known.items()
            if name not in names
        ]
        allowed = [*names, *(p.name for p in keywords)]

        @wraps(function)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            for name in options:
                if name not in allowed:
                    raise InputError(
                        f"{function.__name__}: no option '{name}'{choices_hint(name, allowed)}"
                    )
                if name in known:
                    known[name][1].check(function.__name__, name, options[name])
            return function(*arguments, **options)

        checked.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        documentation = "\n".join(_documented(name, *known[name]) for name in known)
        checked.__doc__ = (function.__doc__ or "").replace("    {options}", documentation)
        return checked

    return decorate


def _documented(name: str, hint: Any, option: Option) -> str:
    """Return the documentation of an option as a parameter of a function."""
    default = option.shown_default or option.default
    shown = f" By default {default}." if default not in ("", None, ()) else ""
    return f"    {name} : {_type_text(hint)}\n        {option.help}{shown}"


@cache
def _type_text(hint: Any) -> str:
    """Return the text of a type, without modules."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
