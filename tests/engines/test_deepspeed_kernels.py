"""What DeepSpeed copies around its messages, recorded kernel by kernel on gloo ranks."""

from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from build import number, operations
from engines.deepspeed_cases import ELEMENT_BYTES, GPT, LLAMA, VECTOR_ELEMENTS, WIDE, Case
from engines.deepspeed_on_cpu import recorded_deepspeed, started
from engines.traffic import Copies
from runtime.ranks import on_ranks
from torch.utils._python_dispatch import _disable_current_modes

from axonn_tune.spec.plan import MemoryBound

pytest.importorskip("deepspeed")

N_STEPS = 3
CASES = [
    Case(GPT, live=4.5, bucket=2.5),
    # proj is gathered with up, and all else alone.
    Case(GPT, live=4.5, bucket=2.5, prefetched=1500),
    Case(LLAMA, live=3.3, bucket=0, recompute="none"),
    # proj fits into the bucket alone.
    Case(GPT, live=4.5, bucket=0.1),
    # Blocks are gathered again for their gradients.
    Case(WIDE, live=0.33, bucket=2.5),
]


@contextmanager
def counted(owner, name, moved, kind):
    """Count the bytes that a function of a class or module moves."""
    function = getattr(owner, name)

    def counting(*args, **kwargs):
        with Copies("cat", "div_") as copies:
            result = function(*args, **kwargs)
        moved[kind] += copies.nbytes
        return result

    with patch.object(owner, name, counting):
        yield


@contextmanager
def uncounted(owner, name):
    """Count nothing of what a function of a module does: gloo copies in its collectives."""
    function = getattr(owner, name)

    def hidden(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    with patch.object(owner, name, hidden):
        yield


def moved_by(case, **settings):
    """Bytes that kernels move after gathers and before reductions of a micro-step."""
    from deepspeed.runtime.comm import coalesced_collectives
    from deepspeed.runtime.zero import partition_parameters as gathers
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Optimizer

    moved = Counter()
    is_reentrant = not case.keeps_blocks
    engine, ids = started(
        case.spec, case.zero_settings, case.recompute, 1, is_reentrant, **settings
    )
    with (
        counted(gathers.AllGatherHandle, "wait", moved, "gathers"),
        counted(gathers.AllGatherCoalescedHandle, "wait", moved, "gathers"),
        counted(Optimizer, f"_{Optimizer.__name__}__add_grad_to_ipg_bucket", moved, "reductions"),
        counted(Optimizer, f"_{Optimizer.__name__}__avg_scatter_grads", moved, "reductions"),
        uncounted(coalesced_collectives, "_torch_reduce_scatter_fn"),
    ):
        for _ in range(N_STEPS):
            moved.clear()
            engine.backward(engine(ids))
            engine.step()
    engine.destroy()
    return moved


def planned(plan, ending):
    """Bytes that a plan's kernels move whose names end so."""
    kernels = [op for op in operations(plan.microstep) if isinstance(op, MemoryBound)]
    return sum(number(op.nbytes) for op in kernels if op.name.endswith(ending))


def check_case(case, n_ranks, message_bytes):
    """Which of the last blocks stay gathered differs by less than a block from the plan.

    A rank's part of reduced gradients is cast back, which the plan leaves out: it is small where
    there are more than two ranks.
    """
    of_type = {ELEMENT_BYTES: {}, 4: {"communication_data_type": "fp32"}}
    moved = moved_by(case, **of_type[message_bytes])
    plan = case.plan(n_ranks, reduced_element_bytes=float(message_bytes))
    copied = planned(plan, ".copy")
    assert abs(moved["gathers"] - copied) < 2 * ELEMENT_BYTES * case.spec.block_matmul_parameters
    assert (moved["gathers"] > 0) == (copied > 0) == (case.prefetched > VECTOR_ELEMENTS)

    is_cast = message_bytes != ELEMENT_BYTES
    cast_back = is_cast * (message_bytes + ELEMENT_BYTES) * case.spec.parameters / n_ranks
    reductions = moved["reductions"] - cast_back
    # Vectors fit into every bucket, which takes them 8 bytes; the plan has the matrices' mean.
    matrices = [linear.parameters for linear in case.spec.block_linears]
    vectors = (
        case.spec.parameters - case.spec.n_layers * sum(matrices) - 2 * case.spec.head.parameters
    )
    assert abs(reductions - planned(plan, ".pack")) <= 8 * vectors


def check_rank(rank, n_ranks):
    with recorded_deepspeed():
        for case in CASES:
            for message_bytes in (ELEMENT_BYTES, 4):
                check_case(case, n_ranks, message_bytes)


@pytest.mark.slow
def test_deepspeed_copies_what_the_plan_says():
    on_ranks(2, check_rank, 2)
