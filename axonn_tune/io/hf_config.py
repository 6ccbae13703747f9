"""Read a model from a Hugging Face ``config.json`` without the package transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.files import read_text
from axonn_tune.io.json_files import parse_json
from axonn_tune.spec.checks import LARGEST_COUNT, LONGEST_NAME, is_name
from axonn_tune.spec.model import Model


@dataclass(frozen=True)
class _Architecture:
    """How the configs of one architecture map to the fields of `Model`.

    Parameters
    ----------
    counts, optional_counts : mapping of str to str
        The key of the config for each whole number of `Model`.
    flags : mapping of str to bool
        The keys of the config that hold flags, with their defaults in transformers.
    fixed : mapping
        Fields of `Model` that are the same for all models of the architecture.
    """

    counts: Mapping[str, str]
    optional_counts: Mapping[str, str]
    flags: Mapping[str, bool]
    fixed: Mapping[str, Any] = field(default_factory=dict)


_COUNTS = {
    "n_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
}
_GATED = {"gated_mlp": True, "norm": "rms", "position": "rotary"}

_ARCHITECTURES = {
    "gpt2": _Architecture(
        counts={
            "n_layers": "n_layer",
            "hidden_size": "n_embd",
            "n_heads": "n_head",
            "vocab_size": "vocab_size",
            "seq_len": "n_positions",
        },
        optional_counts={"ffn_hidden_size": "n_inner"},
        flags={"tie_word_embeddings": True},
        fixed={"position": "learned"},
    ),
    "gpt_neox": _Architecture(
        counts=_COUNTS,
        optional_counts={},
        flags={
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
        fixed={"position": "rotary"},
    ),
    "llama": _Architecture(
        counts=_COUNTS,
        optional_counts={"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"},
        flags={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
        fixed=_GATED,
    ),
    "mistral": _Architecture(
        counts=_COUNTS | {"n_kv_heads": "num_key_value_heads"},
        optional_counts={"head_dim": "head_dim"},
        flags={"tie_word_embeddings": False},
        fixed=_GATED | {"bias": False},
    ),
}
# The field of Model for each flag of a config.
_FLAG_FIELDS = {
    "tie_word_embeddings": "tied_embeddings",
    "use_parallel_residual": "parallel_block",
    "attention_bias": "qkv_bias",
    "mlp_bias": "bias",
}


def load_hf_config(path: Path) -> Model:
    """Return the model that a ``config.json`` describes.

    Raises
    ------
    FileError
        The file is missing or is not a JSON object.
    InputError
        The config has an unsupported architecture, or missing or wrong keys.
    """
    config = parse_json(read_text(path), path)
    if not isinstance(config, dict):
        raise FileError(f"{path}: not a Hugging Face config; allowed: a JSON object")
    return model_from_hf(config, str(path))


def model_from_hf(config: Mapping[str, Any], origin: str) -> Model:
    """Return the model that the content of a ``config.json`` describes.

    The attention projection has biases if ``mlp_bias`` is set (LLaMA) or always (NeoX).

    Parameters
    ----------
    origin : str
        The file of the config, as error messages and the model's source call it.

    Raises
    ------
    InputError
        The architecture is not supported, or keys are missing or wrong; the message has all of
        them.
    """
    kind = config.get("model_type")
    architecture = _ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if architecture is None:
        problem = f"model_type {kind!r} is not supported" if kind else "there is no model_type"
        raise InputError(f"{origin}: {problem}; supported: {', '.join(_ARCHITECTURES)}")
    keys = {**architecture.counts, **architecture.optional_counts}
    missing = [key for key in architecture.counts.values() if config.get(key) is None]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    counts = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
    problems += [
        f"{keys[name]} is {value!r}; allowed: a whole number, at least 1"
        for name, value in counts.items()
        if not _is_count(value)
    ]
    flags: dict[str, Any] = {}
    for key, default in architecture.flags.items():
        flag = default if config.get(key) is None else config[key]
        flags[_FLAG_FIELDS[key]] = flag
        if not isinstance(flag, bool):
            problems.append(f"{key} is {flag!r}; allowed: true or false")
    if not problems and "head_dim" not in counts and counts["hidden_size"] % counts["n_heads"]:
        problems.append(
            f"{keys['hidden_size']} is {counts['hidden_size']}; allowed: a multiple of "
            f"{keys['n_heads']} ({counts['n_heads']})"
        )
    name = _name(config, origin)
    if not is_name(name):
        problems.append(f"its name is {name[:LONGEST_NAME]!r}, which cannot be printed on one line")
    if problems:
        raise InputError(f"{origin} ({kind}): " + "; ".join(problems))
    try:
        return Model(
            name=name,
            source=_source(config, origin),
            **counts,
            **flags,
            **architecture.fixed,
        )
    except InputError as error:
        raise InputError(f"{origin}: {error}") from None


def _is_count(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 1 <= value <= LARGEST_COUNT


def _name(config: Mapping[str, Any], origin: str) -> str:
    """Return the name that the config gives itself, or else that of its folder or file."""
    given = config.get("_name_or_path")
    path = PurePath(given if isinstance(given, str) and given else origin)
    if path.name == "config.json":
        return path.parent.name or config["model_type"]
    return path.stem if path.suffix == ".json" else path.name


def _source(config: Mapping[str, Any], origin: str) -> str:
    window = config.get("sliding_window")
    note = f"; its sliding window of {window} tokens is ignored" if window else ""
    return f"Hugging Face config {origin}{note}"
