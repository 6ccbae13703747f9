"""What the backward pass computes again, as text and as a number in columns of candidates.

``full:4`` recomputes the first 4 layers of each stage (of each virtual stage, where a pipeline is
interleaved) and keeps the activations of the others, as Megatron-LM does with
``--recompute-method block --recompute-num-layers 4``. ``selective:layernorm,moe_act`` recomputes
single modules of every layer, as Megatron-Core does with ``--recompute-modules layernorm moe_act``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from axonn_tune.errors import InputError
from axonn_tune.spec.model import RECOMPUTES, Model

_FULL = RECOMPUTES.index("full")
_PARTIAL = "full:"
_PARTIAL_TEXT = re.compile(r"full:([1-9][0-9]{0,3})")
# The largest number of layers that a text names.
_MOST_LAYERS = 9999
_MODULAR = "selective:"
# The modules of Megatron-Core 0.16's --recompute-modules. A set of them has as its number this base
# plus a bit for each.
MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
_MODULES_BASE = _FULL + _MOST_LAYERS + 1
# Shares of a stage's layers that a search recomputes where it keeps the others.
_TRIED_SHARES = (0.25, 0.5, 0.75)


def recompute_code(text: str) -> int:
    """Return the number of a recomputation: that of its kind, of its layers or of its modules.

    Raises
    ------
    InputError
        There is no such recomputation; the message says which there are.
    """
    if text in RECOMPUTES:
        return RECOMPUTES.index(text)
    if text.startswith(_MODULAR):
        return _MODULES_BASE + sum(1 << MODULES.index(name) for name in _named_modules(text))
    match = _PARTIAL_TEXT.fullmatch(text)
    if match is None:
        raise InputError(
            f"job: recompute is '{text}'; allowed: auto, {', '.join(RECOMPUTES)}, full:4 for four "
            "layers of each stage, or selective:moe_act,layernorm for single modules"
        )
    return _FULL + int(match[1])


def recompute_text(code: int) -> str:
    """Return the text of a recomputation from its number."""
    if code < len(RECOMPUTES):
        return RECOMPUTES[code]
    if code < _MODULES_BASE:
        return f"{_PARTIAL}{code - _FULL}"
    present = code - _MODULES_BASE
    return _MODULAR + ",".join(name for bit, name in enumerate(MODULES) if present >> bit & 1)


def recomputed_modules(text: str) -> frozenset[str]:
    """Return the modules that a recomputation names; it is empty if it names none."""
    return _named_modules(text) if text.startswith(_MODULAR) else frozenset()


def _named_modules(text: str) -> frozenset[str]:
    """Return the modules that a text names, and refuse others."""
    names = text.removeprefix(_MODULAR).split(",")
    for name in names:
        if name not in MODULES:
            raise InputError(
                f"job: recompute is '{text}'; there is no module '{name}'; allowed: "
                f"{', '.join(MODULES)}"
            )
    return frozenset(names)


def broken_module_rules(model: Model, allowed: Sequence[str], text: str) -> list[str]:
    """Return why modules cannot be recomputed; the list is empty if they can, or there are none.

    Parameters
    ----------
    allowed
        The modules that the strategy recomputes by themselves.
    """
    modules = recomputed_modules(text)
    if modules - set(allowed):
        return [f"recompute is '{text}'; allowed: {', '.join(RECOMPUTES)}, no single modules"]
    missing = {"mla_up_proj"} if model.latent_attention is None else set()
    if model.is_dense:
        missing |= {"moe", "moe_act"}
    if not model.shared_linears:
        missing.add("shared_experts")
    allowed_names = ", ".join(name for name in MODULES if name not in missing)
    return [
        f"recompute is '{text}'; the model has no {name}; allowed: {allowed_names}"
        for name in MODULES
        if name in modules & missing
    ]


def runs_attention_again(text: str, attention: str, reruns_fused: bool) -> bool:
    """Return whether selective recomputation runs attention again.

    It forms the scores of unfused attention again, which take the memory. Fused attention saves
    none, and is run again only where the engine does so all the same.
    """
    return text == "selective" and (attention == "unfused" or reruns_fused)


def is_partial(text: str) -> bool:
    """Return whether a recomputation names a number of layers."""
    return text.startswith(_PARTIAL)


def n_recomputed_layers(text: str, n_layers: int) -> int:
    """Return how many layers of a stage are recomputed as a whole."""
    if is_partial(text):
        return min(recompute_code(text) - _FULL, n_layers)
    return n_layers if text == "full" else 0


def extent(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return numbers that grow with what is recomputed: nothing, modules, layers, all layers."""
    layers = np.where(codes == _FULL, _MOST_LAYERS + 1, codes - _FULL)
    of_layers = np.where((codes >= _FULL) & (codes < _MODULES_BASE), layers, 0)
    return of_layers + (codes > 0)


def repeats_less(less: str, more: str) -> bool:
    """Return whether what a recomputation repeats is a part of what another one repeats."""
    if less == more:
        return False
    if less == "none" or (more == "full" and not recomputed_modules(less)):
        return True
    return is_partial(less) and is_partial(more) and recompute_code(less) < recompute_code(more)


def partial_recomputes(n_layers: int) -> list[str]:
    """Return the recomputations of a part of a stage's layers that a search tries, the least first.

    There is none for a single layer.
    """
    counts = {math.ceil(share * n_layers) for share in _TRIED_SHARES}
    return [
        f"{_PARTIAL}{count}"
        for count in sorted(counts)
        if count < n_layers and count <= _MOST_LAYERS
    ]
