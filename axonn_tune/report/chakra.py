"""Predicted steps as execution traces of MLCommons Chakra, which network simulators play.

A file holds the operations of one rank: the message `GlobalMetadata`, then a message `Node` for
each operation, and before each message its length. The numbers of the fields are those of
schema/protobuf/et_def.proto in https://github.com/mlcommons/chakra, version 1.0.0 (commit 21585d8),
the names of the attributes those that its feeder and ASTRA-sim (commit 518bd51) read.

The ranks of a stage do the same; their files differ in the groups and in the ranks to which they
send. So all else is encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple, TypeAlias

from axonn_tune.errors import InputError
from axonn_tune.report.trace import MICROSECONDS
from axonn_tune.report.wire import (
    bytes_field,
    delimited,
    integer_field,
    integers_field,
    text_field,
)
from axonn_tune.spec.groups import AxisGroups
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.plan import (
    Attention,
    Collective,
    Gemm,
    HostWork,
    MemoryBound,
    Operation,
    Size,
    number,
)
from axonn_tune.step.graph import Message, Node
from axonn_tune.step.rank_graphs import StepGraphs

SCHEMA_VERSION = "1.0.0"

# The field of a GlobalMetadata.
_VERSION = 1
# Fields of a Node.
_ID, _NAME, _TYPE, _DATA_DEPS, _START, _DURATION, _ATTRIBUTE = 1, 2, 3, 5, 6, 7, 10
# Fields of an AttributeProto: its name, and its value by the type of the value.
_ATTRIBUTE_NAME, _INT32, _INT64, _UINT64, _BOOL, _STRING = 1, 7, 9, 13, 27, 29
# Members of NodeType.
_COMPUTATION, _SEND, _RECEIVE, _COLLECTIVE = 4, 5, 6, 7
# Members of CollectiveCommType.
_COLLECTIVE_TYPES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}

# What differs between the ranks of a stage: the group over an axis, or the rank at the other end of
# a message.
_Varying: TypeAlias = str | Message


class _RankNode(NamedTuple):
    """A node without its last attributes, which depend on the rank."""

    body: bytes
    varying: _Varying


class ExecutionTraces:
    """The execution traces of the ranks of a step."""

    def __init__(self, graphs: StepGraphs) -> None:
        """Prepare the traces; raise InputError for a step with offload, which they cannot hold."""
        if graphs.prediction.scenario.job.uses_host:
            raise InputError(
                "--format chakra: an execution trace has no copies between GPU and host; allowed: "
                "a job without --offload and --offload-modules"
            )
        self._graphs = graphs
        self._element_bytes = graphs.prediction.scenario.job.element_bytes
        self._groups = {axis: AxisGroups.of(graphs.placements, axis) for axis in graphs.axes}
        counts = [len(groups) for groups in self._groups.values()]
        # ASTRA-sim keeps the number 0 for all ranks.
        self._first_number = dict(zip(self._groups, accumulate([1, *counts]), strict=False))

    def group_document(self) -> dict[str, list[int]]:
        """Return the ranks of every group by its number, as ASTRA-sim reads them."""
        return {
            str(self._first_number[axis] + group): list(groups.ranks(group))
            for axis, groups in self._groups.items()
            for group in range(len(groups))
        }

    def files(self, ranks: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the trace of each of these ranks, stage by stage."""
        by_stage = sorted(ranks, key=self._stage_of)
        for stage, ranks_of_stage in groupby(by_stage, self._stage_of):
            pieces = self._stage_pieces(stage)
            for rank in ranks_of_stage:
                yield rank, self._trace(pieces, rank, stage)

    def _stage_of(self, rank: int) -> int:
        """Return the stage of the pipeline to which a rank belongs."""
        return self._groups[PIPELINE].place_of(rank) if self._graphs.n_stages > 1 else 0

    def _stage_pieces(self, stage: int) -> list[bytes | _RankNode]:
        """Return the trace that the ranks of a stage share, but for what varies."""
        pieces: list[bytes | _RankNode] = [delimited(text_field(_VERSION, SCHEMA_VERSION))]
        fixed: dict[tuple[str, str], bytes] = {}  # by name and axis, which determine the sizes
        for place, node in enumerate(self._graphs.of_stage(stage)):
            operation = node.operation
            axis = operation.axis if isinstance(operation, Collective) else ""
            key = (operation.name, axis)
            if key not in fixed:
                fixed[key] = self._operation_fields(operation)
            body = _place_fields(place, node) + fixed[key]
            if node.message is not None:
                pieces.append(_RankNode(body + _message_fields(node.message), node.message))
            elif axis:
                pieces.append(_RankNode(body, axis))
            else:
                pieces.append(delimited(body))
        return _joined(pieces)

    def _trace(self, pieces: Sequence[bytes | _RankNode], rank: int, stage: int) -> bytes:
        """Return the trace of one rank."""
        varying = {piece.varying for piece in pieces if isinstance(piece, _RankNode)}
        fields = {each: self._rank_fields(each, rank, stage) for each in varying}
        return b"".join(
            piece if isinstance(piece, bytes) else delimited(piece.body + fields[piece.varying])
            for piece in pieces
        )

    def _rank_fields(self, varying: _Varying, rank: int, stage: int) -> bytes:
        """Return the attributes of a node that depend on the rank."""
        if isinstance(varying, str):
            group = self._first_number[varying] + self._groups[varying].group_of(rank)
            return _attribute("pg_name", text_field(_STRING, str(group)))
        other = rank + (varying.stage - stage) * self._groups[PIPELINE].stride
        source, target = (rank, other) if varying.is_sent else (other, rank)
        return _attribute("comm_src", integer_field(_INT32, source)) + _attribute(
            "comm_dst", integer_field(_INT32, target)
        )

    def _operation_fields(self, operation: Operation) -> bytes:
        """Return the fields that are the same wherever an operation stands."""
        is_host = _attribute("is_cpu_op", integer_field(_BOOL, isinstance(operation, HostWork)))
        common = text_field(_NAME, operation.name) + is_host
        if isinstance(operation, Collective):
            return common + self._communication_fields(operation)
        flops, nbytes = self._amounts(operation)
        return (
            common
            + integer_field(_TYPE, _COMPUTATION)
            + _attribute("num_ops", integer_field(_INT64, round(flops)))
            + _attribute("tensor_size", integer_field(_UINT64, round(nbytes)))
        )

    def _communication_fields(self, operation: Collective) -> bytes:
        """Return the bytes that a rank puts into a collective or sends, and what a collective is.

        The plan counts the gathered result of an all-gather.
        """
        nbytes = number(operation.nbytes)
        if operation.kind == "all_gather":
            nbytes /= self._groups[operation.axis].size
        size = _attribute("comm_size", integer_field(_INT64, max(round(nbytes), 1)))
        if operation.kind == "send_recv":
            return size
        kind = _COLLECTIVE_TYPES[operation.kind]
        return (
            integer_field(_TYPE, _COLLECTIVE)
            + _attribute("comm_type", integer_field(_INT64, kind))
            + size
        )

    def _amounts(self, operation: Operation) -> tuple[float, float]:
        """Return the FLOPs of a kernel, and the bytes of its operands and its result.

        A kernel that memory bandwidth limits counts as one FLOP, so that a roofline, which divides
        by the FLOPs, finds the time of its bytes.
        """
        if isinstance(operation, MemoryBound):
            return 1.0, number(operation.nbytes)
        if isinstance(operation, HostWork):
            return 0.0, 0.0
        assert isinstance(operation, Gemm | Attention), "steps with offload are refused"
        return number(operation.flops), self._element_bytes * number(_n_elements(operation))


def _n_elements(operation: Gemm | Attention) -> Size:
    """Return the number of elements of the operands and the result of a product or of attention.

    The gradients of attention are as many as its queries, keys, values and outputs, which the
    backward pass reads too.
    """
    if isinstance(operation, Gemm):
        m, n, k = operation.m, operation.n, operation.k
        return (m * k + k * n + m * n) * operation.n_products
    n_tensors = 8.0 if operation.backward else 4.0
    per_sequence = operation.n_heads * (operation.seq_len * operation.head_dim)
    return n_tensors * operation.n_launches * operation.n_sequences * per_sequence


def _place_fields(place: int, node: Node) -> bytes:
    """Return where a node stands in the graph, and when it starts and how long it takes.

    The times are rounded, not the durations, so that rounding errors do not add up.
    """
    start = round(node.start_seconds * MICROSECONDS)
    end = round(node.end_seconds * MICROSECONDS)
    return (
        integer_field(_ID, place)
        + integers_field(_DATA_DEPS, node.follows)
        + integer_field(_START, start)
        + integer_field(_DURATION, end - start)
    )


def _message_fields(message: Message) -> bytes:
    """Return the direction and the tag of a message."""
    kind = integer_field(_TYPE, _SEND if message.is_sent else _RECEIVE)
    return kind + _attribute("comm_tag", integer_field(_INT32, message.tag))


def _attribute(name: str, value: bytes) -> bytes:
    """Return an attribute; the value is a field of an AttributeProto."""
    return bytes_field(_ATTRIBUTE, text_field(_ATTRIBUTE_NAME, name) + value)


def _joined(pieces: Sequence[bytes | _RankNode]) -> list[bytes | _RankNode]:
    """Join neighbouring pieces of bytes; what depends on the rank stays a piece of its own."""
    joined: list[bytes | _RankNode] = []
    for piece in pieces:
        if isinstance(piece, bytes) and joined and isinstance(joined[-1], bytes):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined
