"""DeepSpeed itself trains with ZeRO-3 on gloo ranks, and what it sends is compared with the plan.

DeepSpeed records in its first micro-step which layer follows which, and gathers nothing ahead in
it. All later ones are alike. They differ from the plan in these facts; their places are in
DeepSpeed's folder runtime/zero:

- It gathers ahead as much as it may hold (partitioned_param_coordinator.py,
  `_fetch_sub_module_impl`), which is several blocks; the plan gathers one block ahead.
- Which of the last blocks stay gathered depends on what else it holds at that moment; in the plan
  as many stay as fit next to the head. The two differ by less than a block.
- It releases what recomputation has gathered if a block is large, and gathers it again: the plan
  has that of checkpoints that are reentrant, as Megatron-DeepSpeed's and those of `launch` are.
- It gathers the embedding, which the plan keeps, again for its gradient.
- It counts whole reductions; in the plan the last bucket of the blocks is a share of one.
- It sums the norm in 8 bytes (stage3.py, `get_grad_norm_direct`), the plan in 4.
"""

import itertools

import pytest
from build import number, operations
from engines.deepspeed_cases import ELEMENT_BYTES, GPT, LLAMA, WIDE, Case
from engines.deepspeed_on_cpu import PASSES, recorded_deepspeed, trained
from runtime.ranks import on_ranks

from axonn_tune.spec.plan import Collective

pytest.importorskip("deepspeed")

N_STEPS = 3
CASES = [
    Case(GPT, live=4.5, bucket=2.5),
    Case(GPT, live=2.2, bucket=3.5, n_microsteps=2),
    Case(LLAMA, live=3.3, bucket=0, recompute="none"),
    Case(GPT, live=4.5, bucket=2.5, prefetched=1500),
    # A rank may hold less than what recomputation would leave gathered for the gradients. WIDE
    # stands to it as a block of 12288 does to the billion that is the default.
    Case(GPT, live=0.3, bucket=2.5),
    Case(LLAMA, live=0.3, bucket=2.5),
    Case(WIDE, live=0.33, bucket=2.5),
]


def planned(part, *names):
    """The calls and the bytes of a plan's collectives whose names begin so."""
    found = [
        op for op in operations(part) if isinstance(op, Collective) and op.name.startswith(names)
    ]
    return sum(number(op.n_calls) for op in found), sum(number(op.nbytes) for op in found)


def sent(microstep, kind, *passes):
    """The bytes of each collective of a kind over all ranks, in the order of their starts."""
    events = [event for name in passes for event in microstep[name]]
    assert {event.axis for event in events} == {"z"}
    return [e.amount for e in events if e.action == "start" and e.kind == kind]


def joined(matrices, prefetched):
    """The bytes of gathers of a block that matrices join as long as these have too few elements."""
    gathers = [0.0]
    for nbytes in matrices:
        if gathers[-1] >= ELEMENT_BYTES * prefetched:
            gathers.append(0.0)
        gathers[-1] += nbytes
    return gathers


def check_gathers(case, plan, microstep):
    spec = case.spec
    everything = sent(microstep, "all_gather", "forward", "backward")
    embedding = ELEMENT_BYTES * spec.head.parameters
    matrices = [ELEMENT_BYTES * linear.parameters for linear in spec.block_linears]
    gathers = joined(matrices, case.prefetched)
    assert everything.count(embedding) == 3
    assert planned(plan, "forward.root") == (1, 2 * embedding)

    of_blocks = [nbytes for nbytes in everything if nbytes != embedding]
    n_forward = len(gathers) * spec.n_layers
    forward, again = of_blocks[:n_forward], of_blocks[n_forward:]
    assert forward == gathers * spec.n_layers
    assert planned(plan, "forward.block") == (n_forward, sum(forward))

    n_calls, nbytes = planned(plan, "recompute.block", "backward.block")
    if case.keeps_blocks:
        assert 0 < n_calls < n_forward, "some blocks stay gathered"
    else:
        assert n_calls > n_forward, "some matrices are gathered twice"
    assert abs(len(again) - n_calls) < len(matrices)
    assert abs(sum(again) - nbytes) < sum(matrices)


def check_reductions(case, plan, microstep):
    recorded = sent(microstep, "reduce_scatter", "backward")
    n_calls, nbytes = planned(plan, "gradient.")
    assert sum(recorded) == nbytes
    if case.bucket:
        assert max(recorded) <= ELEMENT_BYTES * case.bucket_elements
    # The plan reduces the root at once, DeepSpeed its two matrices and the norm between them.
    n_more = 1 if case.bucket else 3
    assert n_calls <= len(recorded) < n_calls + n_more


def check_order(microstep):
    """Gradients are reduced in the backward pass, each time by a call that blocks."""
    kinds = [{event.kind for event in microstep[name]} for name in PASSES[:2]]
    assert kinds == [{"all_gather"}, {"all_gather", "reduce_scatter"}]
    pairs = itertools.pairwise(microstep["backward"])
    starts = [pair for pair in pairs if pair[0][:2] == ("start", "reduce_scatter")]
    assert all(a._replace(action="await") == b for a, b in starts)


def check_end(plan, microstep):
    """The norm, then each vector, all of which are under way before the first is awaited."""
    events = microstep["step"]
    n_calls, nbytes = planned(plan, "weights.vectors")
    gathers = ["all_gather"] * int(n_calls)
    wanted = ["all_reduce", *gathers]
    assert [e.kind for e in events if e.action == "start"] == wanted
    assert [e.kind for e in events if e.action == "await"] == wanted
    assert [e.action for e in events[2:]] == ["start"] * len(gathers) + ["await"] * len(gathers)
    assert sum(sent(microstep, "all_gather", "step")) == nbytes
    assert sent(microstep, "all_reduce", "step") == [8]
    assert planned(plan, "gradient.norm") == (1, 4)


def n_on_demand(microstep):
    """The number of gathers that are awaited as soon as they have been started."""
    actions = [e.action for e in microstep["forward"] if e.kind == "all_gather"]
    under_way = itertools.accumulate(1 if action == "start" else -1 for action in actions)
    starts = zip(actions, actions[1:], under_way, strict=False)
    return sum((*each,) == ("start", "await", 1) for each in starts)


def check_case(case, n_ranks, events):
    microsteps = trained(
        case.spec,
        case.zero_settings,
        case.recompute,
        case.n_microsteps,
        N_STEPS,
        events,
        reentrant=not case.keeps_blocks,
    )
    plan = case.plan(n_ranks)
    first, last = microsteps[0], microsteps[-case.n_microsteps :]
    assert int(number(plan.n_microsteps)) == case.n_microsteps
    assert n_on_demand(first) == len(sent(first, "all_gather", "forward"))
    for microstep in last:
        if case.keeps_blocks:
            assert n_on_demand(microstep) <= 1, "only the embedding"
        check_order(microstep)
        check_gathers(case, plan.microstep, microstep)
        check_reductions(case, plan.microstep, microstep)
    assert not any(microstep["step"] for microstep in last[:-1])
    check_end(plan.step_end, last[-1])


def check_rank(rank, n_ranks):
    with recorded_deepspeed() as events:
        for case in CASES:
            check_case(case, n_ranks, events)


@pytest.mark.slow
def test_deepspeed_sends_what_the_plan_says():
    on_ranks(2, check_rank, 2)
