"""DeepSpeed itself reduces each matrix by itself, in the order that the plan takes for granted."""

from dataclasses import replace

import pytest
from engines.deepspeed_cases import ELEMENT_BYTES, GPT, LLAMA, Case
from engines.deepspeed_on_cpu import recorded_deepspeed, started, taken
from engines.events import Event
from runtime.ranks import on_ranks

from axonn_tune.strategies.zero.units import reduced_beside

pytest.importorskip("deepspeed")

CASES = [
    Case(replace(spec, n_layers=4), live=4.5, bucket=0, recompute=recompute)
    for spec in (GPT, LLAMA)
    for recompute in ("none", "full")
]


def recorded_backward(case, events):
    """What a rank does in a backward pass of its second step, where gradients are noted, too."""
    engine, ids = started(case.spec, case.zero_settings, case.recompute, 1, reentrant=False)
    for block in engine.module.blocks:
        for layer, module in block.linears.items():
            formed = Event("form", layer, "", 0.0)
            for parameter in module.parameters():
                parameter.register_hook(lambda _, formed=formed: events.append(formed))
    for _ in range(2):
        loss = engine(ids)
        events.clear()
        engine.backward(loss)
        backward = taken(events)
        engine.step()
    engine.destroy()
    return backward


def reduced_in_middle(case, backward):
    """The bytes of the matrices of a block that are reduced after the gradient of each layer.

    The block is in the middle. The gradient of a layer's matrix is followed by that of its bias.
    """
    linears = case.spec.block_linears
    matrices = {ELEMENT_BYTES * linear.parameters for linear in linears}
    reduced = []
    for event in backward:
        if event.action == "form":
            if not reduced or reduced[-1][0] != event.kind:
                reduced.append((event.kind, []))
        elif reduced and event[:2] == ("start", "reduce_scatter") and event.amount in matrices:
            reduced[-1][1].append(event.amount)
    return dict(reduced[len(linears) : 2 * len(linears)])


def check_rank(rank, n_ranks):
    with recorded_deepspeed() as events:
        for case in CASES:
            sizes = {
                linear.name: ELEMENT_BYTES * linear.parameters for linear in case.spec.block_linears
            }
            wanted = {
                layer: [sizes[each] for each in reduced]
                for layer, reduced in reduced_beside(case.spec).items()
            }
            assert reduced_in_middle(case, recorded_backward(case, events)) == wanted


@pytest.mark.slow
def test_a_matrix_is_reduced_when_the_next_gradient_comes():
    on_ranks(2, check_rank, 2)
