"""Read a model from a Hugging Face ``config.json`` without the package transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    defaults : mapping of str to int
        What transformers takes for keys of `counts` that a config lacks.
    flags : mapping of str to bool
        The keys of the config that hold flags, with their defaults in transformers.
    fixed : mapping
        Fields of `Model` that are the same for all models of the architecture.
    derived : callable, optional
        Returns fields of `Model` that follow from the checked config.
    not_modelled : tuple of str
        What all models of the architecture have and predictions leave out.
    """

    counts: Mapping[str, str]
    optional_counts: Mapping[str, str]
    flags: Mapping[str, bool]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    not_modelled: tuple[str, ...] = ()


def _falcon_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the switches of a Falcon config."""
    is_parallel = config["parallel_attn"]
    is_new = config["new_decoder_architecture"]
    n_norms = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    fields: dict[str, Any] = {
        "parallel_block": is_parallel,
        "norms_per_block": n_norms if is_parallel else 2,
        "position": "none" if config["alibi"] else "rotary",
    }
    if not is_new:  # The numbers of heads of keys and values count in the new architecture only.
        fields["n_kv_heads"] = 1 if config["multi_query"] else config["num_attention_heads"]
    return fields


_COUNTS = {
    "n_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
}
_KV_HEADS = {"n_kv_heads": "num_key_value_heads"}
_HEAD_DIM = {"head_dim": "head_dim"}
_GATED = {"gated_mlp": True, "norm": "rms", "position": "rotary"}
_UNBIASED = _GATED | {"bias": False}
_QK_NORM = "norms of queries and keys"

# Defaults are those of configuration_*.py in transformers, and what cannot be seen in a config
# (biases of Qwen2, norms of Gemma and OLMo 2) is that of modeling_*.py.
_GEMMA3 = _Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags={"tie_word_embeddings": True, "attention_bias": False},
    fixed=_UNBIASED | {"norms_per_block": 4},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    not_modelled=(_QK_NORM,),
)
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
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
        fixed=_GATED,
    ),
    "mistral": _Architecture(
        counts=_COUNTS | _KV_HEADS,
        optional_counts=_HEAD_DIM,
        flags={"tie_word_embeddings": False},
        fixed=_UNBIASED,
    ),
    "qwen2": _Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags={"tie_word_embeddings": False},
        fixed=_UNBIASED | {"qkv_bias": True},
    ),
    "qwen3": _Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": False, "attention_bias": False},
        fixed=_UNBIASED,
        defaults={"head_dim": 128},
        not_modelled=(_QK_NORM,),
    ),
    "gemma2": _Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": True, "attention_bias": False},
        fixed=_UNBIASED | {"norms_per_block": 4},
        defaults={"num_key_value_heads": 4, "head_dim": 256},
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": _Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags={"tie_word_embeddings": False},
        fixed=_UNBIASED,
    ),
    "falcon": _Architecture(
        counts={name: key for name, key in _COUNTS.items() if name != "ffn_hidden_size"},
        optional_counts={"n_kv_heads": "num_kv_heads", "ffn_hidden_size": "ffn_hidden_size"},
        flags={
            "tie_word_embeddings": True,
            "bias": False,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "multi_query": True,
            "alibi": False,
        },
        defaults={"max_position_embeddings": 2048},
        derived=_falcon_fields,
    ),
    "olmo2": _Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags={"tie_word_embeddings": False, "attention_bias": False},
        fixed=_UNBIASED,
        not_modelled=(_QK_NORM,),
    ),
}
# The field of Model for flags of configs; other flags serve `derived`.
_FLAG_FIELDS = {
    "tie_word_embeddings": "tied_embeddings",
    "use_parallel_residual": "parallel_block",
    "attention_bias": "qkv_bias",
    "mlp_bias": "bias",
    "bias": "bias",
}
# Keys of older configs, with the keys that replaced them.
_OLD_KEYS = {
    "falcon": {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
    }
}
# Keys with which configs of mixtures of experts say how many experts there are.
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


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

    The attention projection has biases if ``mlp_bias`` is set (LLaMA) or always (NeoX). Of a
    model for images and text, this is the model for text.

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
        raise InputError(f"{origin}: {_unsupported(config)}")
    full = _completed(config, str(kind), architecture)
    keys = {**architecture.counts, **architecture.optional_counts}
    missing = [key for key in architecture.counts.values() if full.get(key) is None]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    counts = {name: full[key] for name, key in keys.items() if full.get(key) is not None}
    problems += [
        f"{keys[name]} is {value!r}; allowed: a whole number, at least 1"
        for name, value in counts.items()
        if not _is_count(value)
    ]
    problems += [
        f"{key} is {full[key]!r}; allowed: true or false"
        for key in architecture.flags
        if not isinstance(full[key], bool)
    ]
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
    flags = {_FLAG_FIELDS[key]: full[key] for key in architecture.flags if key in _FLAG_FIELDS}
    derived = architecture.derived(full) if architecture.derived else {}
    try:
        return Model(
            name=name,
            source=f"Hugging Face config {origin}",
            seq_len_key="" if architecture.fixed.get("position") == "learned" else keys["seq_len"],
            not_modelled=", ".join(
                [*architecture.not_modelled, *_not_modelled({**config, **full})]
            ),
            **{**counts, **flags, **architecture.fixed, **derived},
        )
    except InputError as error:
        raise InputError(f"{origin}: {error}") from None


def _unsupported(config: Mapping[str, Any]) -> str:
    """Say why a config cannot be read, and what its user can do."""
    kind = config.get("model_type")
    experts = [key for key in _EXPERT_KEYS if _is_count(config.get(key)) and config[key] > 1]
    if experts:
        return (
            f"model_type {kind!r} is a mixture of experts ({experts[0]} is {config[experts[0]]}), "
            "and predictions know dense models only: routing, expert parallelism and all-to-all "
            "are missing; `axonn-tune models template` writes a YAML file for a dense model"
        )
    problem = f"model_type {kind!r} is not supported" if kind else "there is no model_type"
    return (
        f"{problem}; supported: {', '.join(_ARCHITECTURES)}; `axonn-tune models template` writes "
        "a YAML file for another dense decoder"
    )


def _completed(config: Mapping[str, Any], kind: str, architecture: _Architecture) -> dict[str, Any]:
    """Return the part of a config for text, with its keys of today and transformers' defaults."""
    nested = config.get("text_config")
    config = nested if isinstance(nested, dict) else config
    renamed = {_OLD_KEYS.get(kind, {}).get(key, key): value for key, value in config.items()}
    given = {key: value for key, value in renamed.items() if value is not None}
    return {**architecture.defaults, **architecture.flags, **given}


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


def _not_modelled(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a config has and predictions leave out."""
    window = config.get("sliding_window")
    if _is_count(window) and config.get("use_sliding_window") is not False:
        yield f"the sliding window of {window} tokens (attention sees all of them)"
    if any(config.get(f"{logits}_logit_softcapping") for logits in ("attn", "final")):
        yield "soft caps of logits"
    if config.get("alibi"):
        yield "ALiBi"
    if "vision_config" in config:
        yield "images"
