"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of numbers; NaN, which click lets pass, lies in none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """As `click.FloatRange`."""
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail("nan is not a number.", param, ctx)
        return number


_POSITIVE = click.IntRange(min=1)

_MODEL_OPTION = click.option(
    "--model", required=True, help="Preset (80b), YAML file, or Hugging Face config.json."
)

# What decides how a step is executed, predicted or real.
_EXECUTION_OPTIONS = [
    click.option("--seq-len", type=_POSITIVE, help="Sequence length.  [default: the model's]"),
    click.option("--attention", default="flash", show_default=True, help="flash or unfused."),
    click.option(
        "--overlap/--no-overlap", default=None, help="All three overlaps.  [default: overlap]"
    ),
    click.option("--oar/--no-oar", default=None, help="Overlap the backward all-reduce."),
    click.option("--ors/--no-ors", default=None, help="Overlap the reduce-scatter."),
    click.option("--oag/--no-oag", default=None, help="Overlap the all-gather."),
    click.option(
        "--kernel-tuning/--no-kernel-tuning",
        default=True,
        show_default=True,
        help="Take the fastest of NN, NT and TN for each product.",
    ),
    click.option(
        "--keep-gathered-weights/--no-keep-gathered-weights",
        default=False,
        show_default=True,
        help="Gather each weight once per micro-step and keep it.",
    ),
]

# What a strategy may do.
_SWITCH_OPTIONS = [
    click.option(
        "--sequence-parallel/--no-sequence-parallel",
        default=True,
        show_default=True,
        help="megatron: split the residual stream by tokens.",
    ),
    click.option(
        "--overlap-grad-reduce/--no-overlap-grad-reduce",
        default=True,
        show_default=True,
        help="megatron: reduce gradients beside the last backward pass.",
    ),
    click.option(
        "--distributed-optimizer/--no-distributed-optimizer",
        default=None,
        help="Shard optimizer states over replicas.  [default: megatron yes, axonn no]",
    ),
    click.option(
        "--virtual-stages",
        type=_POSITIVE,
        help="megatron: virtual stages of a rank's pipeline.  [default: try 1, 2, 4]",
    ),
    click.option("--qwz/--no-qwz", default=True, show_default=True, help="INT8 weights."),
    click.option(
        "--hpz/--no-hpz", default=True, show_default=True, help="zeropp: second copy of weights."
    ),
    click.option("--qgz/--no-qgz", default=True, show_default=True, help="INT4 gradients."),
    click.option("--dropout/--no-dropout", default=False, show_default=True, help="With dropout."),
]

_SWITCHES = (
    *("sequence_parallel", "overlap_grad_reduce", "distributed_optimizer", "virtual_stages"),
    *("qwz", "hpz", "qgz"),
)

_SEARCH_OPTIONS = [
    click.option("--gpus", type=_POSITIVE, required=True, help="Number of GPUs (dies on MI250X)."),
    _MODEL_OPTION,
    click.option("--machine", help="Preset or YAML file.  [default: perlmutter]"),
    click.option("--global-batch", type=_POSITIVE, help="Sequences per step."),
    click.option(
        "--global-batch-tokens",
        type=_POSITIVE,
        help="Tokens per step.  [default: 16777216, as AxoNN's weak scaling]",
    ),
    click.option("--micro-batch", type=_POSITIVE, help="Sequences at once.  [default: search]"),
    click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp32."),
    click.option(
        "--recompute", default="auto", show_default=True, help="none, selective, full or auto."
    ),
    *_EXECUTION_OPTIONS,
    click.option("--max-tp", type=_POSITIVE, help="Largest G_x*G_y*G_z, or tensor group."),
    *_SWITCH_OPTIONS,
]

# What a search of one strategy may be held to.
_LAYOUT_OPTIONS = [
    click.option(
        "--strategy",
        default="axonn",
        show_default=True,
        help="axonn, axonn-pipeline, megatron, zero3, zeropp, zero-topo, or all (as compare).",
    ),
    click.option(
        "--order",
        default="xyzd",
        show_default=True,
        help="Rank order, fastest varying axis first; 'all' searches every order.",
    ),
    click.option("--gx", type=_POSITIVE, help="Fix G_x."),
    click.option("--gy", type=_POSITIVE, help="Fix G_y."),
    click.option("--gz", type=_POSITIVE, help="Fix G_z."),
    click.option("--gdata", type=_POSITIVE, help="Fix G_data."),
    click.option(
        "--fix",
        multiple=True,
        metavar="AXIS=SIZE",
        help="Fix an axis of any strategy: tensor=8, or tp=8.",
    ),
]

_RUN_OPTIONS = [
    click.option("--grid", metavar="GRID", help="G_x x G_y x G_z x G_data: 2x2x1x2."),
    click.option("--suggest", is_flag=True, help="Take the best grid, order and micro-batch."),
    click.option(
        "--gpus", type=_POSITIVE, help="Ranks of --suggest.  [default: the ranks or GPUs at hand]"
    ),
    _MODEL_OPTION,
    click.option("--machine", help="Profile of this machine, for predictions and --suggest."),
    click.option(
        "--global-batch",
        type=_POSITIVE,
        help="Sequences per step.  [default: one micro-batch per rank of Z and data]",
    ),
    click.option("--micro-batch", type=_POSITIVE, help="Sequences at once.  [default: 1]"),
    click.option("--dtype", help="bf16 or fp32.  [default: bf16 on a GPU, fp32 on a CPU]"),
    click.option(
        "--recompute",
        help="none, selective, full, or auto: the fastest that fits --machine.  [default: none]",
    ),
    *_EXECUTION_OPTIONS,
    click.option("--order", default="xyzd", show_default=True, help="Rank order, fastest first."),
]


_VALIDATE_OPTIONS = [
    click.option("--model", help="Preset (80b), YAML file, or Hugging Face config.json."),
    click.option("--machine", help="The calibrated profile of this machine."),
    click.option("--gpus", type=_POSITIVE, help="Ranks.  [default: the ranks or GPUs at hand]"),
    click.option(
        "--global-batch", type=_POSITIVE, help="Sequences per step.  [default: one per rank]"
    ),
    click.option("--micro-batch", type=_POSITIVE, help="Sequences at once.  [default: the best]"),
    click.option("--dtype", help="bf16 or fp32.  [default: bf16 on a GPU, fp32 on a CPU]"),
    click.option(
        "--recompute", default="auto", show_default=True, help="none, selective, full or auto."
    ),
    *_EXECUTION_OPTIONS,
    click.option(
        "--order", default="xyzd", show_default=True, help="Rank order, fastest first, or all."
    ),
    click.option("--max-tp", type=_POSITIVE, help="Largest G_x*G_y*G_z, or tensor group."),
    click.option(
        "--strategy",
        default="axonn",
        show_default=True,
        help="axonn; through torch zero3 (FSDP2), hsdp (with replicas) or megatron-tp.",
    ),
]

# How ranks are started, and what they show.
_LAUNCH_OPTIONS = [
    click.option(
        "--device", default="auto", show_default=True, help="auto, cpu or cuda (AMD too)."
    ),
    click.option(
        "--timeout",
        type=NumberRange(min=1.0),
        default=300.0,
        show_default=True,
        help="Seconds after which a collective counts as hung.",
    ),
    click.option("--quiet", is_flag=True, help="No progress."),
]


def search_options(command: Command) -> Command:
    """The options that describe the model, the job, the machine and the constraints."""
    return _with(_SEARCH_OPTIONS + _LAYOUT_OPTIONS, command)


def job_options(command: Command) -> Command:
    """As `search_options`, without the strategy and its layout."""
    return _with(_SEARCH_OPTIONS, command)


def scale_options(command: Command) -> Command:
    """As `search_options`, for several GPU counts, and for models that grow with them."""
    counts = click.option(
        "--gpus", required=True, metavar="COUNTS", help="128..16384 (doublings), or 96,384,1536."
    )
    model = click.option("--model", help="Of every count: preset, YAML file, config.json.")
    return _with([counts, model, *_SEARCH_OPTIONS[2:], *_LAYOUT_OPTIONS], command)


def plan_options(command: Command) -> Command:
    """As `search_options`, with the number of GPUs left open."""
    gpus = click.option("--gpus", type=_POSITIVE, help="Plan on so many.  [or give --deadline]")
    return _with([gpus, *_SEARCH_OPTIONS[1:], *_LAYOUT_OPTIONS], command)


def run_options(command: Command) -> Command:
    """The options that describe what to train on which grid."""
    return _with(_RUN_OPTIONS, command)


def validate_options(command: Command) -> Command:
    """The options that describe what to train on every grid."""
    return _with(_VALIDATE_OPTIONS, command)


def launch_options(command: Command) -> Command:
    """The options of commands that start ranks."""
    return _with(_LAUNCH_OPTIONS, command)


def _with(options: list[Callable[[Any], Any]], command: Command) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


def search_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line as arguments of `api.build_search`."""
    from axonn_tune.strategies.named import Switches

    arguments = {**options, **overlap_arguments(options)}
    del arguments["overlap"]
    switches = {name: arguments.pop(name) for name in _SWITCHES if name in arguments}
    arguments["switches"] = Switches(**switches)
    fixed = [_fixed(text) for text in options.get("fix", ())]
    arguments["fix"] = dict(fixed)
    if len(set(fixed)) > len(arguments["fix"]):
        raise click.BadParameter("an axis has two sizes; give one", param_hint="--fix")
    if arguments["machine"] is None:
        del arguments["machine"]
    return arguments


def _fixed(text: str) -> tuple[str, int]:
    axis, _, size = text.partition("=")
    if not axis or not size.isdecimal() or int(size) < 1:
        raise click.BadParameter(f"'{text}' is not AXIS=SIZE, such as tensor=8", param_hint="--fix")
    return axis.strip(), int(size)


def overlap_arguments(options: dict[str, Any]) -> dict[str, bool]:
    """The three switches, each as given, else as --overlap says."""
    everything = options["overlap"] is not False
    return {
        name: everything if options[name] is None else options[name]
        for name in ("oar", "ors", "oag")
    }


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user typed, not those left at their default."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is typed
    }


def words_of(options: dict[str, Any]) -> list[str]:
    """Options as the words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            each = value if isinstance(value, tuple) else (value,)
            words += (word for one in each for word in (f"--{flag}", str(one)))
    return words


def format_option(*formats: str) -> Callable[[Command], Command]:
    """``--format`` with the given choices; the first is the default."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="How to print the result.",
    )


plot_option = click.option(
    "--plot", type=click.Path(dir_okay=False), help="Draw it, too: .png, .svg or .pdf."
)

output_option = click.option(
    "--output", type=click.Path(dir_okay=False), help="Write to a file instead of printing."
)
