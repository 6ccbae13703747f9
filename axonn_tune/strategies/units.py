"""Units of sharded weights: what is gathered together, and whose gradients are reduced together."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Size
from axonn_tune.strategies.shapes import FP32_BYTES


@dataclass(frozen=True)
class GatherUnit:
    """Weights that are gathered together, and whose gradients are reduced together.

    Attributes
    ----------
    name
        Name of the unit, ``block`` or ``root``.
    parameters
        Number of its parameters of which the rank's shards are parts.
    trained
        Number of those that are trained; the others are frozen.
    gathered
        Number of those that are gathered: all, or the elements of matrices.
    n_calls
        Number of gathers that carry it.
    n_reductions
        Number of reductions that carry its gradients; a share of one where units share them.
    """

    name: str
    parameters: Size
    trained: Size
    gathered: Size
    n_calls: float
    n_reductions: Size

    def fp32_shard_bytes(self, job: Job) -> Size:
        """Return the bytes of a whole unit whose trained parameters are stored in fp32.

        Frozen ones, which no optimizer updates, are stored in the job's type.
        """
        frozen = self.parameters - self.trained
        return self.trained * FP32_BYTES + frozen * job.element_bytes
