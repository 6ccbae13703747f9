"""The sums of gradients over the micro-steps of a step, and over the ranks along Z and data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.weights import Matrix, Vector
from axonn_tune.runtime.ranks.collectives import wait
from axonn_tune.runtime.ranks.recorder import PendingCollective
from axonn_tune.spec import names
from axonn_tune.strategies.axonn.communication import BUCKET_BYTES


class GradientSums:
    """Keeps the sums of gradients in fp32, in one flat buffer.

    A backward pass leaves a micro-step's gradients in the weights' type, and its end adds them to
    the sums. Where a step has one micro-step and the weights are fp32, it forms them where the sums
    belong. `reduce` then sums them over the grid. Vectors come first and then the matrices in
    the order of the model, so that what a backward pass has finished lies at the end.

    Parameters
    ----------
    engine : Engine
    owners : sequence of Matrix and Vector
        The model's parameters in the order in which they lie in the buffer, vectors first.
    one_microstep : bool
        Whether each step has one micro-step.

    Attributes
    ----------
    flat : Tensor
        The sums.
    n_in_vectors : int
        Number of elements that belong to vectors.
    adds : bool
        Whether gradients of micro-steps are added to the sums, and not formed there.
    """

    def __init__(
        self, engine: Engine, owners: Sequence[Matrix | Vector], one_microstep: bool
    ) -> None:
        self._engine = engine
        sizes = [owner.shard.numel() for owner in owners]
        self.n_in_vectors = sum(o.shard.numel() for o in owners if isinstance(o, Vector))
        self.flat = torch.zeros(sum(sizes), device=engine.mesh.device)
        self.adds = not one_microstep or engine.dtype != self.flat.dtype
        self._new = torch.zeros_like(self.flat, dtype=engine.dtype) if self.adds else self.flat
        self._starts = dict(zip(owners, accumulate([0, *sizes]), strict=False))
        for owner, gradient in zip(owners, self._new.split(sizes), strict=True):
            if isinstance(owner, Matrix):
                owner.gradient = gradient
            else:
                owner.shard.grad = gradient  # autograd adds to it
        # What the backward pass has added up and sent begins here.
        self._sent_from = len(self.flat)
        self._formed: tuple[str, int] | None = None
        self._in_flight: list[PendingCollective | None] = []
        engine.scatters.after_backward.append(self._end_backward)

    def reduce_in_backward(self) -> None:
        """Let the micro-step that comes next, the last one of the step, reduce gradients over data.

        Its backward pass sends the gradients of matrices while it forms those of earlier blocks.
        """
        self._engine.unit_formed = self._send_unit_before

    def reduce(self) -> None:
        """Sum over the ranks that worked on other tokens: vectors over Z, then all over data."""
        vectors = self.flat[: self.n_in_vectors]
        wait(self._engine.collectives.all_reduce(names.GRADIENT_VECTORS, vectors, "z"))
        self._send(names.GRADIENT_ALL_REDUCE, 0)
        for collective in self._in_flight:
            wait(collective)
        self._in_flight.clear()
        self._sent_from = len(self.flat)

    @property
    def added_to(self) -> torch.Tensor:
        """The sums that have to be zero before a step, since backward passes add to them."""
        return self.flat if self.adds else self.flat[: self.n_in_vectors]

    def _send_unit_before(self, unit: str, first: Matrix) -> None:
        """Send the unit before this one, whose gradients have all been scattered over Z by now."""
        if self._formed is not None:
            name, start = self._formed
            owner = names.gradient(name)
            self._accumulate(names.accumulate(owner), start)
            self._send(names.all_reduce(owner), start)
        self._formed = unit, self._starts[first]

    def _end_backward(self) -> None:
        is_last = self._engine.unit_formed is not None
        rest = names.accumulate(names.gradient("rest"))
        self._accumulate(rest if is_last else names.GRADIENT_ACCUMULATE, 0)
        if self.adds:
            self._new[: self.n_in_vectors].zero_()
        self._engine.unit_formed = self._formed = None

    def _accumulate(self, name: str, start: int) -> None:
        """Add the micro-step's gradients from an element on, as far as they have not been sent."""
        if not self.adds:
            return
        new, sums = self._new[start : self._sent_from], self.flat[start : self._sent_from]
        with self._engine.recorder.memory_bound(name, new.nbytes + 2.0 * sums.nbytes):
            sums.add_(new)

    def _send(self, name: str, start: int) -> None:
        """Start to sum gradients over data, from an element on to those that were sent before."""
        sums = self.flat[start : self._sent_from]
        n_buckets = math.ceil(sums.nbytes / BUCKET_BYTES)
        self._in_flight += [
            self._engine.collectives.all_reduce(name, bucket, "data")
            for bucket in sums.tensor_split(n_buckets)
        ]
        self._sent_from = start
