"""The best configuration on each of several numbers of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.processes import mapped
from axonn_tune.search.no_fit import LARGEST_GPU_COUNT
from axonn_tune.search.rank import Best, Detail, Each, best_of
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import whole_number


def scale(searches: Sequence[Search], each: Each = iter, detail: Detail = "chance") -> list[Best]:
    """Return the best configuration of each search, with as much detail as is wanted.

    Raises
    ------
    NoCandidateError
        No search has a candidate that fits.
    """
    if not searches:
        raise InputError("scale: gpus is empty; allowed: one number or more")
    points = list(mapped(partial(best_of, detail=detail), searches, each=each))
    if all(point.prediction is None for point in points):
        raise NoCandidateError(_reason(points))
    return points


def _reason(points: Sequence[Best]) -> str:
    """Return why no point has a candidate, with the hints for the first."""
    others = ", ".join(str(point.search.scenario.job.n_gpus) for point in points[1:])
    return points[0].reason + (f"; nor is there a grid for {others} GPUs" if others else "")


def efficiencies(points: Sequence[Best]) -> list[float | None]:
    """Return model FLOP/s of each GPU over those of the first point that has a candidate.

    With one model and batch this is the usual strong-scaling efficiency (seconds times GPUs of
    the first point over those of another); with a model or a batch that grows, it is the papers'
    weak-scaling efficiency (AxoNN, arXiv 2502.08145, section 6).
    """
    predictions = [point.prediction for point in points]
    first = next((best for best in predictions if best is not None), None)
    return [None if best is None or first is None else best.mfu / first.mfu for best in predictions]


def parse_counts(text: str) -> list[int]:
    """Read numbers of GPUs: ``"128..1024"`` is 128, 256, 512, 1024; commas join several.

    Raises
    ------
    InputError
        The text does not hold numbers of GPUs in growing order.
    """
    counts: list[int] = []
    for part in text.split(","):
        ends = [_count(word, text) for word in part.split("..")]
        if len(ends) > 2 or ends != sorted(ends):
            raise _not_counts(text)
        counts.append(ends[0])
        while len(ends) == 2 and 2 * counts[-1] <= ends[1]:
            counts.append(2 * counts[-1])
    if counts != sorted(set(counts)):
        raise _not_counts(text)
    return counts


def _count(word: str, text: str) -> int:
    """Read one number of GPUs; `text` is the whole text, for the error message."""
    count = whole_number(word.strip())
    if count is None or not 1 <= count <= LARGEST_GPU_COUNT:
        raise _not_counts(text)
    return count


def _not_counts(text: str) -> InputError:
    """Return the error for a text that does not hold numbers of GPUs."""
    return InputError(
        f"--gpus {text[:80]}: allowed: doublings such as 128..16384, or counts up to "
        f"{LARGEST_GPU_COUNT} in growing order such as 96,384,1536"
    )
