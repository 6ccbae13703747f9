"""Traces of programs that do what a plan says."""

from axonn_tune.spec.traced import Trace, TracedOperation

# Descriptions of process groups, by the axis that they mean.
DESCRIPTIONS = {
    "shard": "mesh_fsdp",
    "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
    "context*data": "DATA_PARALLEL_GROUP_WITH_CP",
    "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP",
}


def traced_as_planned(explanation, sizes, slower=2.0):
    """The trace of a program that does what the plan says, with transposed products."""
    operations = []
    for op in explanation.operations:
        kind, shape = op.kind, ()
        if op.kind.startswith("GEMM"):
            m, n, k = map(int, op.shape.split(" x "))
            kind, shape = "product", (n, m, k)
        elif op.kind == "attention":
            kind += ", backward" * op.name.startswith("backward")
        elif op.name.startswith("optimizer."):
            kind = "optimizer"
        elif op.kind == "host":
            continue
        traced = TracedOperation(
            f"kernel of {op.name}",
            kind,
            slower * op.seconds_per_call,
            shape,
            op.nbytes if op.axis else 0.0,
            sizes.get(op.axis, 0),
            DESCRIPTIONS.get(op.axis, ""),
        )
        operations += [traced] * op.n_calls
    return Trace(tuple(operations), 1)
