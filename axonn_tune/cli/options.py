"""Options that several commands share, made from their declarations in `axonn_tune.options`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import click

from axonn_tune.options import (
    CALIBRATION,
    REHEARSAL,
    RUN,
    USUAL_STRATEGY,
    VALIDATION,
    ComparisonOptions,
    Declarations,
    JobOptions,
    LayoutOptions,
    LoggedOptions,
    Option,
    ProgressOptions,
    RankingOptions,
    SubjectOptions,
    declared,
)
from axonn_tune.spec.layout import PAPER_ORDER

Command = TypeVar("Command", bound=Callable[..., Any])


class NumberRange(click.FloatRange):
    """A range of numbers that refuses NaN, which click lets pass."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert a text to a number, as `click.FloatRange` does, and refuse NaN."""
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail("nan is not a number.", param, ctx)
        return number


class FilePath(click.Path):
    """A path of a file or a folder, which is not empty; a path of a file names no folder."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Refuse what would be taken for the folder in which the command runs, or for a file."""
        path = str(super().convert(value, param, ctx))
        if not path:
            self.fail("the path is empty; allowed: the path of a file or a folder", param, ctx)
        if not self.dir_okay and path.endswith("/"):
            self.fail(f"'{path}' is the path of a folder; allowed: that of a file", param, ctx)
        return path


def options_of(
    declarations: Declarations, required: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command some options, of which some must be given."""

    def decorate(command: Command) -> Command:
        for name, (hint, option) in reversed(declarations.items()):
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
    if option.choices:
        common["type"] = click.Choice(option.choices)
    elif "str" in kinds:
        common["type"] = str
    elif "int" in kinds:
        common["type"] = click.IntRange(min=int(option.minimum))
    elif "float" in kinds:
        common["type"] = NumberRange(min=option.minimum)
    if option.default == ():
        return click.option(flag, multiple=True, metavar=option.metavar or None, **common)
    # Click takes an option whose default is None for one that was given.
    is_shown = not option.shown_default and option.default != ""
    default = {} if required else {"default": option.default, "show_default": is_shown}
    return click.option(
        flag, required=required, metavar=option.metavar or None, **default, **common
    )


# The options from which the global batch follows.
BATCH_NAMES = ("global_batch", "global_batch_tokens", "within")
_SUBJECT = ("gpus", "model")
_SEARCH = (SubjectOptions, JobOptions, LayoutOptions)
search_options = options_of(declared(*_SEARCH), required=_SUBJECT)
# `suggest` and `report` also take all strategies at once.
_ANY_STRATEGY = Option(
    "axonn, axonn-pipeline, megatron, zero1, zero2, zero3, zeropp or zero-topo; all compares them.",
    None,
    USUAL_STRATEGY,
)
strategies_options = options_of(
    declared(*_SEARCH, changed={"strategy": _ANY_STRATEGY}), required=_SUBJECT
)
# The options that say what a layout is compared with have no meaning for one layout.
OF_MANY_LAYOUTS = ("gx", "gy", "gz", "gdata", "fix", "max_tp")
_ONE_ORDER = Option("Rank order, fastest varying axis first.", PAPER_ORDER)
layout_options = options_of(
    declared(*_SEARCH, changed={"order": _ONE_ORDER}, without=OF_MANY_LAYOUTS), required=_SUBJECT
)
LAYOUT_HELP = (
    "Layout as tables print it: 8x4x4x8 (G_x, G_y, G_z, G_data) or x=8,z=4; of other strategies "
    "tensor=8,data=16."
)
ranking_options = options_of(declared(RankingOptions))
job_options = options_of(declared(SubjectOptions, JobOptions), required=_SUBJECT)
# `scale` declares its counts of GPUs, and perhaps its models, itself.
scale_options = options_of(declared(*_SEARCH, without=_SUBJECT))
plan_options = options_of(declared(*_SEARCH, without=("gpus",)), required=("model",))
comparison_options = options_of(declared(ComparisonOptions))
quiet_option = options_of(declared(ProgressOptions))
validate_options = options_of(VALIDATION)
calibrate_options = options_of(CALIBRATION)
logged_options = options_of(declared(LoggedOptions))
run_options = options_of(RUN, required=("model",))
rehearse_options = options_of(REHEARSAL)


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user typed, not those left at their default."""
    context = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is typed
    }


def refuse(options: Mapping[str, Any], reason: str) -> None:
    """Raise InputError if the user typed one of some options; the reason follows its name."""
    from axonn_tune.errors import InputError

    for name in given_options(options):
        flag = "format" if name == "output_format" else name.replace("_", "-")
        raise InputError(f"--{flag} {reason}")


def with_batch(given: Mapping[str, Any], global_batch: int) -> dict[str, Any]:
    """Return the options that were typed, with this global batch instead of how it was chosen."""
    kept = {name: value for name, value in given.items() if name not in BATCH_NAMES}
    return {**kept, "global_batch": global_batch}


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
    type=FilePath(dir_okay=False),
    help="Draw the result, too, into a file .png, .svg or .pdf.",
)

output_option = click.option(
    "--output", type=FilePath(dir_okay=False), help="Write to a file instead of printing."
)
