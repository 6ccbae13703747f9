"""Which layers each virtual stage of a pipeline has, as text.

The text is that of Megatron-Core's ``--pipeline-model-parallel-layout``: ``Et*3|(tt|)*29t|L`` has
the embedding with three layers, 29 stages of two, one of one, and the head alone. Modules of
multi-token prediction (``m``) come before the head, in its stage. A letter or a group in
parentheses is repeated by ``*n``; commas mean nothing.
"""

from __future__ import annotations

import re

from axonn_tune.errors import InputError
from axonn_tune.spec.model import Model

_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_LETTER = re.compile(r"([Etml])\*(\d{1,4})", re.IGNORECASE)
_STAGE = re.compile(r"E?t*m*L?")
# Letters of a text whose repetitions are written out; no model has as many layers and stages.
_MOST_LETTERS = 20_000


def layers_of_stages(text: str) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage; there are none for an empty text.

    Raises
    ------
    InputError
        The text is no layout; the message says what is wrong.
    """
    if not text:
        return ()
    stages = _written_out(text).split("|")
    if not all(_STAGE.fullmatch(stage) for stage in stages):
        raise _refused(text, "E, t, m and L in this order between bars, repeated by *n")
    if [stage for stage in stages if "E" in stage] != stages[:1]:
        raise _refused(text, "the embedding E once, in the first stage")
    if [stage for stage in stages if "L" in stage] != stages[-1:]:
        raise _refused(text, "the head and loss L once, in the last stage")
    if any("m" in stage for stage in stages[:-1]):
        raise _refused(text, "modules of multi-token prediction m in the last stage, before L")
    return tuple(stage.count("t") for stage in stages)


def require_stage_layout(model: Model, mtp_modules: int, text: str) -> None:
    """Raise InputError if a layout does not have the layers of a model, or the job's modules."""
    if not text:
        return
    n_layers = sum(layers_of_stages(text))
    if n_layers != model.n_layers:
        raise _refused(text, f"the {model.n_layers} layers of {model.name}, not {n_layers}")
    n_modules = _written_out(text).count("m")
    if n_modules != mtp_modules:
        raise _refused(text, f"m as often as --mtp-modules says, {mtp_modules}, not {n_modules}")


def _written_out(text: str) -> str:
    """Return a layout without commas, spaces and repetitions."""
    written = re.sub(r"[,\s]", "", text)
    for pattern in (_GROUP, _LETTER):
        n_letters = len(written) + sum(
            len(group) * int(count) for group, count in pattern.findall(written)
        )
        if n_letters > _MOST_LETTERS:
            raise _refused(text, f"at most {_MOST_LETTERS} letters")
        written = pattern.sub(lambda found: found[1] * int(found[2]), written)
    return written


def _refused(text: str, allowed: str) -> InputError:
    """Return the error of a layout."""
    return InputError(f"stage_layout is '{text[:80]}'; allowed: {allowed}")
