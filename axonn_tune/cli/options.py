"""Options that several commands share, made from their declarations in `axonn_tune.options`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from axonn_tune.cli.progress import quiet_option
from axonn_tune.options import (
    BatchOptions,
    ExecutionOptions,
    JobOptions,
    LayoutOptions,
    Option,
    RankingOptions,
    SubjectOptions,
    SwitchOptions,
    declared,
)

Command = TypeVar("Command", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of numbers that refuses NaN, which click lets pass."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text to a number, as `click.FloatRange` does, and refuse NaN."""
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail("nan is not a number.", param, ctx)
        return number


_POSITIVE = click.IntRange(min=1)


def options_of(
    *groups: type,
    required: Collection[str] = (),
    changed: Mapping[str, Option] | None = None,
    without: Collection[str] = (),
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of some groups.

    Parameters
    ----------
    groups : TypedDicts of `axonn_tune.options`
        The groups in the order in which the help text lists them.
    required : collection of str
        Names of the options that must be given.
    changed : mapping of str to Option
        Declarations that replace those of the groups for this command.
    without : collection of str
        Names of the options that the command does not have.
    """
    known = {name: entry for name, entry in declared(*groups).items() if name not in without}
    for name, option in (changed or {}).items():
        known[name] = (known[name][0], option)

    def decorate(command: Command) -> Command:
        for name, (hint, option) in reversed(known.items()):
            command = _click_option(name, hint, option, name in required)(command)
        return command

    return decorate


def _click_option(name: str, hint: Any, option: Option, required: bool) -> Callable[[Any], Any]:
    flag = "--" + name.replace("_", "-")
    shown = f"  [default: {option.shown_default}]" if option.shown_default else ""
    common: dict[str, Any] = {"help": option.help + shown}
    kinds = {kind.strip() for kind in str(getattr(hint, "__name__", hint)).split("|")}
    if option.is_flag:
        return click.option(flag, is_flag=True, **common)
    if "bool" in kinds:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
        return click.option(flag, default=option.default, show_default=True, **common)
    if option.default == ():
        return click.option(flag, multiple=True, metavar=option.metavar or None, **common)
    if "int" in kinds:
        common["type"] = _POSITIVE
    # Click takes an option whose default is None for one that was given.
    default = {} if required else {"default": option.default, "show_default": True}
    return click.option(
        flag, required=required, metavar=option.metavar or None, **default, **common
    )


_SUBJECT = ("gpus", "model")
search_options = options_of(SubjectOptions, JobOptions, LayoutOptions, required=_SUBJECT)
ranking_options = options_of(RankingOptions)
job_options = options_of(SubjectOptions, JobOptions, required=_SUBJECT)
# `scale` declares its counts of GPUs, and perhaps its models, itself.
scale_options = options_of(SubjectOptions, JobOptions, LayoutOptions, without=_SUBJECT)
plan_options = options_of(
    SubjectOptions, JobOptions, LayoutOptions, required=("model",), without=("gpus",)
)

_AT_HAND = "the ranks or GPUs at hand"
_DTYPE = Option("Number type: bf16 or fp32.", None, "bf16 on a GPU, fp32 on a CPU")
_MICRO_BATCH = "Number of sequences that a rank takes at once."
_GLOBAL_BATCH = "Number of sequences per step."
_NOT_SEARCHED = ("global_batch_tokens", "gx", "gy", "gz", "gdata", "fix")
run_options = options_of(
    SubjectOptions,
    BatchOptions,
    ExecutionOptions,
    LayoutOptions,
    required=("model",),
    changed={
        "gpus": Option("Number of ranks that --suggest plans for.", None, _AT_HAND),
        "machine": Option("Profile of this machine, for predictions and --suggest."),
        "global_batch": Option(_GLOBAL_BATCH, None, "one micro-batch per rank of Z and data"),
        "micro_batch": Option(_MICRO_BATCH, None, "1"),
        "dtype": _DTYPE,
        "recompute": Option(
            "Recomputation: none, selective, full, or auto, the fastest that fits --machine.",
            None,
            "none",
        ),
        "order": Option("Rank order, fastest varying axis first.", "xyzd"),
    },
    without=(*_NOT_SEARCHED, "strategy"),
)
validate_options = options_of(
    SubjectOptions,
    BatchOptions,
    ExecutionOptions,
    SwitchOptions,
    LayoutOptions,
    changed={
        "gpus": Option("Number of ranks.", None, _AT_HAND),
        "machine": Option("The calibrated profile of this machine."),
        "global_batch": Option(_GLOBAL_BATCH, None, "one per rank"),
        "micro_batch": Option(_MICRO_BATCH, None, "the best"),
        "dtype": _DTYPE,
        "order": Option("Rank order, fastest varying axis first; 'all' tries all.", "xyzd"),
        "strategy": Option(
            "Strategy: axonn, or through torch zero3 (FSDP2), hsdp (with replicas) or megatron-tp.",
            "axonn",
        ),
    },
    without=(*_NOT_SEARCHED, *(name for name in declared(SwitchOptions) if name != "max_tp")),
)

_DEVICE_OPTIONS = (
    click.option(
        "--device",
        default="auto",
        show_default=True,
        help="Device: auto, cpu or cuda (which AMD GPUs are, too).",
    ),
    click.option(
        "--timeout",
        type=NumberRange(min=1.0),
        default=300.0,
        show_default=True,
        help="Seconds after which a collective counts as hung.",
    ),
    quiet_option,
)


def launch_options(command: Command) -> Command:
    """Give a command the options that every command that starts ranks has."""
    for option in reversed(_DEVICE_OPTIONS):
        command = option(command)
    return command


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user typed, not those left at their default."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is typed
    }


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options as the words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for item in value if isinstance(value, tuple) else (value,):
                words += (f"--{flag}", str(item))
    return words


def typed_command_line() -> str:
    """Return the command that the user typed, as records of measurements keep it."""
    return shlex.join(["axonn-tune", *sys.argv[1:]])


def format_option(*formats: str) -> Callable[[Command], Command]:
    """Return the option ``--format`` with the given choices; the first is the default."""
    return click.option(
        "--format",
        "output_format",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="How to print the result.",
    )


plot_option = click.option(
    "--plot",
    type=click.Path(dir_okay=False),
    help="Draw the result, too, into a file .png, .svg or .pdf.",
)

output_option = click.option(
    "--output", type=click.Path(dir_okay=False), help="Write to a file instead of printing."
)
