"""A calibration from the question of a user to the profile; callers open the files.

>>> from axonn_tune.calibration.campaign import Campaign
>>> campaign = Campaign(dtypes=("fp32",), n_ranks=4, is_quick=True, device="cpu")
>>> campaign.parts
('gemm', 'memory', 'links')
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from axonn_tune.calibration.fit.assemble import fitted_machine
from axonn_tune.calibration.measure.run import measure_cluster
from axonn_tune.calibration.measure.shapes import AttentionShape, GemmShape
from axonn_tune.calibration.measured_cluster import MeasuredCluster
from axonn_tune.calibration.request import Request, ResultStore
from axonn_tune.calibration.selection import (
    GPT_LIKE,
    LLAMA_LIKE,
    Extent,
    quick_extent,
    thorough_extent,
)
from axonn_tune.calibration.wanted import kernels_of, largest_messages
from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.engine import DTYPES as TRAINED_DTYPES
from axonn_tune.runtime.ranks.launch import default_dtype, launch
from axonn_tune.search.search import Search
from axonn_tune.spec.calibration import PARTS, Calibration
from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.precision import BYTES_PER_ELEMENT

# Products of a search that are measured, unless the user says how many.
MOST_SHAPES_QUICK = 60
MOST_SHAPES_THOROUGH = 600


def default_dtypes(is_quick: bool, device: str) -> tuple[str, ...]:
    """Return all number formats where there are GPUs and time; a CPU is slow at any but fp32."""
    first = default_dtype(device)
    return (first,) if is_quick or first == "fp32" else ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Campaign:
    """A calibration that a user asks for.

    Parameters
    ----------
    dtypes : tuple of str
        Number formats to measure; the first one is that of the search.
    n_ranks : int
        Number of ranks that measure together.
    parts : tuple of str
        Parts to measure: ``"gemm"``, ``"memory"``, ``"links"``.
    is_quick : bool
        Whether to take about a minute, instead of a thorough calibration.
    base : Machine, optional
        The profile from which all that is not measured is taken.
    search : Search, optional
        The search whose products, attention and messages are measured too.
    most_shapes : int, optional
        Number of products of the search to measure, the likeliest grids' first.
    units : tuple of int, optional
        Number of ranks in a unit of each link level; they are measured if not given.
    device : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    timeout_seconds : float
        Time after which a collective counts as hung. [s]
    quiet : bool
        Whether to show no progress.
    extent : Extent, optional
        How much to measure, if not what a quick or a thorough calibration does.

    Raises
    ------
    InputError
        A number format cannot be measured, or a part is neither measured nor in the base.
    """

    dtypes: tuple[str, ...]
    n_ranks: int
    parts: tuple[str, ...]
    is_quick: bool
    base: Machine | None
    search: Search | None
    most_shapes: int | None
    units: tuple[int, ...] | None
    device: str
    timeout_seconds: float
    quiet: bool
    extent: Extent | None

    def __post_init__(self) -> None:
        check_dtypes(self.dtypes)
        if self.base is None:
            self._check_that_all_is_measured()

    def _check_that_all_is_measured(self) -> None:
        missing = [part for part in PARTS if part not in self.parts]
        if missing:
            raise InputError(
                f"--only leaves out {' and '.join(missing)}; give --machine, a profile that has "
                "them"
            )
        if self.n_ranks == 1:
            raise InputError(
                "one rank has no links to measure; start more, or give --machine, a profile with "
                "links"
            )

    def request(self, store: ResultStore, resume: bool) -> Request:
        """Return what each rank is asked to measure.

        Parameters
        ----------
        store : ResultStore
            Store in which rank 0 keeps the results, such as an `io.journal.Journal`.
        resume : bool
            Whether to go on with the results that the store holds.
        """
        search = self.search
        products, attentions = ([], []) if search is None else kernels_of(search)
        most = self.most_shapes or (MOST_SHAPES_QUICK if self.is_quick else MOST_SHAPES_THOROUGH)
        dtype = self.dtypes[0]
        return Request(
            parts=self.parts,
            dtypes=self.dtypes,
            extent=self.extent or self._default_extent(),
            store=store,
            resume=resume,
            models=(GPT_LIKE, LLAMA_LIKE) if search is None else (search.scenario.model,),
            gemm_shapes=tuple(GemmShape(*product, dtype) for product in products[:most]),
            attention_shapes=tuple(AttentionShape(*sizes, dtype) for sizes in attentions[:most]),
            n_shapes_left_out=max(len(products) - most, 0),
            largest_messages={} if search is None else largest_messages(search),
            units=self.units,
            device=self.device,
            timeout_seconds=self.timeout_seconds,
            quiet=self.quiet,
        )

    def _default_extent(self) -> Extent:
        on_gpu = self.device != "cpu" and torch.cuda.is_available()
        return quick_extent(on_gpu) if self.is_quick else thorough_extent(on_gpu)

    def measure(self, request: Request) -> MeasuredCluster | None:
        """Measure on all ranks; return None on every rank of torchrun or srun but rank 0.

        Raises
        ------
        AxonnTuneError
            Bad input, a failure of any rank, or results that cannot be kept.
        """
        return launch(measure_cluster, request, self.n_ranks, self.device)

    def profile(
        self,
        measured: MeasuredCluster,
        name: str,
        presets: Sequence[Machine],
        command_line: str = "",
        drivers: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Machine:
        """Fit a profile to what was measured.

        Parameters
        ----------
        presets : sequence of Machine
            Where the device is the GPU of one of them, its published figures are taken.
        command_line, drivers, environment : optional
            The command, versions of drivers, and variables that change what was measured; the
            profile keeps them.

        Raises
        ------
        InputError
            Too little was measured.
        """
        calibration = Calibration(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command_line=command_line,
            device_name=measured.device_name,
            backend=measured.backend,
            n_ranks=measured.n_ranks,
            hosts=measured.hosts,
            seconds=measured.seconds,
            software={**measured.software, **(drivers or {})},
            environment=environment or {},
            speeds=measured.speeds,
            notes=measured.notes,
        )
        return fitted_machine(measured, name, calibration, presets, self.base)


def check_dtypes(dtypes: Sequence[str]) -> None:
    """Refuse number formats that cannot be measured.

    Raises
    ------
    InputError
        A format is unknown, or the runtime can train with none of them.
    """
    for dtype in dtypes:
        require_choice("calibrate", "--dtype", dtype, BYTES_PER_ELEMENT)
    if not set(dtypes) & set(TRAINED_DTYPES):
        raise InputError(
            f"--dtype {' '.join(dtypes)}: kernels are timed in small training steps; add one of "
            f"{', '.join(TRAINED_DTYPES)}"
        )
