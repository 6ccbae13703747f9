"""Tables of the numbers of machines and engines that are fitted, assumed or taken from sources."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.report.engines import stated_facts
from axonn_tune.reproduce.comparison import grouped
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.provenance import quantities
from axonn_tune.spec.quantity import ORIGINS

FITTED_HEADERS = ("number", "value", "of", "fitted to")
ORIGIN_HEADERS = ("profile", *ORIGINS, "GEMM tiles with assumed relative speeds")
ASSUMED_HEADERS = ("assumed number", "value", "profiles")
ENGINE_HEADERS = ("engines", "number", "value", "origin", "source")


def fitted_rows(machines: Sequence[Machine], engines: Sequence[Engine]) -> list[list[str]]:
    """Return a row for each fitted number, with the profiles or engines that have it."""
    numbers = [
        ((f"`{name}`", f"{number.value:g}", number.source), machine.name)
        for machine in machines
        for name, number in quantities(machine)
        if number.origin == "fitted"
    ]
    numbers += [
        ((f"`{fact.name}`", fact.value, fact.source), engine.name)
        for engine in engines
        for fact in stated_facts(engine)
        if fact.origin == "fitted"
    ]
    return [
        [name, value, _names(owners), source]
        for (name, value, source), owners in grouped(numbers, lambda pair: pair[0]).items()
    ]


def origin_rows(machines: Sequence[Machine]) -> list[list[str]]:
    """Return how many numbers of each profile have each origin."""
    rows = []
    for machine in machines:
        origins = [number.origin for _, number in quantities(machine)]
        counts = [str(origins.count(origin)) for origin in ORIGINS]
        rows.append([machine.name, *counts, str(len(machine.gemm.tiles))])
    return rows


def assumed_rows(machines: Sequence[Machine]) -> list[list[str]]:
    """Return a row for each assumed number of profiles, with those that have it."""
    numbers = [
        ((name, f"{number.value:g}"), machine.name)
        for machine in machines
        for name, number in quantities(machine)
        if number.origin == "assumed"
    ]
    groups = grouped(sorted(numbers), lambda pair: pair[0]).items()
    return [[f"`{name}`", value, _names(owners)] for (name, value), owners in groups]


def engine_rows(engines: Sequence[Engine]) -> list[list[str]]:
    """Return a row for each number of engines that is not fitted, with those that have it."""
    numbers = [
        ((f"`{fact.name}`", fact.value, fact.origin, fact.source), engine.name)
        for engine in engines
        for fact in stated_facts(engine)
        if fact.origin not in ("", "fitted")
    ]
    groups = grouped(numbers, lambda pair: pair[0]).items()
    return [[_names(owners), *number] for number, owners in groups]


def _names(owners: Sequence[tuple[tuple[str, ...], str]]) -> str:
    return ", ".join(name for _, name in owners)
