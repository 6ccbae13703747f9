"""Copies of heads around Megatron-Core's attention, in bytes counted by hand."""

import pytest
from build import number, plan_of
from worlds import llama

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

TOKENS = 2048
HEAD_BYTES = TOKENS * 128 * 2
COPYING = Megatron3D(engine=Engine(megatron=MegatronProgram(copies_heads=True)))


def copied(strategy, n_groups, position="rotary", tensor=1, attention="flash"):
    """The bytes that copies move in a forward and in a backward pass of 8 heads."""
    model = llama(
        n_layers=2,
        hidden_size=1024,
        n_heads=8,
        n_kv_heads=n_groups,
        vocab_size=4096,
        seq_len=TOKENS,
        ffn_hidden_size=4096,
        position=position,
    )
    job = Job(n_gpus=8, global_batch=8, seq_len=TOKENS, attention=attention)
    found = {
        op.name.split(".")[0]: number(op.nbytes)
        for op in plan_of(strategy, model, job, data=8 // tensor, tensor=tensor).operations
        if isinstance(op, MemoryBound) and op.name.endswith("attention_copies")
    }
    return found.get("forward", 0.0), found.get("backward", 0.0)


@pytest.mark.parametrize(
    ("n_groups", "position", "tensor", "forward", "backward"),
    [
        pytest.param(2, "rotary", 1, 8 + 2, 8 + 2 + 2, id="queries and values"),
        pytest.param(8, "rotary", 1, 8, 8 + 8 + 8, id="values: every head has its own"),
        pytest.param(2, "learned", 1, 8 + 2 + 2, 8 + 2 + 2, id="all: none is turned"),
        pytest.param(8, "learned", 1, 0, 0, id="none: attention reads them where they lie"),
        pytest.param(2, "rotary", 2, 1, 4 + 1 + 1, id="values: a rank has one group"),
    ],
)
def test_heads_are_copied_that_attention_cannot_read_in_place(
    n_groups, position, tensor, forward, backward
):
    assert copied(COPYING, n_groups, position, tensor) == (
        2 * forward * HEAD_BYTES,
        2 * backward * HEAD_BYTES,
    )


def test_copies_handle_one_element_at_a_time_and_joined_gradients_do_not():
    model = llama(
        n_layers=1,
        hidden_size=1024,
        n_heads=8,
        n_kv_heads=2,
        vocab_size=4096,
        seq_len=TOKENS,
        ffn_hidden_size=4096,
    )
    plan = plan_of(COPYING, model, Job(n_gpus=8, global_batch=8, seq_len=TOKENS), data=8)
    copies = {op.name: op for op in plan.operations if op.name.endswith("attention_copies")}
    forward, backward = copies["forward.attention_copies"], copies["backward.attention_copies"]
    assert number(forward.strided_bytes) == number(forward.nbytes) > 0
    assert number(backward.strided_bytes) == 0 < number(backward.nbytes)


def test_other_programs_and_unfused_attention_copy_nothing():
    assert copied(Megatron3D(), 2) == (0.0, 0.0)
    assert copied(COPYING, 2, attention="unfused") == (0.0, 0.0)
