"""What ``models`` shows: model presets as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from axonn_tune.report.table import Column, cited_values, table_of
from axonn_tune.spec.model import Model
from axonn_tune.units import format_count

_COLUMNS: tuple[Column[Model], ...] = (
    ("model", lambda model: model.name),
    ("parameters", lambda model: format_count(model.parameters)),
    ("active", lambda model: "-" if model.is_dense else format_count(model.active_parameters)),
    ("layers", lambda model: model.n_layers),
    ("hidden", lambda model: model.hidden_size),
    ("heads", lambda model: model.n_heads),
    ("KV heads", lambda model: "latent" if model.latent_attention else model.n_kv_heads),
    ("window", lambda model: model.window or "-"),
    ("MLP", lambda model: _mlp_text(model)),
    ("vocabulary", lambda model: model.vocab_size),
    ("sequence", lambda model: model.seq_len),
)


def models_table(models: Sequence[Model]) -> str:
    """Return a table with one row per model."""
    return table_of(models, _COLUMNS)


def model_text(model: Model) -> str:
    """Return all fields of a model that say something, and what follows from them."""
    values = {item.name: getattr(model, item.name) for item in fields(model)}
    pairs = [(name, _text(value)) for name, value in values.items() if _says_something(value)]
    flops = model.model_flops(1.0, model.seq_len)
    pairs += [
        ("parameters", _count_text(model.parameters)),
        *([] if model.is_dense else [("active parameters", _count_text(model.active_parameters))]),
        ("padded_vocab_size", str(model.padded_vocab_size)),
        ("model FLOPs per token", f"{flops:.4g} at sequence length {model.seq_len}"),
    ]
    blocks = model.blocks
    for name, n_layers in (
        ("layers with experts", sum(block.has_experts for block in blocks)),
        ("layers with a window", sum(block.window > 0 for block in blocks)),
    ):
        if n_layers:
            pairs.append((name, f"{n_layers} of {len(blocks)}"))
    return cited_values(pairs)


def _mlp_text(model: Model) -> str:
    """Return the inner features of the MLP, or of the experts with their numbers."""
    experts = model.experts
    if experts is None:
        return str(model.ffn_hidden_size)
    return f"{experts.top_k} of {experts.n_experts} x {experts.hidden_size}"


def _says_something(value: object) -> bool:
    """Return whether a field's value is more than the absence of something."""
    return isinstance(value, bool) or value not in ("", None, 0)


def _text(value: Any) -> str:
    """Return a field's value, or the names and values of a record's fields."""
    if not is_dataclass(value):
        return str(value)
    entries = {item.name: getattr(value, item.name) for item in fields(value)}
    return ", ".join(f"{name} {entry}" for name, entry in entries.items())


def _count_text(parameters: float) -> str:
    return f"{parameters:.0f} ({format_count(parameters)})"
