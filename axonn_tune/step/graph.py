"""What a rank does in a step as a graph: each operation with the operations that it follows.

An operation starts when all that it follows has ended. A kernel follows the kernel before it and
the collectives that the plan lets it wait for. A collective follows the last kernel that was issued
before it, the collectives that the plan lets it wait for, and the collective before it on its lane.
So playing the graph with the durations of its operations gives the predicted step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

from axonn_tune.simulate.timeline import Event
from axonn_tune.spec.measurement import HOST
from axonn_tune.spec.plan import Collective, HostWork, Operation, is_launched
from axonn_tune.step.player import PlayedPart

# Indices of operations in the list of a graph's nodes.
Places: TypeAlias = tuple[int, ...]


class Message(NamedTuple):
    """What a stage of a pipeline sends to another one, or receives from it.

    is_sent
        Whether it is sent; otherwise it is received.
    stage
        The other stage.
    tag
        Number that the message has on both sides, and no other message between two ranks has.
    """

    is_sent: bool
    stage: int
    tag: int


class Node(NamedTuple):
    """An operation in the graph of a step.

    operation
        Operation of the plan.
    start_seconds, end_seconds
        Times since the start of the step.
    follows
        Indices of the operations that end before it starts.
    message
        What is sent or received, if the operation is a transfer between stages.
    """

    operation: Operation
    start_seconds: float
    end_seconds: float
    follows: Places
    message: Message | None = None


class Graph:
    """The operations of a rank, each after those that it follows.

    Parameters
    ----------
    exchange : sequence of Message
        What the rank sends and receives where the plan has a transfer between the ends of a
        pipeline.
    """

    def __init__(self, exchange: Sequence[Message] = ()) -> None:
        self.nodes: list[Node] = []
        self._exchange = exchange
        self._before: Places = ()  # what the next kernel follows in any case
        self._beside: dict[str, Places] = {}  # what runs beside all parts until `join`, by axis

    def play(self, part: PlayedPart) -> None:
        """Add a part once; it begins when all before it has ended."""
        latest: dict[str, Places] = {}  # latest collective of each name
        lanes: dict[int, Places] = {}
        for event in part.events:
            operation = event.operation
            awaited = chain.from_iterable(latest.get(name, ()) for name in operation.waits_for)
            follows = _distinct(self._before, awaited)
            if isinstance(operation, Collective):
                previous = lanes.get(event.lane, ()), self._beside.get(operation.axis, ())
                places = self._add_collective(event, _distinct(follows, *previous))
                latest[operation.name] = lanes[event.lane] = places
            else:
                self._before = follows
                if is_launched(operation):
                    self._before = (self._add(operation, event.seconds, follows),)
        self._before = _distinct(self._before, *lanes.values())
        if part.host_seconds > 0:
            work = HostWork(HOST, part.host_seconds)
            self._before = (self._add(work, part.host_seconds, self._before),)

    def transfer(
        self, operation: Collective, seconds: float, message: Message, ready_seconds: float = 0.0
    ) -> None:
        """Add a message that kernels wait for; it does not start before `ready_seconds`."""
        follows = self._before
        self._before = (self._add(operation, seconds, follows, message, ready_seconds),)

    def wait_for(self, collective: Collective, seconds: float) -> None:
        """Add a collective for which kernels wait.

        It follows those of its group that run beside the parts.
        """
        follows = _distinct(self._before, self._beside.get(collective.axis, ()))
        self._before = (self._add(collective, seconds, follows),)

    def run_beside(self, collectives: Iterable[tuple[Collective, float]]) -> None:
        """Add collectives with their seconds, for which no kernel waits until `join`.

        The collectives of a group run one after another, beside the parts or in them.
        """
        for operation, seconds in collectives:
            follows = _distinct(self._before, self._beside.get(operation.axis, ()))
            self._beside[operation.axis] = (self._add(operation, seconds, follows),)

    def join(self) -> None:
        """Let what comes next follow the collectives that run beside the parts."""
        self._before = _distinct(self._before, *self._beside.values())
        self._beside.clear()

    def _add_collective(self, event: Event, follows: Places) -> Places:
        """Add a collective, or both directions of an exchange, and return the indices.

        The receiving direction takes the whole time, as in a pass.
        """
        operation = event.operation
        if isinstance(operation, Collective) and operation.kind == "send_recv":
            return tuple(
                self._add(operation, 0.0 if each.is_sent else event.seconds, follows, each)
                for each in self._exchange
            )
        return (self._add(operation, event.seconds, follows),)

    def _add(
        self,
        operation: Operation,
        seconds: float,
        follows: Places,
        message: Message | None = None,
        ready_seconds: float = 0.0,
    ) -> int:
        """Add a node and return its index."""
        nodes = self.nodes
        start = max([ready_seconds, *(nodes[place].end_seconds for place in follows)])
        nodes.append(Node(operation, start, start + seconds, follows, message))
        return len(nodes) - 1


def _distinct(*places: Iterable[int]) -> Places:
    """Return all indices once, in the order of their first appearance."""
    return tuple(dict.fromkeys(chain(*places)))
