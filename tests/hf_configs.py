"""Configs of Hugging Face from plain sizes."""

from typing import Any


def sizes(kind: str, *counts: int, **others: Any) -> dict[str, Any]:
    """Return a config with hidden size, layers, heads, KV heads, MLP and vocabulary."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys += ("intermediate_size", "vocab_size")
    config = {"model_type": kind, "max_position_embeddings": 4096}
    return config | dict(zip(keys, counts, strict=True)) | others
