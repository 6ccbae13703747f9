"""What ``engines`` shows: the facts of engines as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from textwrap import wrap
from typing import Any

from axonn_tune.report.table import Column, key_values, table_of
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.quantity import Quantity
from axonn_tune.units import format_quantity

_NOT_FACTS = ("name", "title", "strategies", "description", "package")


@dataclass(frozen=True)
class Fact:
    """One fact of an engine: its dotted name, its value as text, and how it is known."""

    name: str
    value: str
    origin: str = ""
    source: str = ""


def _few_of(strategies: Sequence[str]) -> str:
    """Return the names of strategies as a cell of a table, which counts those after the second."""
    shown = ", ".join(strategies[:2])
    n_others = len(strategies[2:])
    return f"{shown} and {n_others} more" if n_others else shown


_ENGINE_COLUMNS: tuple[Column[Engine], ...] = (
    ("engine", lambda engine: engine.name),
    ("is", lambda engine: engine.title),
    ("carries out", lambda engine: _few_of(engine.strategies)),
    ("offloads", lambda engine: "no" if engine.offload is None else "yes"),
    ("numbers", lambda engine: sum(bool(fact.origin) for fact in stated_facts(engine))),
)


def engines_table(engines: Sequence[Engine]) -> str:
    """Return a table with one row per engine."""
    return table_of(engines, _ENGINE_COLUMNS)


def engine_text(engine: Engine) -> str:
    """Return what an engine is, and the facts in which it is not ideal."""
    head = [("engine", engine.name), ("is", engine.title)]
    head.append(("carries out", ", ".join(engine.strategies)))
    if engine.package:
        head.append(("run with", engine.package))
    parts = [key_values(head), engine.description.strip()]
    facts = stated_facts(engine)
    lines = [line for fact in facts for line in _fact_lines(fact)]
    parts.append("\n".join(lines) or "It runs what its strategies say.")
    return "\n\n".join(part for part in parts if part)


def _fact_lines(fact: Fact) -> list[str]:
    """Return a fact, and below it how a number is known."""
    known = f"{fact.origin}: {fact.source}" if fact.origin else ""
    return [
        f"{fact.name} = {fact.value}",
        *wrap(known, 92, initial_indent="    ", subsequent_indent="    "),
    ]


def difference_text(old: Engine, new: Engine) -> str:
    """Return a table of the facts in which two engines differ."""
    before, after = ({fact.name: fact for fact in _facts(engine)} for engine in (old, new))
    names = [name for name in {**before, **after} if _value(before, name) != _value(after, name)]
    if not names:
        return f"{old.name} and {new.name} do not differ in any fact."
    columns: tuple[Column[str], ...] = (
        ("fact", lambda name: name),
        (old.name, lambda name: _value(before, name)),
        (new.name, lambda name: _value(after, name)),
    )
    return table_of(names, columns)


def _value(facts: Mapping[str, Fact], name: str) -> str:
    """Return the value of a fact; a fact that an engine does not state is as the strategy says."""
    return facts[name].value if name in facts else "ideal"


def stated_facts(engine: Engine) -> list[Fact]:
    """Return the facts in which an engine differs from one that carries out ideal operations."""
    ideal = {fact.name: fact.value for fact in _facts(Engine())}
    return [fact for fact in _facts(engine) if ideal.get(fact.name) != fact.value]


def _facts(engine: Engine) -> list[Fact]:
    """Return all facts of an engine."""
    return [
        fact
        for item in fields(engine)
        if item.name not in _NOT_FACTS
        for fact in _flattened(item.name, getattr(engine, item.name))
    ]


def _flattened(name: str, value: Any) -> Iterator[Fact]:
    """Yield the facts of a field, of its fields, and so on."""
    if name == "offload":
        yield Fact(name, "none" if value is None else ", ".join(value.moved))
    elif isinstance(value, Quantity):
        number = format_quantity(value.value, name)
        yield Fact(name, number, value.origin, value.source)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flattened(f"{name}.{key}", item)
    elif is_dataclass(value):
        for item_field in fields(value):
            yield from _flattened(f"{name}.{item_field.name}", getattr(value, item_field.name))
    elif isinstance(value, tuple):
        yield Fact(name, ", ".join(map(str, value)) or "none")
    elif isinstance(value, bool):
        yield Fact(name, "yes" if value else "no")
    elif value is not None:
        yield Fact(name, f"{value:g}" if isinstance(value, float | int) else str(value))
