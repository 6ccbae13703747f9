"""What ``models`` shows: model presets as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from axonn_tune.report.table import Column, key_values, table_of
from axonn_tune.spec.model import Model
from axonn_tune.units import format_count

_COLUMNS: tuple[Column[Model], ...] = (
    ("model", lambda model: model.name),
    ("parameters", lambda model: format_count(model.parameters)),
    ("layers", lambda model: model.n_layers),
    ("hidden", lambda model: model.hidden_size),
    ("heads", lambda model: model.n_heads),
    ("KV heads", lambda model: model.n_kv_heads),
    ("MLP", lambda model: model.ffn_hidden_size),
    ("vocabulary", lambda model: model.vocab_size),
    ("sequence", lambda model: model.seq_len),
)


def models_table(models: Sequence[Model]) -> str:
    """Return a table with one row per model."""
    return table_of(models, _COLUMNS)


def model_text(model: Model) -> str:
    """Return all fields of a model that say something, and what follows from them."""
    values = {item.name: getattr(model, item.name) for item in fields(model)}
    pairs = [(name, str(value)) for name, value in values.items() if value not in ("", None)]
    flops = model.model_flops(1.0, model.seq_len)
    pairs += [
        ("parameters", f"{model.parameters:.0f} ({format_count(model.parameters)})"),
        ("padded_vocab_size", str(model.padded_vocab_size)),
        ("model FLOPs per token", f"{flops:.4g} at sequence length {model.seq_len}"),
    ]
    return key_values(pairs)
