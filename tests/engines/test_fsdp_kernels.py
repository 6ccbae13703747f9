"""The kernels of torch's FSDP around its messages and at the end of a step, against torch itself.

`fsdp_kernels.py` records them in a process of its own, for which reason it also says what is
counted. Bytes are means over a step, for each element of what they move.
"""

import json

import pytest
from build import collectives, number, operations, plan_of
from engines.programs_here import printed_by
from worlds import llama

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.zero.zero import zero3

N_RANKS = 8
MODEL = llama(n_layers=2, hidden_size=64, n_heads=4, n_kv_heads=4, vocab_size=256, seq_len=64)
ELEMENT_BYTES = {"bf16": 2.0, "fp32": 4.0}
# Version of FSDP, types of weights and of messages, number of micro-steps, whether only the last
# one reduces gradients, whether the root is sharded after the forward pass, and the optimizer's
# implementation.
CASES = [
    (2, "fp32", "fp32", 1, "each", "kept", "fused"),
    (2, "fp32", "bf16", 2, "each", "kept", "fused"),
    (2, "bf16", "fp32", 2, "once", "kept", "foreach"),
    (2, "bf16", "fp32", 2, "once", "sharded", "foreach"),
    (1, "fp32", "bf16", 2, "each", "kept", "foreach"),
    (1, "fp32", "fp32", 1, "each", "kept", "foreach"),
]


# Cases of foreach kernels alone, by the engines that have them.
OF_ENGINES = {
    "torchtitan-2024": (2, "fp32", "fp32", 1, "each", "kept", "foreach"),
    "torchtitan-2024-eager": (2, "fp32", "fp32", 1, "each", "kept", "foreach"),
    "automodel-2025": (2, "bf16", "fp32", 2, "once", "kept", "foreach"),
    "fms-fsdp": (1, "fp32", "bf16", 2, "each", "kept", "foreach"),
}


@pytest.fixture(scope="module")
def recorded():
    cases = list(dict.fromkeys([*CASES, *OF_ENGINES.values()]))
    return dict(zip(cases, printed_by("fsdp_kernels.py", json.dumps(cases)), strict=True))


def planned(version, weights, messages, n_micro, reductions, root):
    """The same terms of the plan; its optimizer is one kernel."""
    is_once = reductions == "once"
    program = ZeroProgram(
        is_fsdp1=version == 1,
        is_fsdp2=version == 2,
        reduced_element_bytes=ELEMENT_BYTES[messages],
        reduces_once=is_once,
        reshards_root=root == "sharded",
    )
    engine = Engine(zero=program, low_states=weights == "bf16")
    plan = plan_of(zero3(engine), MODEL, Job(N_RANKS, N_RANKS * n_micro, 64), shard=N_RANKS)
    # Only the last micro-step may differ, if there are several.
    parts = [plan.microstep] * n_micro
    if plan.sync_microstep is not None:
        parts[-1] = plan.sync_microstep
    kernels = operations(*parts)

    def moved(end):
        return sum(number(op.nbytes) for op in kernels if op.name.endswith(end))

    def after(part):
        """Each block's kernels once; the plan also has them before the first block's end."""
        of_units = {op.name: number(getattr(op, "nbytes", 0.0)) for op in operations(part)}
        return sum(
            times * of_units.get(f"gradient.{unit}.{end}", 0.0)
            for unit, times in (("block", MODEL.n_layers), ("root", 1))
            for end in ("accumulate", "receive")
        ) + of_units.get("gradient.accumulate", 0.0)

    def messages_of(kind):
        return [op for op in collectives(plan, *parts) if op.kind == kind]

    def elements(kind, element_bytes):
        return sum(number(op.nbytes) for op in messages_of(kind)) / element_bytes

    gathered = elements("all_gather", 2.0)
    reduced = elements("reduce_scatter", ELEMENT_BYTES[messages])
    n_owned = MODEL.parameters / N_RANKS
    end = {op.name: number(getattr(op, "nbytes", 0.0)) for op in operations(plan.step_end)}
    return {
        "copy_in": moved(".copy_in") / (gathered / N_RANKS),
        "copy_out": moved(".copy") / gathered,
        "pack": moved(".pack") / reduced,
        "after": sum(map(after, parts)) / (n_micro * n_owned),
        "clip": (end["gradient.norm"] + end["gradient.clip"]) / n_owned,
        "update": end["optimizer.step"] / n_owned,
        "n_gathers": sum(number(op.n_calls) for op in messages_of("all_gather")),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_plan_moves_what_torch_moves(case, recorded):
    *same, implementation = case
    of_torch, of_plan = dict(recorded[case]), planned(*same)
    if implementation == "foreach":
        del of_torch["update"], of_plan["update"]
    # The norms of single weights are reduced to one norm.
    assert of_torch.pop("clip") == pytest.approx(of_plan.pop("clip"), rel=0.01)
    assert of_torch == pytest.approx(of_plan)


@pytest.mark.parametrize("engine", OF_ENGINES)
def test_engines_state_the_bytes_of_torchs_foreach_kernels(engine, recorded):
    """AdamW with weight decay, and on weights in bf16 Adam without."""
    *same, _ = case = OF_ENGINES[engine]
    ratio = recorded[case]["update"] / planned(*same)["update"]
    stated = load_engine(engine).kernels["optimizer"].traffic.value
    assert stated == pytest.approx(ratio, rel=0.01)
