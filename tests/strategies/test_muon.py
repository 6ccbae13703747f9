"""Muon and AdEMAMix against torch's own Muon, NVIDIA's own shares, and counts by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from build import collectives, memory_terms, number, operations, plan_of, table_of
from torch.utils.flop_counter import FlopCounterMode
from worlds import FFN, HIDDEN, SEQ, VOCAB, machine_of, small_llama

from axonn_tune.cost.prices import KernelPrices, host_seconds
from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import Experts, Linear
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import MUON_MODES, Job
from axonn_tune.spec.plan import Gemm, Phase, RepeatedGemm, is_launched
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.tuning import Adapters
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.megatron.muon_matrices import Matrices, Matrix
from axonn_tune.strategies.megatron.owners import Piece, dealt, shared

LAYERS = 3
MODEL = small_llama(LAYERS)
MIXTURE = replace(MODEL, experts=Experts(8, 2, 256, first_layer=1))
JOB = Job(8, 64, SEQ, optimizer="muon")
# Rows and columns of the matrices of a block as they are made orthogonal: query, key, value, the
# output of attention, and both of the MLP.
PARTS = [
    (HIDDEN, HIDDEN),
    (HIDDEN // 2, HIDDEN),
    (HIDDEN // 2, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * FFN, HIDDEN),
    (HIDDEN, FFN),
]
OF_BLOCKS = LAYERS * sum(rows * columns for rows, columns in PARTS)
# Embedding, head, and norms.
OTHERS = 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
WHOLE = Megatron3D(distributed_optimizer=False)
SHARED = Megatron3D(overlap_grad_reduce=False)
DEALING = Engine("e", "E", ("megatron",), megatron=MegatronProgram(pads_shares=False))


def step_end(strategy, model=MODEL, job=JOB, **sizes):
    """The operations at the end of a step, by name."""
    plan = plan_of(strategy, model, job, **sizes)
    return {op.name: op for op in operations(plan.step_end)}


def products(ops):
    return [op for op in ops.values() if isinstance(op, Gemm)]


def flops_by_hand(rows, columns):
    """Five steps, each with X X^T, its square, and their sum times X, of the shorter side."""
    m, n = sorted((rows, columns))
    return 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


# The iteration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(16, 48), (48, 16), (32, 32)])
def test_the_products_are_those_of_torchs_muon(rows, columns):
    weight = torch.nn.Parameter(torch.randn(rows, columns))
    weight.grad = torch.randn(rows, columns)
    optimizer = torch.optim.Muon([weight])
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    kind = Matrix.of(Linear("up", columns, rows, False, False))
    iterate = kind.iterate(rows, np.ones(1), "duplicated")
    assert counter.get_total_flops() == iterate.flops.item() == flops_by_hand(rows, columns)


def test_a_matrix_has_one_moment_and_all_else_two():
    weight = torch.nn.Parameter(torch.randn(4, 8))
    weight.grad = torch.randn(4, 8)
    kept = {}
    for optimizer in (torch.optim.Muon([weight]), torch.optim.AdamW([weight])):
        optimizer.step()
        kept[type(optimizer)] = sum(
            value.numel() for value in optimizer.state[weight].values() if value.dim()
        )
    assert kept == {torch.optim.Muon: 32, torch.optim.AdamW: 64}
    states = memory_terms(WHOLE, MODEL, JOB, data=8)["optimizer_states"]
    assert states == (4 + 4) * OF_BLOCKS + (4 + 2 * 4) * OTHERS


def test_every_matrix_of_blocks_is_made_orthogonal_where_none_are_shared():
    ops = step_end(WHOLE, data=8)
    by_hand = LAYERS * sum(flops_by_hand(*part) for part in PARTS)
    assert sum(number(op.flops) for op in products(ops)) == by_hand
    assert number(ops["muon.qkv.key.gram"].n_times) == 5 * LAYERS
    assert [number(ops["muon.up.step"].m), number(ops["muon.up.step"].n)] == [HIDDEN, 2 * FFN]
    # The moment is formed of the gradient, and the weight decays; then it is scaled and added.
    assert number(ops["muon.moment"].nbytes) == (8 + 12) * OF_BLOCKS
    assert number(ops["muon.update"].nbytes) == (8 + 8 + 12) * OF_BLOCKS
    # AdamW reads the gradient, its states and writes these; all gradients are cleared.
    everything = OF_BLOCKS + OTHERS
    adamw = (4 + 2 * 12 + 2) * OTHERS + 4 * everything
    assert number(ops["optimizer.step"].nbytes) == adamw


def test_each_expert_has_matrices_of_its_own():
    ops = step_end(Megatron3D(distributed_optimizer=False, has_experts=True), MIXTURE, data=8)
    n_layers = LAYERS - 1
    assert number(ops["muon.experts_up.gram"].n_times) == 5 * 8 * n_layers
    assert number(ops["muon.experts_up.gram"].m) == 512
    assert number(ops["muon.router.gram"].m) == 8
    assert number(ops["muon.router.gram"].n_times) == 5 * n_layers
    assert number(ops["muon.up.gram"].n_times) == 5


def test_learned_positions_are_a_matrix_to_megatron():
    learned = replace(MODEL, position="learned", seq_len=SEQ)
    assert "muon.position.gram" in step_end(WHOLE, learned, data=8)
    assert "muon.position.gram" not in step_end(WHOLE, data=8)


# Tensor ranks -----------------------------------------------------------------------------------


def test_ranks_that_split_a_matrix_all_form_the_whole_one():
    ops = step_end(WHOLE, tensor=4, data=2)
    assert sum(number(op.flops) for op in products(ops)) == LAYERS * sum(
        flops_by_hand(*part) for part in PARTS
    )
    gathers = {name: op for name, op in ops.items() if name.endswith("all_gather")}
    of_moments = [op for name, op in gathers.items() if name.startswith("muon.")]
    assert sum(number(op.nbytes) for op in of_moments) == 4 * OF_BLOCKS
    assert {op.axis for op in of_moments} == {"tensor"}
    assert number(ops["muon.up.all_gather"].n_calls) == LAYERS


def test_each_rank_may_take_its_own_part():
    job = replace(JOB, muon_mode="blockwise")
    ops = step_end(WHOLE, job=job, tensor=4, data=2)
    parts = [(rows // 4, columns) for rows, columns in PARTS]
    parts[3], parts[5] = (HIDDEN, HIDDEN // 4), (HIDDEN, FFN // 4)
    by_hand = LAYERS * sum(flops_by_hand(*part) for part in parts)
    assert sum(number(op.flops) for op in products(ops)) == by_hand
    assert not [name for name in ops if name.startswith("muon.") and "all_" in name]


def test_ranks_may_sum_their_products():
    """The side that is not split stays whole, even where it is the longer one."""
    job = replace(JOB, muon_mode="distributed")
    ops = step_end(WHOLE, job=job, tensor=4, data=2)
    up, down = ops["muon.up.gram"], ops["muon.down.gram"]
    assert [number(up.m), number(up.k)] == [HIDDEN, 2 * FFN / 4]
    assert [number(down.m), number(down.k)] == [HIDDEN, FFN / 4]
    key = ops["muon.qkv.key.gram"]
    assert [number(key.m), number(key.k)] == [HIDDEN, HIDDEN // 2 / 4]
    summed = ops["muon.up.all_reduce"]
    assert number(summed.nbytes) == 5 * LAYERS * 2 * HIDDEN**2 and summed.axis == "tensor"
    assert number(summed.n_calls) == 5 * LAYERS


@pytest.mark.parametrize("mode", MUON_MODES)
def test_a_rank_alone_has_one_way(mode):
    job = replace(JOB, muon_mode=mode)
    usual = step_end(WHOLE, data=8)
    other = step_end(WHOLE, job=job, data=8)
    assert {name: number(getattr(op, "nbytes", 0)) for name, op in usual.items()} == {
        name: number(getattr(op, "nbytes", 0)) for name, op in other.items()
    }
    assert [number(op.flops) for op in products(usual)] == [
        number(op.flops) for op in products(other)
    ]


# Whole matrices for each replica ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_layers", "n_replicas", "least", "buffer_elements", "owned", "numbers"),
    [
        (6, 4, np.inf, 8388608, 2097152, (1, 3, 2, 1)),
        (6, 3, 1e6, 8650752, 2752512, (2, 1, 3, 1)),
        (6, 8, 2e6, 8388608, 1048576, (1, 1, 1, 0)),
        (6, 32, np.inf, 16777216, 524288, (0, 0, 1, 0)),
        (13, 5, 3e6, 19660800, 3538944, (1, 4, 4, 2)),
        (4, 16, 1.0, 8388608, 524288, (0, 0, 1, 0)),
    ],
)
def test_replicas_share_as_megatron_core_does(
    n_layers, n_replicas, least, buffer_elements, owned, numbers
):
    """What LayerWiseDistributedOptimizer of NVIDIA/Megatron-LM at d98e8a64 returned.

    Its _compute_per_buffer_param_layout was called with tensors without data, for 64 other cases
    as well.
    """
    sizes = [(768.0, 512.0), (512.0, 256.0), (1024.0, 512.0), (512.0, 512.0)]
    kinds = tuple(
        Piece(rows, columns, rows * columns * min(rows, columns)) for rows, columns in sizes
    )
    found = shared(kinds, (3, 2, 1, 0) * n_layers, n_replicas, least)
    assert found.buffer_elements == buffer_elements
    assert found.owned_elements == owned
    assert found.numbers == numbers
    assert found.stored_elements == n_layers * sum(kind.elements for kind in kinds)


def test_without_shares_matrices_are_dealt_by_size():
    """The smallest first, and back again from the last replica (core_v0.16.1)."""
    kinds = tuple(Piece(8.0, side, side) for side in (3.0, 1.0, 2.0))
    found = dealt(kinds, (0, 1, 2, 0, 1, 2, 0), 2)
    # Sorted: 1, 1, 2, 2, 3, 3, 3. The first replica has the 1st, 4th and 5th of them.
    assert found.numbers == (2, 1, 1)
    assert found.owned_elements == 8 * (1 + 2 + 3 + 3)
    assert found.buffer_elements == found.stored_elements == 8 * 15


def test_without_shares_sums_are_whole_and_gathers_come_last():
    engine = DEALING
    job = replace(JOB, n_gpus=64)
    plan = plan_of(Megatron3D(engine=engine), MODEL, job, data=64)
    early = {op.name: op for op in collectives(plan, plan.sync_microstep)}
    late = {op.name: op for op in collectives(plan, plan.step_end)}
    reduced = [op for name, op in (early | late).items() if name.startswith("gradient")]
    assert {op.kind for op in reduced if op.axis != "tensor"} == {"all_reduce"}
    assert not [name for name in early if name.startswith("weights")]
    assert number(late["weights.all_gather"].nbytes) == 2 * (OF_BLOCKS + OTHERS)
    terms = memory_terms(Megatron3D(engine=engine), MODEL, job, data=64)
    usual = memory_terms(Megatron3D(engine=engine), MODEL, replace(job, optimizer="adamw"), data=64)
    assert terms["gradients"] == usual["gradients"] and terms["weights"] == usual["weights"]
    gathered = 2 * (OF_BLOCKS + OTHERS)
    assert terms["working_set"] == max(usual["working_set"], gathered - usual["activations"])


def test_matrices_of_all_virtual_stages_are_dealt_together():
    """Eleven replicas share the matrices of four layers; the last stage needs most."""
    strategy = Megatron3D(engine=DEALING)
    sizes = {"pipeline": 2, "data": 11}
    job = replace(JOB, n_gpus=22, global_batch=44)
    terms = memory_terms(strategy, small_llama(8), job, n_virtual=2, **sizes)
    matrices = [(2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    by_size = sorted(rows * columns for rows, columns in matrices * 4)
    turns = [*range(11), *reversed(range(11))]
    owned = [
        sum(size for turn, size in zip(turns, by_size, strict=False) if turn == replica)
        for replica in range(11)
    ]
    others = VOCAB * HIDDEN + (8 + 1) * HIDDEN
    assert terms["optimizer_states"] == pytest.approx(8 * max(owned) + 12 * others / 11)


def test_replicas_share_what_one_would_compute():
    alone = sum(number(op.flops) for op in products(step_end(WHOLE, data=8)))
    busiest = sum(number(op.flops) for op in products(step_end(SHARED, data=8)))
    largest = flops_by_hand(2 * FFN, HIDDEN)
    assert max(alone / 8, largest) <= busiest <= alone / 8 + largest


def test_a_share_has_room_for_the_largest_matrix():
    """With more replicas than matrices, buffers are as large as one matrix for each replica."""
    job = replace(JOB, n_gpus=64)
    terms = memory_terms(SHARED, MODEL, job, data=64)
    adamw = memory_terms(SHARED, MODEL, replace(job, optimizer="adamw"), data=64)
    padding = 64 * 2 * FFN * HIDDEN - OF_BLOCKS
    assert terms["gradients"] - adamw["gradients"] == 4 * padding
    assert terms["weights"] - adamw["weights"] == 2 * padding
    assert terms["optimizer_states"] == 8 * 2 * FFN * HIDDEN + 12 * OTHERS / 64
    ops = step_end(SHARED, job=job, data=64)
    assert number(ops["gradient.reduce"].nbytes) == pytest.approx(
        4 * (OF_BLOCKS + OTHERS + padding)
    )
    assert number(ops["weights.all_gather"].nbytes) == pytest.approx(
        2 * (OF_BLOCKS + OTHERS + padding)
    )


def test_stages_have_the_matrices_of_their_layers():
    deep = small_llama(8)
    one = memory_terms(WHOLE, deep, replace(JOB, n_gpus=16), pipeline=4, data=4, n_virtual=2)
    matrices = 2 * OF_BLOCKS / LAYERS
    of_first = 8 * matrices + 12 * (VOCAB * HIDDEN + 4 * HIDDEN)
    assert one["optimizer_states"] == of_first


def test_the_iteration_takes_memory_when_no_activations_are_there():
    """A whole matrix in fp32 twice, and its iterate in fp32 and in bf16."""
    job = replace(JOB, seq_len=1)
    terms = memory_terms(WHOLE, MODEL, job, tensor=8)
    up = 2 * FFN * HIDDEN
    assert terms["working_set"] + terms["activations"] == pytest.approx((2 * 4 + 4 + 2) * up)


def test_replicas_exchange_as_with_adamw():
    """Gradients are reduced and scattered, and updated weights gathered."""
    strategy = Megatron3D()
    kinds = {}
    for optimizer in ("adamw", "muon"):
        plan = plan_of(strategy, MODEL, replace(JOB, optimizer=optimizer), data=8)
        sent = collectives(plan, plan.sync_microstep, plan.step_end)
        kinds[optimizer] = {(op.name, op.kind) for op in sent}
    assert kinds["muon"] == kinds["adamw"]


# AdEMAMix ---------------------------------------------------------------------------------------


def test_ademamix_keeps_three_moments():
    job = replace(JOB, optimizer="ademamix")
    everything = OF_BLOCKS + OTHERS
    terms = memory_terms(WHOLE, MODEL, job, data=8)
    assert terms["optimizer_states"] == (4 + 3 * 4) * everything
    step = step_end(WHOLE, job=job, data=8)["optimizer.step"]
    # Three moments decay (8 each) and take the gradient (12 each); the root of one is scaled and
    # bounded (8 each); the others are scaled (8 each), added and divided (12 each); the weight is
    # added to the update, and the update to the weight (12 each). A bf16 weight is written and the
    # gradient cleared.
    kernels = 3 * (8 + 12) + 3 * 8 + 2 * 8 + 2 * 12 + 2 * 12
    assert kernels == 148
    assert number(step.nbytes) == (kernels + 2 + 4) * everything


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "optimizer is 'lion'; allowed: adamw, muon, ademamix"),
        ({"moments": "bf16"}, "moments is bf16; allowed with optimizer muon: fp32"),
        ({"dtype": "fp16"}, "dtype is fp16; allowed with optimizer muon: bf16"),
        ({"offload": "optimizer"}, "offload is optimizer; allowed with optimizer muon: none"),
        ({"adapters": Adapters(8)}, "optimizer is muon; allowed with adapters: adamw"),
        ({"muon_mode": "twice"}, "muon_mode is 'twice'; allowed: duplicated, blockwise"),
        (
            {"optimizer": "adamw", "muon_mode": "blockwise"},
            "muon_mode is blockwise; allowed with optimizer adamw: duplicated",
        ),
    ],
)
def test_a_job_says_what_it_cannot_have(options, message):
    with pytest.raises(InputError, match=message):
        replace(JOB, **options)


@pytest.mark.parametrize(
    ("strategy", "model", "sizes", "reason"),
    [
        (Megatron3D(shards_gradients=True), MODEL, {"data": 8}, "Muon has no sharded gradients"),
        (
            Megatron3D(has_experts=True),
            replace(MIXTURE, experts=replace(MIXTURE.experts, bias=True)),
            {"data": 8, "expert": 4},
            "Muon updates no biases of experts on several ranks",
        ),
    ],
)
def test_a_layout_that_megatron_refuses_is_refused(strategy, model, sizes, reason):
    placements = table_of(strategy, **sizes).placements
    broken = strategy.rejections(model, JOB, placements)
    assert broken[reason].all()
    assert reason not in strategy.rejections(model, replace(JOB, optimizer="adamw"), placements)


# Repeated products ------------------------------------------------------------------------------


def test_repeated_products_take_as_long_as_one_after_another():
    prices = KernelPrices(machine_of(), JOB)
    sizes = (512.0, 1024.0, 512.0, "NN")
    one = prices.seconds(Gemm("one", *sizes))
    many = RepeatedGemm("many", *sizes, n_times=np.array([7.0]))
    assert prices.seconds(many) == pytest.approx(7 * one)
    assert number(many.flops) == 7 * Gemm("one", *sizes).flops
    assert is_launched(many) and not is_launched(replace(many, n_times=0.0))
    table = table_of(WHOLE)
    assert number(host_seconds([Phase("end", (many,))], table, 1.0)) == 1.0


def test_a_model_has_no_matrix_twice():
    kinds = Matrices.of(MIXTURE)
    assert len({kind.linear.name for kind in kinds.all}) == len(kinds.all)
