"""What the backward pass computes again, as text and as a number in columns of candidates.

``full:4`` recomputes the first 4 layers of each stage (of each virtual stage, where a pipeline is
interleaved) and keeps the activations of the others, as Megatron-LM does with
``--recompute-method block --recompute-num-layers 4``.
"""

from __future__ import annotations

import math
import re

from axonn_tune.errors import InputError
from axonn_tune.spec.model import RECOMPUTES

_FULL = RECOMPUTES.index("full")
_PARTIAL = "full:"
_PARTIAL_TEXT = re.compile(r"full:([1-9][0-9]{0,3})")
# The largest number of layers that a text names.
_MOST_LAYERS = 9999
# Shares of a stage's layers that a search recomputes where it keeps the others.
_TRIED_SHARES = (0.25, 0.5, 0.75)


def recompute_code(text: str) -> int:
    """Return the number of a recomputation: that of its kind, plus the layers if it names some.

    Raises
    ------
    InputError
        There is no such recomputation; the message says which there are.
    """
    if text in RECOMPUTES:
        return RECOMPUTES.index(text)
    match = _PARTIAL_TEXT.fullmatch(text)
    if match is None:
        raise InputError(
            f"job: recompute is '{text}'; allowed: auto, {', '.join(RECOMPUTES)}, or full:4 for "
            "four layers of each stage"
        )
    return _FULL + int(match[1])


def recompute_text(code: int) -> str:
    """Return the text of a recomputation from its number."""
    return RECOMPUTES[code] if code < len(RECOMPUTES) else f"{_PARTIAL}{code - _FULL}"


def is_partial(text: str) -> bool:
    """Return whether a recomputation names a number of layers."""
    return text.startswith(_PARTIAL)


def n_recomputed_layers(text: str, n_layers: int) -> int:
    """Return how many layers of a stage are recomputed as a whole."""
    if is_partial(text):
        return min(recompute_code(text) - _FULL, n_layers)
    return n_layers if text == "full" else 0


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
