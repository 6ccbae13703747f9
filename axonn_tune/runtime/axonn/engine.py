"""What the layers of a model share: the mesh, the switches, and the machinery behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.gemm import Gemms
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.weights import GradientScatters, WeightGathers
from axonn_tune.runtime.ranks.collectives import Collectives
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.job import Overlap

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Engine:
    """Executes the 4D algorithm on one rank; a model's layers are built on one engine.

    Parameters
    ----------
    mesh : Mesh
    dtype : str
        Of weights and activations: ``"bf16"`` or ``"fp32"``.
    overlap : Overlap
        Which collectives run beside computation.
    keep_gathered_weights : bool
        Gather each weight once per micro-step and keep it for the backward pass.
    kernel_tuning : bool
        Time each product in NN, NT and TN when it is met first, and keep the fastest.
    record : bool
        Note the start and end of every operation, for `Recorder.take_step` (as `Trainer` calls
        it after each step; who records and does not call it fills the memory).

    Raises
    ------
    InputError
        A dtype that the runtime does not train in.
    """

    def __init__(
        self,
        mesh: Mesh,
        dtype: str = "fp32",
        overlap: Overlap | None = None,
        keep_gathered_weights: bool = False,
        kernel_tuning: bool = True,
        record: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise InputError(
                f"dtype '{dtype}' cannot be trained in; allowed: {', '.join(DTYPES)} "
                "(fp16 needs loss scaling, which the runtime does not do)"
            )
        self.mesh, self.dtype = mesh, DTYPES[dtype]
        self.overlap = overlap or Overlap()
        self.recorder = Recorder(mesh.device, record)
        self.collectives = Collectives(mesh, self.recorder)
        self.gemms = Gemms(self.recorder, kernel_tuning)
        self.gathers = WeightGathers(
            mesh, self.collectives, self.overlap.oag, keep_gathered_weights
        )
        self.scatters = GradientScatters(mesh, self.collectives, self.recorder, self.overlap.ors)
        self.scatters.after_backward.append(self.gathers.end_microstep)
        self.chain = "forward"

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within it, forward operations belong to the backward pass's recomputation."""
        self.chain = "recompute"
        try:
            yield
        finally:
            self.chain = "forward"

    def recompute_contexts(
        self,
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For torch's checkpoint: contexts of the forward pass and of the recomputation."""
        return nullcontext(), self.recomputing()
