"""Attention over whole sequences, for every strategy that does not split sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from axonn_tune.spec import names
from axonn_tune.spec.job import Job
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Attention, Size
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import MASK_BYTES, Shapes


def attention_name(chain: str, window: int) -> str:
    """Return the name of a block's attention; attention with a window has a name of its own."""
    return names.of_layer(chain, "windowed_attention" if window else "attention")


def of_samples(kernel: Attention, job: Job) -> Attention:
    """Return the attention of the samples that are packed into the sequences of a kernel.

    All samples count as equally long. Longer ones among shorter ones would take more.
    """
    n_samples = job.samples_per_sequence
    if n_samples == 1.0:
        return kernel
    return replace(
        kernel,
        n_sequences=kernel.n_sequences * n_samples,
        seq_len=kernel.seq_len / n_samples,
    )


@contextmanager
def copied_heads(host: HostProgram, shapes: Shapes, chain: str, are_copied: bool) -> Iterator[None]:
    """Copy heads out of the product that formed them before attention, if they are copied.

    The backward pass joins their gradients after attention.
    """
    name = names.of_layer(chain, "attention_copies")
    if are_copied and chain != BACKWARD:
        nbytes = 2.0 * shapes.copied_heads_bytes
        host.memory_bound(name, nbytes, "copy", strided_bytes=nbytes)
    yield
    if are_copied and chain == BACKWARD:
        host.memory_bound(name, 2.0 * shapes.joined_heads_bytes, "copy")


@contextmanager
def ordered_heads(
    host: HostProgram, shapes: Shapes, chain: str, are_ordered: bool
) -> Iterator[None]:
    """Copy heads into the order that attention reads, and its output into that of the tokens.

    Fused attention reads sequence after sequence, so that the output of a single one needs no copy.
    Products of unfused attention read heads where they lie, and form the output head by head. The
    backward pass joins the gradients of queries, keys and values.
    """
    if not are_ordered or "qkv" not in shapes.linears:
        yield
        return
    heads = shapes.linears["qkv"].output_bytes
    is_fused = shapes.job.attention != "unfused"
    is_moved = (shapes.tokens > shapes.job.seq_len) | (not is_fused)
    output = shapes.linears["proj"].input_bytes * is_moved
    before, after = (heads * is_fused, output) if chain != BACKWARD else (output * is_fused, 0.0)
    _copy_in_order(host, names.of_layer(chain, "attention_order"), before)
    yield
    _copy_in_order(host, names.of_layer(chain, "attention_output_order"), after)
    if chain == BACKWARD:
        host.memory_bound(names.of_layer(chain, "attention_join"), 2.0 * heads, "copy")


def add_qkv_bias(host: HostProgram, shapes: Shapes, chain: str) -> None:
    """Add the bias of queries, keys and values to their product, in a kernel of its own.

    It reads and writes the product, and broadcasts the bias, so that it handles one element at a
    time.
    """
    heads = shapes.linears["qkv"]
    if heads.linear.bias:
        nbytes = 2.0 * heads.output_bytes
        name = names.bias(names.of_layer(chain, "qkv"))
        host.memory_bound(name, nbytes, "add", strided_bytes=nbytes)


def bias_scores(host: HostProgram, shapes: Shapes, chain: str) -> None:
    """Copy a bias of each head to all queries, and read the copies to add the scores to them.

    A kernel that broadcasts handles one element at a time. The bias needs no gradient.
    """
    if chain != BACKWARD:
        nbytes = shapes.score_bytes
        name = names.of_layer(chain, "attention_bias")
        host.memory_bound(name, 2.0 * nbytes, "copy", strided_bytes=nbytes)


def _copy_in_order(host: HostProgram, name: str, nbytes: Size) -> None:
    """Read and write a tensor in another order, which takes one element at a time."""
    host.memory_bound(name, 2.0 * nbytes, "copy", strided_bytes=2.0 * nbytes)


def whole_attention(host: HostProgram, shapes: Shapes, chain: str, window: int) -> None:
    """Run attention with the rank's heads, over its share of the queries."""
    job = shapes.job
    kernel = Attention(
        attention_name(chain, window),
        shapes.tokens / job.seq_len,
        shapes.n_heads,
        job.seq_len,
        shapes.attention_dim,
        backward=chain == BACKWARD,
        fused=job.attention == "flash",
        window=window,
        number_format=shapes.attention_format,
        dropout=job.drops_scores_within_attention,
    )
    host.launch(of_samples(kernel, job))
    if job.dropout and job.attention == "unfused":
        nbytes = shapes.score_bytes * (2.0 + MASK_BYTES / shapes.element_bytes)
        host.memory_bound(names.of_layer(chain, "attention_dropout"), nbytes, "scale")
