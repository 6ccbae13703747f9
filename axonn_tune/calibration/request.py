"""What every rank of a calibration is asked to measure, and where rank 0 keeps the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from axonn_tune.calibration.measure.shapes import AttentionShape, GemmShape
from axonn_tune.calibration.selection import GPT_LIKE, LLAMA_LIKE, Extent
from axonn_tune.spec.model import Model


class ResultStore(Protocol):
    """Keeps results, so that an interrupted calibration can go on."""

    def read(self, owner: dict[str, Any]) -> dict[str, Any]:
        """Return the results that are known already."""

    def begin(self, owner: dict[str, Any]) -> None:
        """Start with no results."""

    def add(self, key: str, result: Any) -> None:
        """Keep a result."""


@dataclass(frozen=True)
class Request:
    """The task of the ranks of a calibration; it is sent to each of them.

    Parameters
    ----------
    parts : tuple of str
        Parts to measure: ``"gemm"``, ``"memory"``, ``"links"``.
    dtypes : tuple of str
        Number formats of the products and kernels; the first one is that of the search.
    extent : Extent
        Says how much to measure.
    store : ResultStore
        Store in which rank 0 keeps the results.
    resume : bool
        Whether to go on with the results that the store holds.
    models : tuple of Model
        Models whose kinds of kernels are timed.
    gemm_shapes, attention_shapes : tuples
        Shapes that a search asks for; products are measured besides those of the extent.
    n_shapes_left_out : int
        Number of products that the search asks for and that are not in `gemm_shapes`.
    largest_messages : mapping
        Bytes of the largest message of the search, by kind of collective, stride and size of
        the groups.
    units : tuple of int, optional
        Number of ranks in a unit of each link level, if the user states it.
    device : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    timeout_seconds : float
        Time after which a collective counts as hung. [s]
    quiet : bool
        Whether to show no progress.
    """

    parts: tuple[str, ...]
    dtypes: tuple[str, ...]
    extent: Extent
    store: ResultStore
    resume: bool = False
    models: tuple[Model, ...] = (GPT_LIKE, LLAMA_LIKE)
    gemm_shapes: tuple[GemmShape, ...] = ()
    attention_shapes: tuple[AttentionShape, ...] = ()
    n_shapes_left_out: int = 0
    largest_messages: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    units: tuple[int, ...] | None = None
    device: str = "auto"
    timeout_seconds: float = 300.0
    quiet: bool = False
