"""Context parallelism of AxoNN's grid: shared work, bytes, memory, rules, and its option."""

from dataclasses import replace

import pytest
from build import (
    collectives,
    layout_of,
    memory_terms,
    number,
    operations,
    plan_of,
    prediction_of,
    ranking_of,
    search_of,
    table_of,
)
from worlds import llama, machine_of

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout, parse_layout
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import Attention, Gemm, MemoryBound
from axonn_tune.spec.programs import ALL_GATHER, CONTEXT_KINDS, RING, ULYSSES, ULYSSES_RING
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.switches import Switches

MODEL = llama(n_layers=2, hidden_size=256, n_heads=16, n_kv_heads=8, vocab_size=1024, seq_len=512)
JOB = Job(16, 16, 512)
KINDS = pytest.mark.parametrize("kind", CONTEXT_KINDS)
CHAINS = pytest.mark.parametrize("chain", [FORWARD, BACKWARD])


def axonn(kind, **options):
    return Axonn4D(context_kind=kind, **options)


def shared_by(kind, n_ranks):
    """Sizes of the axes by which some ranks share a sequence."""
    if kind == ULYSSES_RING:
        return {"ulysses": 2, "ring": n_ranks // 2}
    return {"context": n_ranks}


def work(plan, chain, kernels):
    """FLOPs of the kernels of a chain."""
    ops = [op for op in operations(plan.microstep) if isinstance(op, kernels)]
    return sum(number(op.flops) for op in ops if op.name.startswith(chain))


@KINDS
@CHAINS
@pytest.mark.parametrize("kernels", [Attention, Gemm])
def test_ranks_share_the_work(kind, chain, kernels):
    """Ranks along X repeat attention, as in AxoNN; every other axis divides it."""
    alone = work(plan_of(AXONN, MODEL, JOB), chain, kernels)
    found = plan_of(axonn(kind), MODEL, JOB, x=2, y=2, **shared_by(kind, 4))
    n_shares = 2 * 4 if kernels is Attention else 2 * 2 * 4
    assert work(found, chain, kernels) == pytest.approx(alone / n_shares)


@KINDS
def test_attention_sends_what_megatron_sends(kind):
    """Y takes the place of the tensor group, and the messages are equal byte for byte."""
    sizes = shared_by(kind, 4)
    grid = plan_of(axonn(kind), MODEL, JOB, y=2, **sizes)
    megatron = Megatron3D(False, False, False, context_kind=kind)
    other = plan_of(megatron, MODEL, JOB, tensor=2, **sizes)
    sent = [
        [
            (op.name, op.kind, op.axis, number(op.nbytes))
            for op in collectives(plan, plan.microstep)
            if op.axis in sizes
        ]
        for plan in (grid, other)
    ]
    assert sent[0] and sent[0] == sent[1]
    beside = [
        [
            (op.name, number(op.nbytes))
            for op in operations(plan.microstep)
            if isinstance(op, MemoryBound) and ".attention." in op.name
        ]
        for plan in (grid, other)
    ]
    assert beside[0] == beside[1]


@KINDS
@pytest.mark.parametrize("sharded", [False, True])
def test_gradients_are_summed_over_all_that_hold_the_weights(kind, sharded):
    """Ranks that share a sequence hold the same weights, and so count as replicas."""
    of_kind = axonn(kind, sharded_optimizer=sharded)
    split = plan_of(of_kind, MODEL, JOB, z=2, data=2, **shared_by(kind, 4))
    whole = plan_of(Axonn4D(sharded_optimizer=sharded), MODEL, JOB, z=2, data=8)
    ends = []
    for plan, group in ((split, of_kind.replicas), (whole, "data")):
        ends.append(
            [
                (op.kind, "replicas" if op.axis == group else op.axis, number(op.nbytes))
                for op in collectives(plan, plan.step_end)
            ]
        )
    assert ends[0] == ends[1]
    assert number(split.candidates.size(of_kind.replicas)) == 8


@KINDS
@pytest.mark.parametrize("pipelined", [False, True])
def test_one_rank_for_each_sequence_is_axonns_grid(kind, pipelined):
    machine = machine_of()
    sizes = {"x": 2, "z": 2, "data": 2, **({"pipeline": 2} if pipelined else {"y": 2})}
    found = [
        prediction_of(
            search_of(MODEL, JOB, machine, strategy, micro_batch=1), layout_of(strategy, **sizes)
        )
        for strategy in (axonn(kind, pipelined=pipelined), Axonn4D(pipelined=pipelined))
    ]
    assert found[0].step_seconds == found[1].step_seconds
    assert found[0].memory_terms_bytes == found[1].memory_terms_bytes


@KINDS
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ranks_that_share_a_sequence_hold_a_part_of_its_activations(kind, recompute):
    """The output that an exchange leaves a second time is the only exception."""
    whole = memory_terms(AXONN, MODEL, JOB, recompute=recompute)
    split = memory_terms(axonn(kind), MODEL, JOB, recompute=recompute, **shared_by(kind, 4))
    again = 0.0
    if kind in (ULYSSES, ULYSSES_RING) and recompute != "full":
        again = MODEL.n_layers * 2.0 * 512 / 4 * 16 * 16
    assert split["activations"] == pytest.approx(whole["activations"] / 4 + again)
    for term in ("weights", "gradients", "optimizer_states"):
        assert split[term] == whole[term]


def test_buffers_of_long_sequences():
    """Keys and values of all steps with an output of each, or what is gathered three times."""
    model = replace(MODEL, vocab_size=128, ffn_hidden_size=64)
    job = replace(JOB, seq_len=2**15)
    query, keys = (2.0 * 2**15 / 8 * heads * 16 / 2 for heads in (16, 8))
    working = {
        kind: memory_terms(axonn(kind), model, job, x=2, y=2, context=8)["working_set"]
        for kind in (RING, ALL_GATHER, ULYSSES)
    }
    assert working[RING] == 8 * (2 * keys + query)
    assert working[ALL_GATHER] == 3 * 8 * 2 * keys
    assert working[ULYSSES] == 4 * (query + 2 * keys) + 2 * query


def test_the_search_shares_a_sequence_that_fills_a_gpu():
    long = replace(JOB, n_gpus=8, seq_len=2**21, global_batch=8)
    search = search_of(MODEL, long, machine_of(), axonn(RING), recomputes=("none",))
    alone, shared = (prediction_of(search, layout) for layout in ("data=8", "context=8"))
    assert shared.fits and not alone.fits
    assert ranking_of(search).prediction(0).layout.size("context") > 1


def broken(kind, job=JOB, **sizes):
    strategy = axonn(kind)
    placements = table_of(strategy, **sizes).placements
    rejections = strategy.rejections(MODEL, job, placements)
    return {reason for reason, mask in rejections.items() if mask.all()}


def test_rules_are_those_of_megatron():
    assert not broken(ULYSSES, y=2, context=4)
    assert broken(ULYSSES, y=4, context=4) == {"KV heads not divisible by y*context"}
    unfused = replace(JOB, attention="unfused")
    assert broken(RING, unfused, context=2) == {"unfused attention of split sequences"}
    assert not broken(RING, unfused, data=2)
    assert broken(RING, replace(JOB, seq_len=12), context=4) == {
        "sequence not divisible by twice context"
    }


def test_layouts_with_more_axes_are_written_by_name():
    axes = axonn(RING).axes
    layout = parse_layout("y=2,cp=4,data=2", axes)
    assert str(layout) == "x=1,y=2,z=1,context=4,data=2"
    assert parse_layout(str(layout), axes) == layout and not axes.is_grid
    assert layout.brief == "y=2,context=4,data=2"
    assert parse_layout(str(layout), axonn(RING, pipelined=True).axes) == layout
    assert str(Layout({"x": 1, "y": 2, "z": 1, "data": 2})) == "1x2x1x2" and AXONN.axes.is_grid


def test_the_option_adds_the_axes():
    assert strategy_named("axonn") == AXONN
    assert strategy_named("axonn", Switches(context_kind=RING)).axes.names[3] == "context"
    names = strategy_named("axonn-pipeline", Switches(context_kind=ULYSSES_RING)).axes.names
    assert names == ("x", "y", "z", "pipeline", "ulysses", "ring", "data")
    with pytest.raises(InputError, match="one rank order with the axes x, y, z, context, data"):
        build_search("tiny", 8, strategy="axonn", context_kind=RING, order="zyxd")


def test_launch_writes_no_program_that_splits_sequences():
    search = build_search("5b", 16, "perlmutter", strategy="axonn", context_kind=RING)
    chosen = best_of_layout(search, "z=4,context=4")
    with pytest.raises(InputError, match=r"train_axonn\.py splits no sequences"):
        launch_files(chosen)
    assert "python my.py" in launch_files(chosen, train="my.py")["launch.sbatch"]
    assert "settings.json" in launch_files(best_of_layout(search, "z=16"))
