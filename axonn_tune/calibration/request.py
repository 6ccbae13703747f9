"""What every rank of a calibration is asked to measure, and where rank 0 keeps the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from axonn_tune.calibration.measure.shapes import AttentionShape, GemmShape
from axonn_tune.calibration.selection import GPT_LIKE, LLAMA_LIKE, Extent
from axonn_tune.errors import FileError
from axonn_tune.spec.model import Model


class ResultStore(Protocol):
    """Keeps results in a file, so that an interrupted calibration can go on."""

    @property
    def path(self) -> str:
        """The file, as error messages call it."""

    def read(self, owner: dict[str, Any]) -> dict[str, Any]:
        """Return the results so far; their owner must have at least the entries of `owner`."""

    def require_none(self) -> None:
        """Raise an error if results are known already."""

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

    def check_store(self) -> None:
        """Refuse, before ranks start, results with which they could not go on.

        What they are measured on is known to the ranks only, who compare it later.

        Raises
        ------
        AxonnTuneError
            There are results though none should be, or none, or those of other work.
        """
        if self.resume:
            timed_results(self.store, {"quick": self.extent.is_quick})
        else:
            self.store.require_none()


def timed_results(store: ResultStore, owner: dict[str, Any]) -> dict[str, tuple[Any, float]]:
    """Return what a store keeps of an owner: what was measured, and how long that took, by key.

    Raises
    ------
    FileError
        A result is not that of a calibration, or the store refuses the owner.
    """
    results = store.read(owner)
    for key, result in results.items():
        is_pair = isinstance(result, list) and len(result) == 2
        if not is_pair or not isinstance(result[1], int | float):
            raise FileError(
                f"{store.path}, '{key}': no result with its seconds; delete the file and leave "
                "--resume out to begin anew"
            )
    return {key: (measured, seconds) for key, (measured, seconds) in results.items()}
