"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

_POSITIVE = click.IntRange(min=1)

_SEARCH_OPTIONS = [
    click.option("--gpus", type=_POSITIVE, required=True, help="Number of GPUs (dies on MI250X)."),
    click.option(
        "--model", required=True, help="Preset (80b), YAML file, or Hugging Face config.json."
    ),
    click.option("--machine", help="Preset or YAML file.  [default: perlmutter]"),
    click.option("--global-batch", type=_POSITIVE, help="Sequences per step."),
    click.option(
        "--global-batch-tokens",
        type=_POSITIVE,
        help="Tokens per step.  [default: 16777216, as AxoNN's weak scaling]",
    ),
    click.option("--seq-len", type=_POSITIVE, help="Sequence length.  [default: the model's]"),
    click.option("--micro-batch", type=_POSITIVE, help="Sequences at once.  [default: search]"),
    click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp32."),
    click.option("--attention", default="flash", show_default=True, help="flash or unfused."),
    click.option(
        "--recompute", default="auto", show_default=True, help="none, selective, full or auto."
    ),
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
    click.option(
        "--order",
        default="xyzd",
        show_default=True,
        help="Rank order, fastest varying axis first; 'all' searches every order.",
    ),
    click.option("--max-tp", type=_POSITIVE, help="Largest G_x*G_y*G_z."),
    click.option("--gx", type=_POSITIVE, help="Fix G_x."),
    click.option("--gy", type=_POSITIVE, help="Fix G_y."),
    click.option("--gz", type=_POSITIVE, help="Fix G_z."),
    click.option("--gdata", type=_POSITIVE, help="Fix G_data."),
]


def search_options(command: Command) -> Command:
    """The options that describe the model, the job, the machine and the constraints."""
    for option in reversed(_SEARCH_OPTIONS):
        command = option(command)
    return command


def search_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line as arguments of `api.build_search`."""
    arguments = dict(options)
    everything = arguments.pop("overlap")
    for name in ("oar", "ors", "oag"):
        if arguments[name] is None:
            arguments[name] = True if everything is None else everything
    if arguments["machine"] is None:
        del arguments["machine"]
    return arguments


def given_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the user typed, not those left at their default."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is typed
    }


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


output_option = click.option(
    "--output", type=click.Path(dir_okay=False), help="Write to a file instead of printing."
)
