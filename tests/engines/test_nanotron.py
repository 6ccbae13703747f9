"""The facts of nanotron's engine, counted in torch's own kernels, and its plan's reductions.

The functions below call torch as nanotron's Llama does (models/llama.py at 67c5ebb6); kernels of
flash-attention stand for themselves.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from build import can_run, collectives, layout_of, number, operations, plan_of, table_of
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import NANOTRON_8B, llama

from axonn_tune.io.presets import load_engine, load_machine
from axonn_tune.runtime.rehearsal.kernels import kernel_of
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import HostWork, MemoryBound
from axonn_tune.spec.rehearsal import OtherKernel
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.megatron.megatron3d import megatron_of
from axonn_tune.strategies.pipeline import layers_of_stage

ENGINE = load_engine("nanotron")
SLEEPING = load_engine("nanotron-2024-12")
BATCH, TOKENS, HEADS, WIDTH = 2, 64, 4, 32
HIDDEN = HEADS * WIDTH
QUERIES_BYTES = 2.0 * BATCH * TOKENS * HIDDEN


class Kernels(TorchDispatchMode):
    """Records the kernels that torch launches, products aside."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kernel = kernel_of(func, args, kwargs or {}, out)
        if isinstance(kernel, OtherKernel):
            self.found.append(kernel)
        return out

    def moved(self):
        """Bytes of all kernels, and of those that handle one element at a time.

        The latter count as copies of their elements, which here are what a copy or a part of one
        writes.
        """
        strided = sum(copied_bytes(kernel) for kernel in self.found if kernel.is_strided)
        streamed = sum(kernel.nbytes for kernel in self.found if not kernel.is_strided)
        return streamed + strided, strided


def copied_bytes(kernel):
    """A copy reads and writes its elements; a product and silu's gradient read them twice."""
    n_operands = {"clone": 2, "silu": 2, "mul": 3, "silu_backward": 3}[kernel.name]
    return 2.0 * kernel.nbytes / n_operands


class Rotation(torch.autograd.Function):
    """flash-attention's rotation of queries, whose backward pass copies first."""

    @staticmethod
    def forward(ctx, x):
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(gradient.clone())


class Attention(torch.autograd.Function):
    """flash-attention, which asks for a contiguous gradient."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.shape = inputs[0].shape
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        like = gradient.contiguous()
        return tuple(torch.empty(ctx.shape, dtype=like.dtype, device=like.device) for _ in range(3))


class Projection(torch.autograd.Function):
    """A product of rows, which reads its input in one order, also for the gradient of weights."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        inputs.contiguous()
        return torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        inputs.contiguous()
        return torch.empty_like(gradient)


def attended(joint):
    split = joint.view(TOKENS, BATCH, 3, HEADS, WIDTH).permute(2, 1, 0, 3, 4).contiguous()
    queries, keys, values = split
    both = torch.cat([keys.unsqueeze(0), values.unsqueeze(0)], dim=0)
    keys, values = torch.split(both.permute(1, 2, 0, 3, 4).contiguous(), 1, dim=2)
    rows = BATCH * TOKENS
    heads = (x.view(rows, HEADS, WIDTH) for x in (Rotation.apply(queries), keys, values))
    output = Attention.apply(*heads)
    return Projection.apply(output.view(BATCH, TOKENS, HIDDEN).transpose(0, 1))


def gated(joint):
    gate, up = torch.split(joint, joint.shape[-1] // 2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def passes(function, width):
    """What the kernels of a function's forward and of its backward pass move."""
    shape = (TOKENS, BATCH, width)
    inputs = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with Kernels() as forward:
        output = function(inputs)
    with Kernels() as backward:
        output.backward(torch.empty_like(output))
    return forward.moved(), backward.moved()


def form(kernel):
    return [ENGINE.kernels[kernel].traffic.value, ENGINE.kernels[kernel].strided.value]


def test_copies_around_attention_move_what_the_engine_says():
    """Rotations of queries and of keys move two widths of each more, in both passes."""
    of_passes = passes(attended, 3 * HIDDEN)
    nbytes, strided = (sum(each) / 2.0 for each in zip(*of_passes, strict=True))
    fused_bytes = 4.0 * QUERIES_BYTES
    assert [1.0 + nbytes / fused_bytes, strided / fused_bytes] == form("rotary")


@pytest.mark.parametrize(
    ("kernel", "place", "n_fused"), [("swiglu", 0, 3), ("swiglu_backward", 1, 5)]
)
def test_a_gate_that_reads_halves_moves_what_the_engine_says(kernel, place, n_fused):
    fused_bytes = n_fused * QUERIES_BYTES
    counted = [nbytes / fused_bytes for nbytes in passes(gated, 2 * HIDDEN)[place]]
    assert counted == pytest.approx(form(kernel), abs=0.005)


MODEL = llama(n_layers=4, hidden_size=256, n_heads=8, vocab_size=512, seq_len=64)


def reductions(distributed_optimizer):
    """Kinds of collectives over the replicas in micro-steps, in the last one, and at the end."""
    strategy = megatron_of(ENGINE, (1,), distributed_optimizer=distributed_optimizer)
    plan = plan_of(strategy, MODEL, Job(4, 16, 64), data=4)
    parts = plan.microstep, plan.sync_microstep, plan.step_end
    return [
        [op.kind for op in collectives(plan, part)] if part is not None else None for part in parts
    ]


def test_gradients_are_summed_beside_the_last_backward_pass_without_sharded_states():
    usual, last, end = reductions(distributed_optimizer=False)
    assert usual == [] and set(last) == set(end) == {"all_reduce"}


def test_one_sum_and_one_gather_follow_all_micro_steps_with_sharded_states():
    assert reductions(distributed_optimizer=True) == [[], None, ["all_reduce", "all_gather"]]
    strategy = megatron_of(ENGINE, (1,), distributed_optimizer=True)
    plan = plan_of(strategy, MODEL, Job(4, 16, 64), data=4)
    assert [float(op.n_calls[0]) for op in collectives(plan, plan.step_end)] == [1.0, 1.0]
    assert not strategy.overlap_grad_reduce
    assert megatron_of(ENGINE, (1,), overlap_grad_reduce=True).overlap_grad_reduce


def clip(gradients, max_norm):
    """nanotron's clip_grad_norm (optim/clip_grads.py), without the sum over ranks."""
    norms = [torch.linalg.vector_norm(each, dtype=torch.float) for each in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for each in gradients:
        each.mul_(coefficient)


def test_every_replica_clips_all_sums_of_gradients_although_it_updates_a_part():
    """Each replica has the whole sums, since these are all-reduced, and clips what it has."""
    n_sums, n_replicas = int(MODEL.parameters), 4
    with Kernels() as clipping:
        clip([torch.empty(n_sums, device="meta")], 1.0)
    counted = sum(kernel.nbytes for kernel in clipping.found if kernel.nbytes > n_sums)
    assert counted == pytest.approx(3 * 4 * n_sums, rel=1e-4)
    strategy = megatron_of(ENGINE, (1,), distributed_optimizer=True)
    end = operations(plan_of(strategy, MODEL, Job(4, 16, 64), data=n_replicas).step_end)
    planned = {op.name: number(op.nbytes) for op in end if op.name.startswith("gradient.")}
    in_plan = planned["gradient.norm"] + planned["gradient.clip"]
    assert in_plan == pytest.approx(counted, rel=1e-3)


def launched(function, *arguments):
    """How many kernels of each name a function launches."""
    with Kernels() as mode:
        function(*arguments)
    return Counter(kernel.name for kernel in mode.found)


def add_up(gradients, sums):
    """nanotron's accumulation after a backward pass (optim/gradient_accumulator.py)."""
    for gradient, of_weight in zip(gradients, sums, strict=True):
        of_weight.add_(gradient)


def update(optimizer, masters, weights):
    """A step of nanotron's optimizer: torch's, and then a copy of each weight to bf16."""
    optimizer.step()
    with torch.no_grad():
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)


def kernels_in_plan(distributed_optimizer, is_tied=False):
    """The kernels of a micro-step, of the last one, and of the end of a step, by name."""
    model = replace(MODEL, tied_embeddings=is_tied)
    strategy = megatron_of(ENGINE, (1,), distributed_optimizer=distributed_optimizer)
    plan = ENGINE.as_run(plan_of(strategy, model, Job(4, 16, 64), data=4))
    parts = plan.microstep, plan.sync_microstep or plan.microstep, plan.step_end
    return [
        {op.name: op for op in operations(part) if isinstance(op, MemoryBound)} for part in parts
    ]


def n_launches(kernels, name):
    return number(kernels[name].n_launches)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_each_weight_is_added_clipped_and_updated_by_itself(distributed_optimizer, is_tied):
    """Each weight is a group of the optimizer (helpers.py, merge_named_param_groups)."""
    # A block has four weights and two norms; besides there are embedding, head and final norm.
    n_weights = MODEL.n_layers * 6 + 3 - is_tied
    masters = [torch.zeros(8, requires_grad=True) for _ in range(n_weights)]
    weights = [torch.zeros(8, dtype=torch.bfloat16) for _ in masters]
    optimizer = torch.optim.AdamW([{"params": [master]} for master in masters], fused=True)
    for master in masters:
        master.grad = torch.ones_like(master)
    gradients = [master.grad for master in masters]
    optimizer.step()
    adding = launched(add_up, weights, gradients)
    clipping = launched(clip, gradients, 1.0)
    updating = launched(update, optimizer, masters, weights)
    usual, last, end = kernels_in_plan(distributed_optimizer, is_tied)
    for microstep in (usual, last):
        assert n_launches(microstep, "gradient.accumulate") == adding.total()
    # The norm of all norms is one more kernel, and the plan leaves it out.
    assert n_launches(end, "gradient.norm") == clipping["linalg_vector_norm"] - 1
    assert n_launches(end, "gradient.clip") == clipping["mul_"]
    assert n_launches(end, "optimizer.step") == updating.total()


@contextmanager
def one_rank():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def add_bucket(sums, bucket):
    """nanotron's hook (optim/gradient_accumulator.py, get_fp32_accum_hook), without the sum."""
    add_up(bucket.gradients(), sums)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_torch_copies_each_gradient_to_its_bucket_and_back_in_the_last_backward_pass():
    n_layers, width = 5, 8
    layers = [
        torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(n_layers)
    ]
    with one_rank():
        model = DistributedDataParallel(torch.nn.Sequential(*layers))
        model.register_comm_hook([torch.zeros(width, width) for _ in layers], add_bucket)
        output = model(torch.ones(2, width, dtype=torch.bfloat16)).sum()
        with Kernels() as backward:
            output.backward()
    copies, sums = (
        [kernel for kernel in backward.found if kernel.name == name] for name in ("copy_", "add_")
    )
    assert (len(copies), len(sums)) == (2 * n_layers, n_layers)
    # What a copy writes counts twice in torch's own list, as its argument and as its result.
    copied_bytes = sum(kernel.nbytes for kernel in copies) * 2.0 / 3.0
    usual, last, _ = kernels_in_plan(distributed_optimizer=False)
    buckets = last["gradient.buckets"]
    assert n_launches(last, "gradient.buckets") == 2 * n_launches(last, "gradient.accumulate")
    of_parameter = number(buckets.nbytes) / MODEL.parameters
    assert of_parameter == pytest.approx(copied_bytes / (n_layers * width**2), rel=1e-3)
    assert "gradient.buckets" not in usual
    assert "gradient.buckets" not in kernels_in_plan(distributed_optimizer=True)[1]


def gather_parts(weights, n_replicas):
    """nanotron's all_gather_coalesced (distributed.py), without the gather itself."""
    parts = [torch.chunk(weight.view(-1), n_replicas) for weight in weights]
    torch._utils._flatten_dense_tensors([of_weight[0] for of_weight in parts])
    for of_replica in zip(*parts, strict=True):
        buffer = torch._utils._flatten_dense_tensors(of_replica)
        pieces = torch._utils._unflatten_dense_tensors(buffer, of_replica)
        for part, piece in zip(of_replica, pieces, strict=True):
            part.copy_(piece)


def test_the_host_copies_each_part_of_each_updated_weight():
    """Two of the three copies are in nanotron's code, and one in torch's ProcessGroupNCCL."""
    weights = [torch.empty(64, 8, device="meta") for _ in range(5)]
    with Kernels() as gathering:
        gather_parts(weights, 4)
    joins, copies = (
        [kernel for kernel in gathering.found if kernel.name == name] for name in ("cat", "copy_")
    )
    assert (len(joins), len(copies)) == (1 + 4, 5 * 4)
    strategy = megatron_of(ENGINE, (1,), distributed_optimizer=True)
    for n_replicas in (1, 4):
        end = operations(plan_of(strategy, MODEL, Job(4, 16, 64), data=n_replicas).step_end)
        (views,) = [op for op in end if isinstance(op, HostWork)]
        # A block has four weights and two norms; besides there are embedding, head and final norm.
        n_parts = (MODEL.n_layers * 6 + 3) * n_replicas if n_replicas > 1 else 0
        assert number(views.seconds) == pytest.approx(n_parts * 9e-6)
        (copy,) = [op for op in end if op.name == "weights.copy"]
        n_copies = 3 if n_replicas > 1 else 1
        assert number(copy.nbytes) == pytest.approx(n_copies * 2 * 2 * MODEL.parameters, rel=1e-3)


def test_a_step_is_that_of_the_same_stages_by_name():
    """The head's product is worth 2.46 of 32 layers, so that four stages have 9, 9, 8 and 6."""
    program = replace(ENGINE.megatron, balances_stages=False)
    by_name = {"engine": replace(ENGINE, megatron=program), "stage_layout": "Et*9|t*9|t*8|t*6L"}
    balanced = megatron_of(ENGINE, (1,))
    configuration = Configuration(layout_of(balanced, data=2, pipeline=4), micro_batch=1)
    seconds = [
        predict(
            Scenario(NANOTRON_8B, Job(8, 64, 4096), load_machine("aws-p5-2024"), strategy),
            configuration,
        ).step_seconds
        for strategy in (balanced, replace(balanced, **by_name))
    ]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-12)


@pytest.mark.parametrize(("engine", "n_layers"), [(ENGINE, [10, 6]), (SLEEPING, [11, 5])])
def test_a_stage_that_has_its_share_takes_one_more_layer_where_it_may_exceed_it(engine, n_layers):
    """The head's product is worth four of 16 layers, so that the share of two stages is ten."""
    model = llama(
        n_layers=16,
        hidden_size=2048,
        n_heads=32,
        ffn_hidden_size=8192,
        vocab_size=131072,
        seq_len=4096,
    )
    strategy = megatron_of(engine, (1,))
    table = table_of(strategy, pipeline=2)
    shapes = strategy.shapes(model, Job(2, 16, 64), table)
    assert [len(layers_of_stage(shapes, stage, table)) for stage in (0, 1)] == n_layers


def test_balanced_stages_are_cut_into_no_virtual_ones():
    model = llama(n_layers=8, hidden_size=256, n_heads=8, vocab_size=512, seq_len=64)
    one, two = (
        can_run(megatron_of(ENGINE), model, Job(4, 16, 64), 1, n, pipeline=4) for n in (1, 2)
    )
    assert (one, two) == (True, False)


def two_stages_seconds(engine, n_micro):
    """The time of a step in two stages on one node, with one replica."""
    strategy = megatron_of(engine, n_virtual=(1,))
    model = llama(n_layers=8, hidden_size=1024, n_heads=8, vocab_size=32000, seq_len=2048)
    scenario = Scenario(model, Job(2, n_micro, 2048), load_machine("aws-p5-2024"), strategy)
    return predict(
        scenario, Configuration(layout_of(strategy, pipeline=2), micro_batch=1)
    ).step_seconds


@pytest.mark.parametrize("n_micro", [1, 2, 50])
def test_two_sleeping_stages_lose_six_sleeps_with_each_micro_batch(n_micro):
    """Four messages announce what is handed forward, and two the gradient that comes back."""
    assert SLEEPING.megatron.handover_seconds == pytest.approx((0.4, 0.2))
    lost = two_stages_seconds(SLEEPING, n_micro) - two_stages_seconds(ENGINE, n_micro)
    assert lost == pytest.approx(0.6 * n_micro, rel=1e-9)


def test_without_stages_nothing_sleeps():
    machine = load_machine("aws-p5-2024")
    awake, asleep = (
        predict(
            Scenario(MODEL, Job(8, 16, 64), machine, megatron_of(engine)),
            Configuration(layout_of(megatron_of(engine), tensor=2, data=4), micro_batch=1),
        ).step_seconds
        for engine in (ENGINE, SLEEPING)
    )
    assert asleep == awake


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        (SLEEPING, {"schedule": "zb-h1"}, "stages of nanotron of December 2024 run in the order"),
        (SLEEPING, {"n_virtual": (2,)}, "nanotron of December 2024 has no virtual stages"),
        (ENGINE, {"n_virtual": (2,)}, "nanotron has no virtual stages"),
        (ENGINE, {"schedule": "zb-h1"}, ""),
        (SLEEPING, {"n_virtual": (1, 2)}, ""),
    ],
)
def test_what_its_stages_cannot_do_is_named(engine, options, reason):
    """Layouts without stages break none of these rules."""
    model = llama(n_layers=8, hidden_size=256, n_heads=8, vocab_size=512, seq_len=64)
    strategy = replace(megatron_of(engine), **options)
    for pipeline in (1, 4):
        placements = table_of(strategy, data=4 // pipeline, pipeline=pipeline).placements
        rejected = strategy.rejections(model, Job(4, 16, 64), placements)
        broken = [name for name, breaks in rejected.items() if np.any(breaks)]
        assert len(broken) == (bool(reason) and pipeline > 1)
        assert all(name.startswith(reason) for name in broken)
