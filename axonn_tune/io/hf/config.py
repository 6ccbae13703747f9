"""Read a model from a Hugging Face ``config.json`` without the package transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.files import read_text
from axonn_tune.io.hf.architectures import (
    ARCHITECTURES,
    FLAG_FIELDS,
    OTHER_KEYS,
    Architecture,
)
from axonn_tune.io.hf.hybrids import layers_beyond_attention
from axonn_tune.io.json_files import parse_json
from axonn_tune.spec.blocks import Experts, LatentAttention
from axonn_tune.spec.checks import LARGEST_COUNT, LONGEST_NAME, is_name
from axonn_tune.spec.model import MOST_LAYERS, Model

# The fields of Model that are records; the names of their own fields have these as prefixes.
_RECORDS = {"experts": Experts, "latent_attention": LatentAttention}


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

    If the config is that of a model for images and text, its part for text counts.

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
    kind = _kind(config)
    if kind not in ARCHITECTURES:
        raise InputError(f"{origin}: {_unsupported(config)}")
    architecture = ARCHITECTURES[kind]
    full = _completed(config, kind, architecture)
    problems = _problems(full, architecture)
    name = _name(config, origin)
    if not is_name(name):
        problems.append(f"its name is {name[:LONGEST_NAME]!r}, which cannot be printed on one line")
    if problems:
        raise InputError(f"{origin} ({kind}): " + "; ".join(problems))
    try:
        fields = _fields(full, architecture)
        left_out = [*fields.pop("not_modelled"), *_not_modelled({**config, **full})]
        is_learned = fields.get("position") == "learned"
        return Model(
            name=name,
            source=f"Hugging Face config {origin}",
            seq_len_key="" if is_learned else architecture.counts["seq_len"],
            not_modelled=", ".join(left_out),
            **fields,
        )
    except InputError as error:
        raise InputError(f"{origin}: {error}") from None


def _kind(config: Mapping[str, Any]) -> str:
    """Return the architecture of a config, or that of its part for text."""
    kinds = [str(part.get("model_type")) for part in (config, _text_part(config))]
    return next((kind for kind in kinds if kind in ARCHITECTURES), kinds[0])


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes the model for text."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _unsupported(config: Mapping[str, Any]) -> str:
    """Say why a config cannot be read, and what its user can do."""
    kind = config.get("model_type")
    problem = f"model_type {kind!r} is not supported" if kind else "there is no model_type"
    if layers := layers_beyond_attention(_text_part(config)):
        return (
            f"{problem}: its architecture has {layers}, which are not modelled; allowed: a decoder "
            "whose layers have softmax attention and an MLP or experts"
        )
    return (
        f"{problem}; supported: {', '.join(ARCHITECTURES)}; `axonn-tune models template` writes "
        "a YAML file for another decoder, dense or with experts"
    )


def _completed(config: Mapping[str, Any], kind: str, architecture: Architecture) -> dict[str, Any]:
    """Return the part of a config for text, with its keys of today and transformers' defaults."""
    # transformers 5 ties the embeddings of a model for images and text by the flag of the whole.
    tied = {key: config[key] for key in ("tie_word_embeddings",) if config.get(key) is not None}
    config = {**_text_part(config), **tied}
    names = OTHER_KEYS.get(kind, {})
    counts = {*architecture.counts.values(), *architecture.optional_counts.values()}
    renamed = {names.get(key, key): value for key, value in config.items()}
    renamed |= {key: _one_of_equals(renamed[key]) for key in counts & renamed.keys()}
    given = {key: value for key, value in renamed.items() if value is not None}
    nulls = {key: 0 for key in architecture.numbers if key in renamed and renamed[key] is None}
    defaults = {**architecture.defaults, **architecture.numbers, **architecture.periods}
    return {**defaults, **architecture.flags, **given, **nulls}


def _one_of_equals(value: object) -> object:
    """Return the number that a list states for each layer, if it states the same for all."""
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _problems(full: Mapping[str, Any], architecture: Architecture) -> list[str]:
    """Return what is missing or wrong among the keys of an architecture."""
    missing = [key for key in architecture.counts.values() if full.get(key) is None]
    problems = [f"missing {', '.join(missing)}"] if missing else []
    counts = _counts(full, architecture)
    keys = {**architecture.counts, **architecture.optional_counts}
    from_one = {keys[name]: value for name, value in counts.items()}
    from_one |= {key: full[key] for key in architecture.periods}
    problems += [
        f"{key} is {value!r}; allowed: a whole number, 1 to {LARGEST_COUNT}"
        for key, value in from_one.items()
        if not _is_number(value, 1)
    ]
    problems += [
        f"{key} is {full[key]!r}; allowed: a whole number, 0 to {LARGEST_COUNT}"
        for key in architecture.numbers
        if not _is_number(full[key], 0)
    ]
    problems += [
        f"{key} is {full[key]!r}; allowed: true or false"
        for key in architecture.flags
        if not isinstance(full[key], bool)
    ]
    if not problems and counts["n_layers"] > MOST_LAYERS:
        problems.append(
            f"{keys['n_layers']} is {counts['n_layers']}; allowed: at most {MOST_LAYERS}"
        )
    states_heads = bool(counts.keys() & {"head_dim", "latent_attention.kv_rank"})
    if not problems and not states_heads and counts["hidden_size"] % counts["n_heads"]:
        problems.append(
            f"{keys['hidden_size']} is {counts['hidden_size']}; allowed: a multiple of "
            f"{keys['n_heads']} ({counts['n_heads']})"
        )
    return problems


def _counts(full: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the fields whose whole numbers a config states."""
    keys = {**architecture.counts, **architecture.optional_counts}
    return {name: full[key] for name, key in keys.items() if full.get(key) is not None}


def _fields(full: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the fields of `Model` that follow from a checked config."""
    flags = {name: full[key] for key in architecture.flags for name in FLAG_FIELDS.get(key, ())}
    flat = {**_counts(full, architecture), **flags, **architecture.fixed}
    left_out = architecture.not_modelled
    for rule in architecture.derived:
        derived = rule(full)
        left_out += derived.pop("not_modelled", ())
        flat |= derived
    fields: dict[str, Any] = {name: value for name, value in flat.items() if "." not in name}
    for name, record in _RECORDS.items():
        of_record = {
            key.removeprefix(f"{name}."): value
            for key, value in flat.items()
            if key.startswith(f"{name}.")
        }
        if of_record:
            fields[name] = record(**of_record)
    return fields | {"not_modelled": left_out}


def _is_number(value: object, least: int) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least <= value <= LARGEST_COUNT


def _name(config: Mapping[str, Any], origin: str) -> str:
    """Return the name that the config gives itself, or else that of its folder or file."""
    given = config.get("_name_or_path")
    path = PurePath(given if isinstance(given, str) and given else origin)
    if path.name == "config.json":
        return path.parent.name or config["model_type"]
    return path.stem if path.suffix == ".json" else path.name


def _not_modelled(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a config has and predictions leave out."""
    if any(config.get(f"{logits}_logit_softcapping") for logits in ("attn", "final")):
        yield "soft caps of logits"
    if config.get("alibi"):
        yield "ALiBi"
    if "vision_config" in config:
        yield "images"
    if "audio_config" in config:
        yield "sounds"
