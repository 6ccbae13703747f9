"""Execution traces read back with Google's protobuf, and played rank by rank with their durations.

The schema is written down here a second time, from schema/protobuf/et_def.proto of
https://github.com/mlcommons/chakra (commit 21585d8), so that a wrong number in the package shows.
"""

import io
import json
from collections import defaultdict
from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.proto import parse_length_prefixed
from google.protobuf.unknown_fields import UnknownFieldSet

NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
COLLECTIVES = (
    "ALL_REDUCE",
    "REDUCE",
    "ALL_GATHER",
    "GATHER",
    "SCATTER",
    "BROADCAST",
    "ALL_TO_ALL",
    "REDUCE_SCATTER",
    "REDUCE_SCATTER_BLOCK",
    "BARRIER",
)
VALUES = {
    "double_val": 3,
    "float_val": 5,
    "int32_val": 7,
    "int64_val": 9,
    "uint32_val": 11,
    "uint64_val": 13,
    "bool_val": 27,
    "string_val": 29,
    "bytes_val": 31,
}
NODE = {
    "id": (1, "uint64"),
    "name": (2, "string"),
    "type": (3, "int32"),
    "ctrl_deps": (4, "uint64", "repeated"),
    "data_deps": (5, "uint64", "repeated"),
    "start_time_micros": (6, "uint64"),
    "duration_micros": (7, "uint64"),
    "attr": (10, "AttributeProto", "repeated"),
}
METADATA = {"version": (1, "string"), "attr": (2, "AttributeProto", "repeated")}
# The type that ASTRA-sim's feeders expect of each attribute.
ATTRIBUTES = {
    "is_cpu_op": "bool_val",
    "num_ops": "int64_val",
    "tensor_size": "uint64_val",
    "comm_type": "int64_val",
    "comm_size": "int64_val",
    "comm_src": "int32_val",
    "comm_dst": "int32_val",
    "comm_tag": "int32_val",
    "pg_name": "string_val",
}


def _add_field(message, name, number, kind, label="optional"):
    field = message.field.add(name=name, number=number)
    field.label = getattr(descriptor_pb2.FieldDescriptorProto, f"LABEL_{label.upper()}")
    if kind[0].isupper():
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".ChakraProtoMsg.{kind}"
    else:
        field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
    return field


@cache
def schema():
    """The classes of Node and GlobalMetadata."""
    file = descriptor_pb2.FileDescriptorProto(
        name="et_def.proto", package="ChakraProtoMsg", syntax="proto3"
    )
    attribute = file.message_type.add(name="AttributeProto")
    _add_field(attribute, "name", 1, "string")
    attribute.oneof_decl.add(name="value")
    for name, number in VALUES.items():
        _add_field(attribute, name, number, name.removesuffix("_val")).oneof_index = 0
    for name, fields in (("Node", NODE), ("GlobalMetadata", METADATA)):
        message = file.message_type.add(name=name)
        for field, (number, *kind) in fields.items():
            _add_field(message, field, number, *kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("Node", "GlobalMetadata")
    return [
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in names
    ]


class ReadNode:
    """A node with its attributes by name."""

    def __init__(self, message):
        self.id = message.id
        self.name = message.name
        self.type = NODE_TYPES[message.type]
        self.needs = list(message.data_deps)
        self.start = message.start_time_micros
        self.duration = message.duration_micros
        self.attributes = {}
        for attribute in message.attr:
            value = attribute.WhichOneof("value")
            assert value == ATTRIBUTES[attribute.name], attribute.name
            assert attribute.name not in self.attributes
            self.attributes[attribute.name] = getattr(attribute, value)
        assert not message.ctrl_deps

    def __getattr__(self, name):
        try:
            return self.attributes[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def collective(self):
        """The kind of a collective, as the plan writes it."""
        return COLLECTIVES[self.comm_type].lower()


def read_trace(data):
    """The version and the nodes of one file."""
    node_class, metadata_class = schema()
    file = io.BytesIO(data)
    metadata = parse_length_prefixed(metadata_class, file)
    nodes = []
    while (message := parse_length_prefixed(node_class, file)) is not None:
        for part in (message, *message.attr):
            assert not len(UnknownFieldSet(part)), "a field that the schema does not have"
        nodes.append(ReadNode(message))
    return metadata.version, nodes


def read_directory(folder, name="step"):
    """The nodes of every rank, and the ranks of every group, of a directory of traces."""
    groups = json.loads((folder / "groups.json").read_text())
    traces = {
        int(path.name.split(".")[1]): read_trace(path.read_bytes())[1]
        for path in folder.glob(f"{name}.*.et")
    }
    return traces, groups


def play(traces, groups):
    """Play all ranks at once with the durations of their nodes; return when each node ends.

    A node starts when its dependencies have ended; a collective when all ranks of its group have
    come to it, in the order of their nodes; a receive when its message has been sent.
    """
    waiting = {rank: {n.id: len(set(n.needs)) for n in nodes} for rank, nodes in traces.items()}
    followers = {rank: defaultdict(list) for rank in traces}
    by_id = {rank: {node.id: node for node in nodes} for rank, nodes in traces.items()}
    for rank, nodes in traces.items():
        for node in nodes:
            for needed in set(node.needs):
                followers[rank][needed].append(node.id)
    ready = [(rank, node) for rank in traces for node, n in waiting[rank].items() if not n]
    ends = {rank: {} for rank in traces}
    met = defaultdict(list)  # the ranks that have come to a collective, with the time
    n_met = defaultdict(int)  # collectives of a group to which a rank has come
    sent = {}
    expected = {}

    def finish(rank, node, start):
        ends[rank][node.id] = start + node.duration
        for follower in followers[rank][node.id]:
            waiting[rank][follower] -= 1
            if not waiting[rank][follower]:
                ready.append((rank, follower))

    while ready:
        rank, node_id = ready.pop()
        node = by_id[rank][node_id]
        start = max((ends[rank][needed] for needed in node.needs), default=0)
        if node.type == "COMM_COLL_NODE":
            number = n_met[rank, node.pg_name]
            n_met[rank, node.pg_name] += 1
            come = met[node.pg_name, number]
            come.append((rank, node, start))
            if len(come) == len(groups[node.pg_name]):
                together = max(start for _, _, start in come)
                for member, its_node, _ in come:
                    finish(member, its_node, together)
        elif node.type == "COMM_RECV_NODE":
            key = (node.comm_src, node.comm_dst, node.comm_tag)
            if key in sent:
                finish(rank, node, max(start, sent[key]))
            else:
                expected[key] = (rank, node, start)
        else:
            finish(rank, node, start)
            if node.type == "COMM_SEND_NODE":
                key = (node.comm_src, node.comm_dst, node.comm_tag)
                sent[key] = ends[rank][node.id]
                if key in expected:
                    receiver, its_node, its_start = expected.pop(key)
                    finish(receiver, its_node, max(its_start, sent[key]))
    left = {rank: len(nodes) - len(ends[rank]) for rank, nodes in traces.items()}
    assert not any(left.values()), f"nodes that never start: {left}"
    return ends
