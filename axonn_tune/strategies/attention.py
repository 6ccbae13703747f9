"""Attention of whole sequences, as every strategy runs it that does not split sequences."""

from __future__ import annotations

from axonn_tune.spec import names
from axonn_tune.spec.names import BACKWARD
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import MASK_BYTES, Shapes


def whole_attention(host: HostProgram, shapes: Shapes, chain: str) -> None:
    """Run attention with the rank's heads, over its share of the queries."""
    job = shapes.job
    host.attention(
        names.of_layer(chain, "attention"),
        shapes.tokens / job.seq_len,
        shapes.n_heads,
        job.seq_len,
        shapes.model.head_dim,
        chain == BACKWARD,
        job.attention == "flash",
    )
    if job.dropout and job.attention == "unfused":
        nbytes = shapes.score_bytes * (2.0 + MASK_BYTES / shapes.element_bytes)
        host.memory_bound(names.of_layer(chain, "attention_dropout"), nbytes, "scale")
