"""All options of a search, each declared in one place.

A declaration gives the name, the type, the help text and the default. The parameter of the Python
functions (`with_options`) with its documentation, and the option of the command line
(`cli.options`), are made from it. The key under which JSON reports an assumption is the option's
name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ParamSpec,
    TypeAlias,
    TypedDict,
    TypeVar,
    get_type_hints,
)

from axonn_tune.errors import InputError, choices_hint
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
    """

    help: str
    default: Any = None
    shown_default: str = ""
    metavar: str = ""
    is_flag: bool = False


class SubjectOptions(TypedDict, total=False):
    """The options that name the subject of a search."""

    gpus: Annotated[int, Option("Number of GPUs (dies on MI250X).")]
    model: Annotated[str, Option("Model: a preset (80b), YAML file, or Hugging Face config.json.")]
    machine: Annotated[str, Option("Machine: a preset or a YAML file.", None, "perlmutter")]


class BatchOptions(TypedDict, total=False):
    """The options of batch sizes, precision and recomputation."""

    global_batch: Annotated[int | None, Option("Number of sequences per step.")]
    global_batch_tokens: Annotated[
        int | None, Option("Number of tokens per step.", None, "16777216, as AxoNN's weak scaling")
    ]
    micro_batch: Annotated[
        int | None, Option("Number of sequences that a rank takes at once.", None, "search")
    ]
    dtype: Annotated[str, Option("Number type: bf16, fp16 or fp32.", "bf16")]
    recompute: Annotated[str, Option("Recomputation: none, selective, full or auto.", "auto")]


class ExecutionOptions(TypedDict, total=False):
    """The options of how a step is executed, predicted or real."""

    seq_len: Annotated[int | None, Option("Sequence length.", None, "the model's")]
    attention: Annotated[str, Option("Kind of attention: flash or unfused.", "flash")]
    overlap: Annotated[bool | None, Option("Use all three overlaps.", None, "overlap")]
    oar: Annotated[bool | None, Option("Overlap the backward all-reduce.")]
    ors: Annotated[bool | None, Option("Overlap the reduce-scatter.")]
    oag: Annotated[bool | None, Option("Overlap the all-gather.")]
    kernel_tuning: Annotated[
        bool, Option("Take the fastest of NN, NT and TN for each product.", True)
    ]
    keep_gathered_weights: Annotated[
        bool, Option("Gather each weight once per micro-step and keep it.", False)
    ]


class SwitchOptions(TypedDict, total=False):
    """The switches of strategies; a strategy ignores switches that it does not have."""

    max_tp: Annotated[int | None, Option("Largest product G_x*G_y*G_z, or largest tensor group.")]
    sequence_parallel: Annotated[
        bool, Option("Split the residual stream by tokens (megatron).", True)
    ]
    overlap_grad_reduce: Annotated[
        bool, Option("Reduce gradients during the last backward pass (megatron).", True)
    ]
    distributed_optimizer: Annotated[
        bool | None,
        Option("Shard optimizer states over replicas.", None, "megatron yes, axonn no"),
    ]
    virtual_stages: Annotated[
        int | None,
        Option("Number of virtual stages of a rank's pipeline (megatron).", None, "try 1, 2, 4"),
    ]
    qwz: Annotated[bool, Option("Gather weights in INT8 (zeropp, zero-topo).", True)]
    hpz: Annotated[bool, Option("Keep a second copy of the weights (zeropp).", True)]
    qgz: Annotated[bool, Option("Reduce gradients in INT4 (zeropp, zero-topo).", True)]
    dropout: Annotated[bool, Option("Train with dropout.", False)]


class JobOptions(BatchOptions, ExecutionOptions, SwitchOptions, total=False):
    """All options that do not choose a strategy or its layouts."""


class LayoutOptions(TypedDict, total=False):
    """The options that choose a strategy and restrict its layouts."""

    strategy: Annotated[
        StrategyLike,
        Option(
            "axonn, axonn-pipeline, megatron, zero3, zeropp or zero-topo; all compares them.",
            "axonn",
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


class RankingOptions(TypedDict, total=False):
    """The options of a ranking: its rows and their order."""

    cost_model: Annotated[
        str, Option("Cost model: full, or paper (AxoNN's bandwidth-only equations).", "full")
    ]
    include_oom: Annotated[
        bool, Option("Show what does not fit in memory, too.", False, is_flag=True)
    ]
    every_configuration: Annotated[
        bool,
        Option(
            "Show every micro-batch and recomputation of a layout, not only its best.",
            False,
            is_flag=True,
        ),
    ]


class SearchOptions(JobOptions, LayoutOptions, RankingOptions, total=False):
    """All options of a search."""


def declared(*groups: type) -> dict[str, tuple[Any, Option]]:
    """Return the type and the declaration of every option of some groups, by name in order."""
    declarations = {}
    for group in groups:
        for name, hint in _hints(group):
            declarations[name] = (hint.__origin__, hint.__metadata__[0])
    return declarations


def _hints(group: type) -> Iterator[tuple[str, Any]]:
    """Yield the options of a group in order, the inherited ones first."""
    hints = get_type_hints(group, include_extras=True)
    bases = getattr(group, "__orig_bases__", ())
    inherited = [name for base in bases if base is not TypedDict for name, _ in _hints(base)]
    for name in dict.fromkeys([*inherited, *hints]):
        yield name, hints[name]


def defaults(*groups: type) -> dict[str, Any]:
    """Return the default of every option of some groups."""
    return {name: option.default for name, (_, option) in declared(*groups).items()}


def with_options(*groups: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function the options of some groups as named, documented, checked parameters.

    The function takes them as ``**options``. An unknown name raises an `InputError` that suggests
    the nearest known one. ``{options}`` in the docstring becomes their documentation.
    """
    known = declared(*groups)

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
            return function(*arguments, **options)

        checked.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        documentation = "\n".join(_documented(name, *known[name]) for name in known)
        checked.__doc__ = (function.__doc__ or "").replace("    {options}", documentation)
        return checked

    return decorate


def _documented(name: str, hint: Any, option: Option) -> str:
    """Return the documentation of an option as a parameter of a function."""
    default = option.shown_default if option.default is None else option.default
    shown = f" By default {default}." if default not in ("", None, ()) else ""
    return f"    {name} : {_type_text(hint)}\n        {option.help}{shown}"


def _type_text(hint: Any) -> str:
    """Return the text of a type, without modules."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
