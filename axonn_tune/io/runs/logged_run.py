"""What the log of a training run says, and helpers that find it in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A number that a program prints: no sign, no NaN.
NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|(?:CUDA|HIP) out of memory")
# The number types by what programs call them.
_DTYPES = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16", "float16", "half"), "fp32": ("fp32",)}


@dataclass(frozen=True)
class LoggedRun:
    """A run of which a log tells.

    Parameters
    ----------
    facts : mapping of str to str
        What the log says, by the column of a table of runs.
    step_seconds : tuple of float
        Seconds of the timed steps in their order, the warm-up first.
    memory_bytes : float
        The peak memory that the allocator held on the fullest GPU of the log; 0 where it is silent.
    out_of_memory : bool
        Whether a GPU ran out of memory.
    sizes : mapping
        Fields of the `Model` that was trained; empty where the log does not say them.
    """

    facts: Mapping[str, str]
    step_seconds: tuple[float, ...]
    memory_bytes: float
    out_of_memory: bool = False
    sizes: Mapping[str, Any] = field(default_factory=dict)


def logged_run(
    text: str,
    facts: Mapping[str, object],
    steps: Mapping[int, float],
    memory_bytes: float = 0.0,
    sizes: Mapping[str, Any] | None = None,
) -> LoggedRun:
    """Return the run of a log, given what it says; `steps` are seconds by the number of a step."""
    is_full = _OUT_OF_MEMORY.search(text) is not None  # torch's message for a full GPU
    return LoggedRun(stated(facts), positive(steps), memory_bytes, is_full, sizes or {})


def without_colors(text: str) -> str:
    """Return a text without the codes by which terminals change the color."""
    return _COLORS.sub("", text)


def first_count(pattern: str, text: str) -> int | None:
    """Return the whole number that the first match of a pattern holds, or None."""
    match = re.search(pattern, text)
    return int(match[1].replace(",", "")) if match else None


def largest(pattern: str, text: str) -> float:
    """Return the largest number of all matches of a pattern, or 0."""
    return max((float(number) for number in re.findall(pattern, text)), default=0.0)


def positive(steps: Mapping[int, float]) -> tuple[float, ...]:
    """Return the seconds of all steps whose clock moved on, in their order."""
    return tuple(seconds for _, seconds in sorted(steps.items()) if 0 < seconds < float("inf"))


def layout_text(sizes: Mapping[str, int]) -> str:
    """Return the text of a layout without the axes of size 1, of which one stays."""
    larger = {axis: size for axis, size in sizes.items() if size > 1}
    named = larger or dict(list(sizes.items())[:1])
    return ",".join(f"{axis}={size}" for axis, size in named.items())


def stated(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the facts that a log says, as the texts of a table."""
    return {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}


def dtype_named(text: str) -> str | None:
    """Return the number type that a program's word means, such as ``torch.bfloat16``."""
    words = text.lower().replace("torch.", "")
    return next((name for name, known in _DTYPES.items() if words in known), None)
