"""Which layers of a Hugging Face config have a sliding window, and which have experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from axonn_tune.errors import InputError


def window_fields(
    config: Mapping[str, Any], attends_to_all: Callable[[int], bool]
) -> dict[str, Any]:
    """Return the fields of `Model` that say which layers have the window of a checked config.

    Where no field can say it, the window is named among what predictions leave out.

    Parameters
    ----------
    attends_to_all : callable
        Returns whether a layer, counted from 0, has no window, for configs that do not list it.

    Raises
    ------
    InputError
        The config lists the kinds of its layers, but not one text for each layer.
    """
    window, n_layers = config["sliding_window"], config["num_hidden_layers"]
    if not window:
        return {}
    is_full = _listed_as_full(config) or [attends_to_all(layer) for layer in range(n_layers)]
    period = is_full.index(True) + 1 if any(is_full) else 0
    if period == 1 and all(is_full):
        return {}
    if is_full == [bool(period) and (layer + 1) % period == 0 for layer in range(n_layers)]:
        return {"window": window, "full_attention_every": period}
    n_windows = n_layers - sum(is_full)
    text = f"the sliding window of {window} tokens in {n_windows} of {n_layers} layers"
    return {"not_modelled": (text,)}


def _listed_as_full(config: Mapping[str, Any]) -> list[bool] | None:
    """Return which layers have no window, if the config lists the kinds of its layers."""
    kinds = listed_kinds(config, "layer_types")
    return None if kinds is None else [kind == "full_attention" for kind in kinds]


def listed_kinds(config: Mapping[str, Any], key: str) -> list[Any] | None:
    """Return the kind of each layer, if a config lists them under a key.

    Raises
    ------
    InputError
        The key holds something else than one kind for each layer.
    """
    kinds, n_layers = config.get(key), config["num_hidden_layers"]
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise InputError(f"{key} holds no list of {n_layers} kinds; allowed: one for each layer")
    return kinds


def listed_layers(config: Mapping[str, Any], key: str) -> frozenset[int] | None:
    """Return the layers that a config lists under a key, if it does.

    Raises
    ------
    InputError
        The key holds something else.
    """
    layers = config.get(key)
    if layers is None:
        return None
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise InputError(f"{key} is {str(layers)[:40]!r}; allowed: a list of layers, from 0 on")
    return frozenset(layers)


def expert_fields(config: Mapping[str, Any], has_experts: Callable[[int], bool]) -> dict[str, Any]:
    """Return the fields of `Experts` that say which layers of a checked config have experts.

    Raises
    ------
    InputError
        No layer has experts, or the distances between layers with experts differ.
    """
    layers = [layer for layer in range(config["num_hidden_layers"]) if has_experts(layer)]
    if not layers:
        raise InputError("no layer has experts; allowed: a layer with experts")
    first, second = (*layers, config["num_hidden_layers"])[:2]
    if layers != list(range(first, config["num_hidden_layers"], second - first)):
        text = ", ".join(map(str, layers[:8]))
        raise InputError(
            f"the first layers with experts are {text}; allowed: layers with equal distances"
        )
    return {"experts.first_layer": first, "experts.every": second - first}
