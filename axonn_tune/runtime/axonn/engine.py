"""What the layers of a model share: the mesh, the switches, and the machinery behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.gemm import Gemms
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.weights import GradientScatters, Matrix, WeightGathers
from axonn_tune.runtime.ranks.collectives import Collectives
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec import names
from axonn_tune.spec.job import Overlap

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Engine:
    """Executes the 4D algorithm on one rank; a model's layers are built on one engine.

    Parameters
    ----------
    mesh : Mesh
    dtype : str
        Type of weights and activations, ``"bf16"`` or ``"fp32"``.
    overlap : Overlap
        Which collectives run while the rank computes.
    keep_gathered_weights : bool
        Whether to gather each weight once per micro-step and keep it for the backward pass.
    kernel_tuning : bool
        Whether to time each product in NN, NT and TN when it is met first, and keep the fastest.
    record : bool
        Whether to note the start and the end of every operation. `Recorder.take_step` must then
        be called after each step, as `Trainer` does; otherwise the record fills the memory.
    recorder : Recorder, optional
        What notes the operations, instead of a recorder of its own.

    Attributes
    ----------
    unit_formed : function or None
        What a backward pass calls when it has formed the gradients of the head or of a block, with
        the name of that unit and the first of its matrices. It is set before the forward pass.

    Raises
    ------
    InputError
        The runtime does not train in this dtype.
    """

    def __init__(
        self,
        mesh: Mesh,
        dtype: str = "fp32",
        overlap: Overlap | None = None,
        keep_gathered_weights: bool = False,
        kernel_tuning: bool = True,
        record: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(
                f"dtype '{dtype}' cannot be trained in; allowed: {', '.join(DTYPES)} "
                "(fp16 needs loss scaling, which the runtime does not do)"
            )
        self.mesh = mesh
        self.dtype = DTYPES[dtype]
        self.overlap = overlap or Overlap()
        self.recorder = recorder or Recorder(mesh.device, record)
        self.collectives = Collectives(mesh, self.recorder)
        self.gemms = Gemms(self.recorder, kernel_tuning)
        self.gathers = WeightGathers(
            mesh, self.collectives, self.overlap.oag, keep_gathered_weights
        )
        self.scatters = GradientScatters(mesh, self.collectives, self.recorder, self.overlap.ors)
        self.scatters.after_backward.append(self.gathers.end_microstep)
        self.chain = names.FORWARD
        self.unit_formed: Callable[[str, Matrix], None] | None = None

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Name the forward operations that run within this context as recomputed ones."""
        self.chain = names.RECOMPUTE
        try:
            yield
        finally:
            self.chain = names.FORWARD

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts in which torch's checkpoint runs and repeats the forward pass."""
        return nullcontext(), self.recomputing()
