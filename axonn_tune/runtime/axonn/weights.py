"""Parameters as ranks store them, and the collectives over Z that their weights need.

A weight is stored in shards over Z: it is gathered before use, and its gradient is scattered
afterwards. Norms, biases and positions are too small to be split over Z.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from axonn_tune.runtime.axonn.boxes import BlockLayout
from axonn_tune.runtime.axonn.layer import Layer
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.ranks.collectives import Collectives, is_on_host, wait
from axonn_tune.runtime.ranks.recorder import PendingCollective, Recorder
from axonn_tune.spec import names
from axonn_tune.spec.plan import GRADIENTS_IN_FLIGHT


class Matrix(Layer):
    """One weight: the rank's shard of its block.

    Attributes
    ----------
    shard : Parameter, shape (k_local * n_local / G_z,)
    block_shape : (k_local, n_local)
        Shape of the gathered block, such as (k / G_x, n / G_y).
    gradient : Tensor or None
        The tensor that receives a micro-step's gradient; None if ``shard.grad`` receives it.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: BlockLayout,
        block_shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.block_shape = block_shape
        start, stop = layout.stored_range(mesh)
        self.shard = nn.Parameter(torch.empty(stop - start, dtype=dtype, device=mesh.device))
        self.gradient: torch.Tensor | None = None

    @property
    def block_elements(self) -> int:
        """The number of elements in the gathered block."""
        return self.block_shape[0] * self.block_shape[1]


class Vector(Layer):
    """A parameter that Z does not split: a norm's gain or shift, a bias, or the positions.

    Ranks along one axis hold parts of it, and those along the others hold copies.

    Attributes
    ----------
    shard : Parameter, shape (elements of the rank's part,)
    axis : str
        The axis that splits the parameter.
    """

    def __init__(self, mesh: Mesh, layout: BlockLayout, dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        self.axis = next(axis for axis in layout.axes if axis is not None)
        n_elements = math.prod(layout.box(mesh)[1])
        self.shard = nn.Parameter(torch.empty(n_elements, dtype=dtype, device=mesh.device))


class _Buffers:
    """Reuses buffers on the host, where fresh memory costs as much time as a copy.

    A GPU's memory is that of torch's allocator, which gives what is free to any tensor.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def take(self, n_elements: int, like: torch.Tensor) -> torch.Tensor:
        free = self._free[n_elements, like.dtype]
        return free.pop() if free else like.new_empty(n_elements)

    def give(self, buffer: torch.Tensor) -> None:
        if is_on_host():
            self._free[buffer.numel(), buffer.dtype].append(buffer)


@dataclass(frozen=True)
class _Use:
    """A layer's use of its weight in the forward, the recomputed or the backward chain."""

    chain: str
    layer: str
    matrix: Matrix

    @property
    def kept_as(self) -> tuple[str, Matrix]:
        return self.layer, self.matrix


class WeightGathers:
    """Gathers weights over Z; with OAG (`ahead`), each one while the layer before it computes.

    Which weight follows which is learnt from the first micro-step, so that any model
    prefetches in the order in which it runs.
    """

    def __init__(self, mesh: Mesh, collectives: Collectives, ahead: bool, keep: bool) -> None:
        self._is_split = mesh.size("z") > 1
        self._collectives = collectives
        self._ahead = ahead
        self._keep = keep
        self._buffers = _Buffers()
        self._following: dict[_Use, _Use] = {}
        self._previous: _Use | None = None
        self._in_flight: dict[_Use, tuple[PendingCollective | None, torch.Tensor]] = {}
        self._kept: dict[tuple[str, Matrix], torch.Tensor] = {}

    def take(
        self, chain: str, layer: str, matrix: Matrix, backward_follows: bool = True
    ) -> torch.Tensor:
        """Return the weight's block, shape `matrix.block_shape`; call `give_back` after its use.

        It is called where autograd follows nothing, within a function of its own.
        """
        if not self._is_split:
            return matrix.shard.view(matrix.block_shape)
        use = _Use(chain, layer, matrix)
        if self._previous is not None and backward_follows:
            self._following[self._previous] = use
        self._previous = use if backward_follows else None
        block = self._kept.get(use.kept_as) if chain != names.FORWARD else None
        if block is None:
            if use not in self._in_flight:
                self._start(use)
            pending, block = self._in_flight.pop(use)
            wait(pending)
            if self._keep and backward_follows:
                self._kept[use.kept_as] = block
        following = self._following.get(use) if self._ahead else None
        if following is not None and self._will_gather(following, backward_follows):
            self._start(following)
        return block.view(matrix.block_shape)

    def give_back(self, layer: str, matrix: Matrix, block: torch.Tensor) -> None:
        """Take back a block that is not needed now."""
        if self._is_split and (layer, matrix) not in self._kept:
            self._buffers.give(block.view(-1))

    def end_microstep(self) -> None:
        """Forget the kept blocks, since the next weight is the first one of a micro-step."""
        for block in self._kept.values():
            self._buffers.give(block)
        self._kept.clear()
        self._previous = None

    def _will_gather(self, use: _Use, backward_follows: bool) -> bool:
        if use in self._in_flight:
            return False
        return use.chain == names.FORWARD or (backward_follows and not self._keep)

    def _start(self, use: _Use) -> None:
        shard = use.matrix.shard.detach()
        block = self._buffers.take(use.matrix.block_elements, shard)
        name = names.all_gather(names.of_layer(use.chain, use.layer))
        pending = self._collectives.all_gather(name, block, shard, "z")
        self._in_flight[use] = pending, block


class GradientScatters:
    """Sums weight gradients over Z; with ORS (`behind`), while the backward pass goes on.

    The end of the backward pass waits for all of them and calls each function in `after_backward`.
    """

    def __init__(
        self, mesh: Mesh, collectives: Collectives, recorder: Recorder, behind: bool
    ) -> None:
        self._is_split = mesh.size("z") > 1
        self._collectives = collectives
        self._recorder = recorder
        self._behind = behind
        self._buffers = _Buffers()
        self._in_flight: deque[tuple[PendingCollective | None, torch.Tensor]] = deque()
        self._with_gradient: set[Matrix] = set()  # weights that have one of this micro-step
        self._to_add: list[tuple[Matrix, torch.Tensor]] = []
        self._end_is_awaited = False
        self.after_backward: list[Callable[[], None]] = []

    def buffer(self, matrix: Matrix) -> torch.Tensor:
        """Return where to form the gradient of a block, shape `matrix.block_shape`."""
        self._await_the_end()
        if not self._is_split:
            return self._destination(matrix).view(matrix.block_shape)
        while len(self._in_flight) >= GRADIENTS_IN_FLIGHT:
            self._finish_oldest()
        return self._buffers.take(matrix.block_elements, matrix.shard).view(matrix.block_shape)

    def scatter(self, layer: str, matrix: Matrix, block: torch.Tensor) -> None:
        """Sum a gradient's block over Z and leave each rank its shard."""
        if not self._is_split:
            return
        full = block.view(-1)
        name = names.reduce_scatter(names.of_layer(names.BACKWARD, layer))
        pending = self._collectives.reduce_scatter(name, self._destination(matrix), full, "z")
        self._in_flight.append((pending, full))
        if not self._behind:
            self._finish_oldest()

    def formed(self, matrix: Matrix) -> torch.Tensor | None:
        """Return the gradient's block, if this micro-step has one to which more can be added."""
        if self._is_split or matrix not in self._with_gradient:
            return None
        return _gradient(matrix).view(matrix.block_shape)

    def _destination(self, matrix: Matrix) -> torch.Tensor:
        shard = matrix.shard
        if matrix not in self._with_gradient:
            self._with_gradient.add(matrix)
            if matrix.gradient is not None:
                return matrix.gradient
            if shard.grad is None:
                shard.grad = torch.empty_like(shard)
                return shard.grad
        extra = self._buffers.take(shard.numel(), shard)
        self._to_add.append((matrix, extra))
        return extra

    def _finish_oldest(self) -> None:
        pending, full = self._in_flight.popleft()
        wait(pending)
        self._buffers.give(full)

    def _await_the_end(self) -> None:
        if not self._end_is_awaited:
            self._end_is_awaited = True
            # Torch's own DDP and FSDP do the same to run something after the backward pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._end_is_awaited = False
        while self._in_flight:
            self._finish_oldest()
        for matrix, extra in self._to_add:
            with self._recorder.memory_bound(names.GRADIENT_TIED, 3.0 * extra.nbytes):
                _gradient(matrix).add_(extra)
            self._buffers.give(extra)
        self._to_add.clear()
        self._with_gradient.clear()
        for call in self.after_backward:
            call()


def _gradient(matrix: Matrix) -> torch.Tensor:
    gradient = matrix.shard.grad if matrix.gradient is None else matrix.gradient
    assert gradient is not None
    return gradient
