"""The messages of FSDP2 in a stage of a pipeline, where weights are gathered once in a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.names import FORWARD
from axonn_tune.spec.plan import Size
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.zero.communication import ZeroCommunication, replica_sum
from axonn_tune.strategies.zero.units import GatherUnit

if TYPE_CHECKING:
    from axonn_tune.strategies.zero.sharding import Sharding


@dataclass(frozen=True, eq=False)
class StagedCommunication(ZeroCommunication):
    """The communication of a stage.

    The forward pass of the first micro-batch gathers the weights, which stay whole. Every backward
    pass adds its gradients to whole sums, and after the last one these are reduced, unit by unit
    (torch 2.13, distributed/pipelining/stage.py, backward_maybe_with_nosync and
    perform_reduce_grad).
    """

    @cached_property
    def _sharding(self) -> Sharding:
        """The groups of the strategy, over which gradients are reduced once."""
        return replace(self.options.sharding, gradients="", reduced_once=True)

    def _share(self, chain: str, unit: GatherUnit) -> Size:
        """Return the share of a chain's units that are gathered."""
        if unit.name.startswith(self.units.head.name):
            return 1.0
        return 1.0 if self.sync and chain == FORWARD else 0.0

    def _unit_of(self, layer: str) -> GatherUnit:
        """Return the unit of the embedding or of the head."""
        return self.units.head if layer == "head" else self.units.root

    def _sum_pieces(self, host: HostProgram) -> None:
        """Add the pieces' gradients of the head, and reduce their sum for each micro-batch.

        The loss switches the reduction on for its last piece (torchtitan b5bcd76c,
        components/loss.py, ChunkedLossWrapper), whatever the pipeline has switched off.
        """
        self._add_pieces(host)
        head, (group,) = self.units.head, self._sharding.reduced_over
        size = self.shapes.table.size(group)
        name = names.unit_gradient(head.name, group)
        nbytes = np.full(len(self.shapes.table), head.trained * self._message_element)
        host.memory_bound(f"{name}.pack", (size > 1) * 2.0 * nbytes, "copy")
        host.run(names.reduce(name), "reduce_scatter", nbytes, group, head.n_reductions)
        host.run(replica_sum(head), "all_reduce", nbytes / size, self._sharding.replicas)
        added = head.trained / size * (self._of_receipt(head) + 3.0 * self._kept_element)
        host.memory_bound(f"gradient.{head.name}.accumulate", added, "add")

    @property
    def _reduces(self) -> bool:
        """Whether a micro-step reduces gradients: none does."""
        return False

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients of all units while nothing computes, and update the weights."""
        table, message = self.shapes.table, self._message_element
        (group,), replicas = self._sharding.reduced_over, self._sharding.replicas
        size = table.size(group)
        reduced = []
        for unit in self.units.all:
            name = names.unit_gradient(unit.name, group)
            nbytes = np.full(len(table), unit.all_trained * message)
            host.memory_bound(f"{name}.pack", (size > 1) * 2.0 * nbytes, "copy")
            reduction, total = names.reduce(name), replica_sum(unit)
            host.issue(reduction, "reduce_scatter", nbytes, group, unit.n_trained)
            host.issue(total, "all_reduce", nbytes / size, replicas, unit.n_trained, (reduction,))
            reduced += [reduction, total]
        for name in reduced:
            host.wait(name)
        received = [unit.all_trained / size * self._of_receipt(unit) for unit in self.units.all]
        if np.any(sum(received) > 0):
            host.memory_bound("gradient.receive", sum(received, start=0.0), "cast")
        super().step_end(host)
