"""The ``axonn-tune`` command: loads a subcommand when it is used, reports errors in one line."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import sys
from contextlib import suppress
from typing import Any

import click

from axonn_tune import __version__
from axonn_tune.errors import AxonnTuneError, one_line, shortened

COMMANDS = {
    "suggest": "Rank the grids on which to train a model.",
    "compare": "Rank the best configuration of every strategy.",
    "explain": "Show where the time and the memory of one grid go.",
    "scale": "Show the best layout and its efficiency at many GPU counts.",
    "whatif": "Show what a faster link, more memory or another GPU would change.",
    "plan": "Plan a whole training run: GPUs, days, node-hours, energy, money.",
    "report": "Write an interactive page of all candidates.",
    "trace": "Write a predicted step as a Chrome trace, or for network simulators.",
    "launch": "Write a job script and the flags or files of the framework.",
    "run": "Train on a grid for some steps; compare predicted and measured time.",
    "rehearse": "Run one rank's real program without a GPU; hold it against the plan.",
    "validate": "Run many grids; compare predicted and measured time, for people and CI.",
    "calibrate": "Measure this machine or a job's nodes and write a hardware profile.",
    "emulate": "Run a command on an emulated cluster with link levels (Linux, root).",
    "models": "List and show model presets.",
    "machines": "List, show and compare hardware profiles.",
    "engines": "List, show and compare the software that carries out a strategy.",
    "runs": "Read the logs of training runs into a table of runs.",
    "score": "Predict a table of your own runs and say how well.",
    "learn": "Learn a machine's numbers from a table of your own runs.",
    "next": "Say which layouts to try next, given those that you have tried.",
    "reproduce": "Compare predictions with published results.",
}


# How to install what a command may miss.
_INSTALLS = {
    "torch": "pip install 'axonn-tune[runtime]', or load your cluster's",
    "scipy": "pip install scipy",
    "pandas": "pip install pandas",
    "matplotlib": "pip install 'axonn-tune[plot]'",
}


# What users call the types of options that click names for programmers.
_TYPES = {"integer": "a whole number", "float": "a number"}
# Commands that run the program whose step they compare with a prediction.
_EXECUTING = ("run", "rehearse", "validate")
# Commands that start other programs, in the environment that the user has set.
_STARTING = (*_EXECUTING, "calibrate", "emulate")
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a user meets the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return one command."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"axonn_tune.cli.{name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called, and what is given to it."""
        found = super().resolve_command(ctx, args)
        if found[0] not in _STARTING:
            _keep_blas_alone(ctx)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _keep_blas_alone(ctx: click.Context) -> None:
    """Give NumPy's OpenBLAS one thread, until the command ends, unless the user says how many.

    A command multiplies small matrices, and OpenBLAS starts a thread on each core that then spins.
    """
    if _BLAS_THREADS not in os.environ:
        os.environ[_BLAS_THREADS] = "1"
        ctx.call_on_close(lambda: os.environ.pop(_BLAS_THREADS, None))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="axonn-tune")
def cli() -> None:
    """Say which parallel layout trains your model fastest, how fast, and why.

    \b
    Examples:
      axonn-tune suggest --gpus 1024 --model 80b
      axonn-tune explain --gpus 1024 --model 80b --grid 1x4x64x4
      axonn-tune run --grid 2x2x1x2 --model tiny
    """


def main(args: list[str] | None = None) -> Any:
    """Run the command line; report bad input in one line on stderr and exit with 2."""
    given = sys.stdout
    sys.stdout = _writing_all(given)
    try:
        result = cli.main(args=args, prog_name="axonn-tune", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return result
    except AxonnTuneError as error:
        _fail(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.NoSuchOption as error:
        _fail(_not_executed(error) or error.format_message())
    except click.ClickException as error:
        _fail(_in_plain_words(error.format_message()))
    except ModuleNotFoundError as error:
        if error.name not in _INSTALLS:
            raise
        _fail(f"this command needs {error.name}: {_INSTALLS[error.name]}")
    except click.Abort:
        sys.exit(130)
    except OSError as error:
        _drop_output()
        if error.errno == errno.EPIPE:  # The reader has left (`| head`).
            sys.exit(1)
        where = f"{error.filename}: " if error.filename else ""
        _fail(where + (error.strerror or str(error)).lower())
    finally:
        if sys.stdout is not given:
            _give_back(sys.stdout)
            sys.stdout = given


def _in_plain_words(message: str) -> str:
    """Return a message of click's with the names that users have for its types."""
    for name, plain in _TYPES.items():
        message = re.sub(rf" is not a valid {name}( range)?\.$", f" is not {plain}.", message)
    return message


def _not_executed(error: click.NoSuchOption) -> str | None:
    """Say that only predictions have an option, and runs do not; return None for other options."""
    from axonn_tune.options import SwitchOptions, declared

    command = error.ctx.info_name if error.ctx is not None else None
    name = error.option_name.lstrip("-").removeprefix("no-").replace("-", "_")
    if command not in _EXECUTING or name not in declared(SwitchOptions):
        return None
    return (
        f"{command} has no {error.option_name}, which is predicted (suggest, explain, compare) and "
        "not executed; leave it out"
    )


def _give_back(stream: Any) -> None:
    """Take a stream of `_writing_all` apart without closing what it writes to."""
    with suppress(OSError, ValueError):
        stream.detach().detach()


def _writing_all(stream: Any) -> Any:
    """Return an output stream that writes all of a text or fails.

    With PYTHONUNBUFFERED set, Python's own writes what fits on the disk and says nothing.
    """
    raw = getattr(stream, "buffer", None)
    if not isinstance(raw, io.RawIOBase):
        return stream
    whole = io.BufferedWriter(raw)
    return io.TextIOWrapper(whole, stream.encoding, stream.errors, line_buffering=True)


def _drop_output() -> None:
    """Keep Python from trying at its end to write what could not be written, and failing again."""
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> None:
    with suppress(OSError):
        click.echo("axonn-tune: " + shortened(one_line(message)), err=True)
    sys.exit(2)


if __name__ == "__main__":
    from axonn_tune.cli.start import run

    run()
