"""The graphs of a predicted step: one for the ranks of each stage of a pipeline, or for all ranks.

The stages of a pipeline exchange messages. A pass that receives one needs the time of a transfer to
do so; a pass that receives none needs it to send its own, as the prediction takes one transfer for
each pass.

The prediction assumes that collectives which gather new weights and reduce gradients during the
passes are hidden, except those of the first stage. So the graph of any other stage issues them
before its first and after its last pass, and nothing waits for them until all passes of their rank
have ended. Where the first micro-batch waits for new weights in each stage, it waits for the first
of these collectives, as long as in the first stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from axonn_tune.errors import InputError
from axonn_tune.simulate.orders import BACKWARD, FORWARD, Pass
from axonn_tune.simulate.pipeline import PlayedPass
from axonn_tune.simulate.pipeline_schedule import source_of
from axonn_tune.spec.plan import Collective, Phase, Pipeline, number
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.step.graph import Graph, Message, Node
from axonn_tune.step.player import PlayedPart, Player
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import whole_rounds


class StepGraphs:
    """The graphs of the ranks of a predicted step.

    Parameters
    ----------
    most_layers, most_microsteps : int or None
        Largest number of equal layers in a row, and of micro-steps, as in `step_timeline`.
    """

    def __init__(
        self,
        prediction: Prediction,
        most_layers: int | None = None,
        most_microsteps: int | None = None,
    ) -> None:
        self._player = Player(prediction).shortened(most_layers)
        self.prediction = prediction
        self.n_microsteps = whole_rounds(prediction, most_microsteps or prediction.n_microsteps)
        self.n_stages = prediction.layout.n_stages
        self.placements = self._player.table.placements
        self.axes = tuple(axis for axis, lane in self._player.axis_lanes.items() if lane)

    def of_stage(self, stage: int) -> list[Node]:
        """Return the operations of a rank of a stage, each after those that it follows."""
        if self._passes is None:
            graph = Graph()
            parts = self._player.parts(self.n_microsteps)
        else:
            graph = self._passes.graph(stage)
            parts = [self._player.play(self._player.plan.step_end, 1)]
        for part in parts:
            for _ in range(part.repeats):
                graph.play(part)
        return graph.nodes

    @cached_property
    def _passes(self) -> _Passes | None:
        """The passes of the pipeline, if there is one."""
        pipeline = self._player.plan.pipeline
        if pipeline is None:
            return None
        if pipeline.schedule != ONE_F_ONE_B:
            raise InputError(
                f"schedule is '{pipeline.schedule}'; allowed for graphs of ranks: {ONE_F_ONE_B}"
            )
        if any(pipeline.handover_seconds):
            raise InputError(
                f"engine is '{self.prediction.scenario.strategy.engine.name}', whose stages sleep "
                "over their messages; allowed for graphs of ranks: engines whose stages do not"
            )
        return _Passes(self._player, pipeline, self.n_microsteps)


class _Passes:
    """The passes of a pipeline's ranks."""

    def __init__(self, player: Player, pipeline: Pipeline, n_micro: int) -> None:
        self._player = player
        self._pipeline = pipeline
        self._n_micro = n_micro
        self._last = player.table.n_chunks - 1
        self._n_stages = player.prediction.layout.n_stages
        self._played, self._parts = player.passes(pipeline, n_micro)
        syncs_at_end = number(pipeline.syncs_at_end, player.row)
        self._sync = pipeline.without_sync if syncs_at_end else pipeline.sync
        forward, backward = (player.play(part, 1) for part in self._sync.passes)
        self._synchronising: dict[Pass, PlayedPart] = {
            (FORWARD, 0, 0): forward,
            (BACKWARD, 0, n_micro - 1): backward,
        }
        # The schedule leaves out the time that synchronisation adds to the first micro-batch.
        usual = player.play(pipeline.without_sync.forward, 1)
        self._delay_seconds = forward.seconds - usual.seconds
        self._n_delays, _ = player.n_synchronised(pipeline)
        self._number = {_identity(each): number for number, each in enumerate(self._played)}

    def graph(self, rank: int) -> Graph:
        """Return the graph of all passes of one rank of the pipeline."""
        graph = Graph(self._exchange(rank))
        for each in self._played:
            if each.rank == rank:
                self._add(graph, each)
        graph.join()
        return graph

    def _add(self, graph: Graph, each: PlayedPass) -> None:
        """Add a pass, with what it receives before and sends after its operations."""
        transfer = self._pipeline.transfer
        seconds = 0.0 if each.is_sent_beside else self._player.seconds_of(transfer)
        identity = _identity(each)
        gathers = list(self._hidden(*identity[:2])) if identity == (FORWARD, each.stage, 0) else []
        awaits_gather = bool(gathers) and each.stage < self._n_delays and self._delay_seconds > 0
        if not awaits_gather:
            graph.run_beside(gathers)
        source = source_of(*identity, self._last)
        if source is not None and source[1] != each.stage:
            ready = self._played[self._number[source]].arrival_seconds + self._delay(each)
            graph.transfer(transfer, seconds, self._message(False, source, source[1]), ready)
            seconds = 0.0
        if awaits_gather:
            (gather, _), *others = gathers
            graph.wait_for(gather, self._delay_seconds)
            graph.run_beside(others)
        graph.play(self._synchronising.get(identity, self._parts[each.part]))
        if identity == (BACKWARD, each.stage, self._n_micro - 1):
            graph.run_beside(self._hidden(BACKWARD, each.stage))
        target = each.stage + (1 if each.direction == FORWARD else -1)
        if 0 <= target <= self._last:
            graph.transfer(transfer, seconds, self._message(True, identity, target))

    def _delay(self, each: PlayedPass) -> float:
        """Return by how many seconds a pass receives its input later than the schedule says.

        The micro-batches of the first round wait only in the stages that they have left.
        """
        is_early = each.direction == FORWARD and each.micro_batch < self._n_stages
        n_delays = min(each.stage, self._n_delays) if is_early else self._n_delays
        return n_delays * self._delay_seconds

    def _message(self, is_sent: bool, sender: Pass, stage: int) -> Message:
        """Return the result of a pass as a message to or from the rank of a virtual stage."""
        return Message(is_sent, stage % self._n_stages, self._number[sender])

    def _exchange(self, rank: int) -> tuple[Message, ...]:
        """Return what a rank exchanges with the other end of the pipeline at the step's end."""
        end = self._n_stages - 1
        if 0 < rank < end:
            return ()
        upwards, downwards = len(self._number), len(self._number) + 1
        if rank == 0:
            return Message(True, end, upwards), Message(False, end, downwards)
        return Message(True, 0, downwards), Message(False, 0, upwards)

    def _hidden(self, direction: int, stage: int) -> Iterator[tuple[Collective, float]]:
        """Yield the collectives of a virtual stage that the prediction assumes to be hidden."""
        if stage > 0:
            shape = self._pipeline.stage(stage, self._last + 1)
            for phase in self._player.phases(shape.passes[direction]):
                for operation in phase.common_repeats * self._added(direction, phase):
                    yield operation, self._player.seconds_of(operation)

    def _added(self, direction: int, phase: Phase) -> list[Collective]:
        """Return the collectives of the synchronising pass that a phase of other passes lacks."""
        usual = _names(self._pipeline.without_sync.passes[direction].phases)
        shared = _names([phase]) & usual
        for other in self._sync.passes[direction].phases:
            if shared & _names([other]):
                return [
                    op
                    for op in other.operations
                    if isinstance(op, Collective)
                    and op.name not in usual
                    and self._player.axis_lanes[op.axis]
                ]
        return []


def _identity(each: PlayedPass) -> Pass:
    """Return the direction, the virtual stage counted through all ranks, and the micro-batch."""
    return each.direction, each.stage, each.micro_batch


def _names(phases: Sequence[Phase]) -> set[str]:
    """Return the names of all operations of some phases."""
    return {operation.name for phase in phases for operation in phase.operations}
