"""``axonn-tune plan``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    format_option,
    output_option,
    plan_options,
    quiet_option,
)
from axonn_tune.cli.progress import Progress

if TYPE_CHECKING:
    from axonn_tune.search.search import Search


@click.command("plan")
@click.option(
    "--gpus",
    type=click.IntRange(min=1),
    help="Number of GPUs to plan for.  [default: what suits --deadline, or the budget]",
)
@plan_options
@click.option(
    "--tokens",
    help="Number of tokens of the whole run: 2T, 300B.  [default: what the budget buys, or 20 per "
    "parameter, Chinchilla's of dense models]",
)
@click.option(
    "--deadline",
    metavar="TIME",
    help="Time in which the run must finish, or must spend its budget: 30d, 12h.",
)
@click.option(
    "--node-hours",
    metavar="HOURS",
    help="Budget, such as 200k; the plan takes the GPUs that finish soonest within it (with "
    "--deadline, those that take least of it), or those that train most.",
)
@click.option("--gpu-hours", metavar="HOURS", help="The same budget in hours of a GPU: 1.6M.")
@click.option("--gpu-mtbf", metavar="TIME", help="Mean time between interruptions of one GPU: 6y.")
@click.option(
    "--restart", metavar="TIME", help="Time from an interruption to the next step: 10min."
)
@click.option("--storage", metavar="RATE", help="Rate at which a checkpoint is written: 1TB/s.")
@click.option("--node-power", metavar="POWER", help="Power of a node at work: 2.5kW.")
@click.option("--node-hour-price", metavar="PRICE", help="Price of a node for an hour: 20USD.")
@quiet_option
@format_option("table", "json", "csv")
@output_option
def command(
    gpus: int | None,
    tokens: str | None,
    deadline: str | None,
    node_hours: str | None,
    gpu_hours: str | None,
    gpu_mtbf: str | None,
    restart: str | None,
    storage: str | None,
    node_power: str | None,
    node_hour_price: str | None,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Plan a whole training run: GPUs, days, node-hours, energy, money.

    The plan takes the best layout's step as often as the tokens need it, adds failures at random,
    and writes checkpoints as often as is best. Options name facts of the site that the machine's
    profile does not state.

    With --gpus the plan says whether these meet the deadline and the budget, and with which
    probability. Without, a deadline takes the fewest GPUs that meet it, and a budget those that
    finish soonest within it. With both, the plan takes the fewest node-hours that meet the
    deadline. If no GPUs keep to the budget, or no tokens are named, it buys as many tokens as it
    can.

    \b
    Examples:
      axonn-tune plan --model 80b --tokens 2T --deadline 30d
      axonn-tune plan --model 80b --tokens 2T --gpus 2048 --deadline 30d
      axonn-tune plan --model 80b --tokens 1T --node-hours 250k
      axonn-tune plan --model 80b --tokens 1T --node-hours 250k --deadline 60d
      axonn-tune plan --model 80b --node-hours 250k --deadline 60d
      axonn-tune plan --model 80b --tokens 2T --gpus 4096 --node-hour-price 12.5USD
      axonn-tune plan --model 20b --gpus 512 --machine frontier --gpu-mtbf 3y
    """
    from axonn_tune.api.searching import build_search
    from axonn_tune.cli.output import detail_shown, emit_as, with_machine_remark
    from axonn_tune.report import plan as report
    from axonn_tune.studies.limits import Limits
    from axonn_tune.studies.run_plan import plan_run
    from axonn_tune.units import parse_count

    limits = Limits(
        None if deadline is None else _amount(deadline, "deadline_seconds", "--deadline"),
        None if node_hours is None else _hours(node_hours, "--node-hours"),
        None if gpu_hours is None else _hours(gpu_hours, "--gpu-hours"),
    )
    search = _at_site(
        build_search(gpus=gpus or 1, **options),
        gpu_mtbf=gpu_mtbf,
        restart=restart,
        storage=storage,
        node_power=node_power,
        node_hour_price=node_hour_price,
    )
    n_tokens = None if tokens is None else parse_count(tokens, "--tokens")
    plan = plan_run(
        search,
        n_tokens,
        limits,
        gpus is not None,
        Progress("Searching", quiet),
        detail_shown(output_format),
    )
    emit_as(
        output_format,
        output,
        table=lambda: with_machine_remark(report.training_text(plan), options["machine"]),
        json=lambda: report.training_document(plan),
        csv=lambda: report.training_flat_records(plan),
    )


def _at_site(
    search: Search,
    *,
    gpu_mtbf: str | None,
    restart: str | None,
    storage: str | None,
    node_power: str | None,
    node_hour_price: str | None,
) -> Search:
    """Return the search with the given facts of the site in its machine's profile."""
    from axonn_tune.spec.quantity import Quantity

    given = (
        ("--gpu-mtbf", "gpu_mtbf_seconds", gpu_mtbf),
        ("--restart", "restart_seconds", restart),
        ("--storage", "checkpoint_bytes_per_s", storage),
        ("--node-power", "node_power_watts", node_power),
    )
    changes: dict[str, Any] = {
        field: Quantity(_amount(text, field, flag), "assumed", f"given with {flag}")
        for flag, field, text in given
        if text is not None
    }
    if node_hour_price is not None:
        price, currency = _price(node_hour_price)
        changes["node_hour_price"] = Quantity(price, "assumed", "given with --node-hour-price")
        changes["currency"] = currency
    machine = search.scenario.machine
    return search.on(replace(machine, facility=replace(machine.facility, **changes)))


def _amount(text: str, field: str, flag: str) -> float:
    """Return a quantity above zero, in the unit that the field's name ends in."""
    from axonn_tune.errors import InputError
    from axonn_tune.units import parse_quantity

    try:
        value = parse_quantity(text, field)
    except InputError as error:
        raise InputError(f"{flag}: {str(error).removeprefix(f'{field}: ')}") from None
    return _above_zero(value, text, flag)


def _hours(text: str, flag: str) -> float:
    """Return a number of hours above zero."""
    from axonn_tune.units import parse_count

    return _above_zero(parse_count(text, flag), text, flag)


def _above_zero(value: float, text: str, flag: str) -> float:
    """Return a finite value above zero, and refuse another one."""
    from axonn_tune.errors import InputError

    if not 0 < value < float("inf"):
        raise InputError(f"{flag} {text}: allowed: a finite number above zero")
    return value


def _price(text: str) -> tuple[float, str]:
    """Return a price and its currency."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([^\s\d]+)\s*", text)
    if match is None:
        raise click.BadParameter(
            f"'{text}' is not a price with its currency, such as 20USD",
            param_hint="--node-hour-price",
        )
    return float(match[1]), match[2]
