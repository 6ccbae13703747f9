"""What the measurements of one calibration share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from axonn_tune.calibrate.ledger import Journal, Ledger, gathered
from axonn_tune.calibrate.measure.attention import AttentionShape
from axonn_tune.calibrate.measure.gemm import GemmShape
from axonn_tune.calibrate.measure.progress import Progress
from axonn_tune.calibrate.measure.timing import Effort, Timing
from axonn_tune.calibrate.measure.topology import Station
from axonn_tune.calibrate.plan import GPT_LIKE, LLAMA_LIKE, Extent
from axonn_tune.spec.model import Model


@dataclass(frozen=True)
class Request:
    """What to measure.

    gemm_shapes, attention_shapes: beside the grid of shapes; n_shapes_left_out: products that
    a search asks for and that are not among them. largest_messages: bytes, by kind of collective,
    stride and size of the groups, up to which that search asks. models: whose kinds of kernels
    to time. units: ranks of the units of the link levels, if the user says so. resume: go on
    with the journal.
    """

    parts: tuple[str, ...]
    is_quick: bool
    dtypes: tuple[str, ...]
    journal: Journal
    resume: bool
    models: tuple[Model, ...] = (GPT_LIKE, LLAMA_LIKE)
    gemm_shapes: tuple[GemmShape, ...] = ()
    attention_shapes: tuple[AttentionShape, ...] = ()
    n_shapes_left_out: int = 0
    largest_messages: Mapping[tuple[str, int, int], int] = field(default_factory=dict)
    units: tuple[int, ...] | None = None
    device: str = "auto"
    timeout_seconds: float = 300.0
    quiet: bool = False


@dataclass(frozen=True)
class Setting:
    """Where and how this rank measures, together with all others.

    stations: of every rank. memory_bytes: of each rank, at least. is_shared: several ranks
    compute on one core.
    """

    request: Request
    device: torch.device
    extent: Extent
    effort: Effort
    is_shared: bool
    stations: tuple[Station, ...]
    n_per_node: int
    memory_bytes: float
    ledger: Ledger
    progress: Progress

    @property
    def n_ranks(self) -> int:
        """All of them."""
        return len(self.stations)

    def on_all(self, key: str, time_own: Callable[[], Timing]) -> list[Timing]:
        """What each rank takes for the same work while all do it, by rank."""

        def find() -> list[tuple[float, float]]:
            dist.barrier()
            own = time_own()
            return gathered((own.seconds, own.spread_fraction))

        return [Timing(*timing) for timing in self.ledger.result(key, find)]
