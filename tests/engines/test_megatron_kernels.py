"""The kernels of Megatron-Core that nothing fuses: bytes that torch moves in its released code."""

import pytest
import torch
from build import number, operations, plan_of
from engines.traffic import Traffic, bf16, moved
from worlds import llama

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.engine import IDEAL
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Gemm, MemoryBound
from axonn_tune.spec.precision import TF32
from axonn_tune.spec.tuning import Adapters
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

# Importing the package warns of what it deprecates, and of packages that it does without.
pytestmark = pytest.mark.filterwarnings("ignore")
KERNELS = load_engine("megatron-core").kernels
TOKENS, HIDDEN, EXPERTS = 256, 512, 4


def form(kernel):
    """Bytes over those of the one fused kernel: all, and of kernels of one element at a time."""
    return [KERNELS[kernel].traffic.value, KERNELS[kernel].strided.value]


def counted_form(counted, fused_bytes, further_bytes=0.0):
    """The same as counted, with bytes of fused kernels beside those that were counted."""
    return [
        (counted.priced_bytes + further_bytes) / fused_bytes,
        counted.strided_bytes / fused_bytes,
    ]


def test_a_rotation_that_scales_moves_what_the_engines_say():
    from megatron.core.models.common.embeddings import rope_utils

    angles = torch.empty(TOKENS, 1, 1, HIDDEN, device="meta")
    queries = bf16(TOKENS, 1, 128, HIDDEN)
    turned = rope_utils._apply_rotary_pos_emb_bshd
    passes = moved(lambda x: turned(x, angles, mscale=1.3), queries)
    fused_bytes = 2.0 * 2.0 * queries.numel()
    forms = [counted_form(counted, fused_bytes) for counted in passes]
    mean = [sum(values) / 2.0 for values in zip(*forms, strict=True)]
    assert mean == pytest.approx(form("scaled_rotary"), rel=0.02)
    assert load_engine("megatron-core-graphs").kernels["scaled_rotary"] == KERNELS["scaled_rotary"]


@pytest.mark.parametrize(
    ("dtype", "forward_bytes", "backward_bytes"),
    [(torch.bfloat16, 14, 16), (torch.float32, 32, 40)],
    ids=["bf16", "fp32"],
)
def test_biases_of_experts_move_what_the_engine_says(dtype, forward_bytes, backward_bytes):
    """With the router's weights in fp32, twice the bytes are predicted: 28 and 32 of an element."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    outputs = bf16(EXPERTS * TOKENS, HIDDEN)
    weights = torch.empty(EXPERTS * TOKENS, 1, dtype=dtype, device="meta", requires_grad=True)
    biases = [bf16(HIDDEN) for _ in range(EXPERTS)]

    def add_biases(x, p, *b):
        return TEGroupedMLP._apply_bias(x, list(b), EXPERTS * [TOKENS], p)

    forward, backward = moved(add_biases, outputs, weights, *biases)
    per_element = [counted.priced_bytes / outputs.numel() for counted in (forward, backward)]
    assert per_element == pytest.approx([forward_bytes, backward_bytes], rel=0.02)
    scale = 2.0 if dtype is torch.float32 else 1.0
    for counted, kernel, fused in (
        (forward, "expert_bias", 4.0),
        (backward, "expert_bias_backward", 2.0),
    ):
        traffic, strided = counted_form(counted, scale * fused * outputs.numel())
        assert strided == pytest.approx(form(kernel)[1], rel=0.02)
        assert traffic == pytest.approx(form(kernel)[0], rel=0.02 if scale == 1.0 else 0.26)


def test_limits_of_a_gate_move_what_the_engine_says(monkeypatch):
    from megatron.core.fusions import fused_bias_geglu as module

    class Activation:
        """Stands in for the fused kernel, so that the limits alone are counted."""

        @staticmethod
        def apply(inputs, *_):
            return inputs.view_as(inputs)

    monkeypatch.setattr(module, "WeightedQuickGeGLUFunction", Activation)
    inputs = bf16(TOKENS, 2 * HIDDEN)

    def limited(x):
        weights = torch.empty(TOKENS, 1, device="meta")
        return module.weighted_bias_quick_geglu_impl(x, None, weights, clamp_value=7.0)

    input_bytes = 2.0 * inputs.numel()
    # The fused kernel reads the input and writes half as much; backward it reads and writes inputs.
    for counted, kernel, n_passes in zip(
        moved(limited, inputs),
        ("clamped_swiglu", "clamped_swiglu_backward"),
        (1.5, 2.5),
        strict=True,
    ):
        fused_bytes = n_passes * input_bytes
        assert counted_form(counted, fused_bytes, fused_bytes) == pytest.approx(
            form(kernel), rel=0.02
        )


@pytest.mark.parametrize(
    ("router_dtype", "engine"),
    [(torch.float32, "megatron-core"), (torch.bfloat16, None)],
    ids=["fp32", "bf16"],
)
def test_a_router_in_fp32_casts_its_operands_back_and_forth(router_dtype, engine, monkeypatch):
    """Products of Transformer Engine read what they are given, and write the type that is asked."""
    from megatron.core.transformer.moe import moe_utils

    def product(a, b, dtype, layout, **_):
        assert a.dtype == b.dtype
        rows = b.shape[1] if layout == "NT" else b.shape[0]
        columns = a.shape[0] if layout == "TN" else a.shape[1]
        return (torch.empty(rows, columns, dtype=dtype, device="meta"),)

    monkeypatch.setattr(moe_utils, "te_general_gemm", product, raising=False)
    operands = bf16(TOKENS, HIDDEN), bf16(EXPERTS, HIDDEN)
    passes = moved(lambda x, w: moe_utils.router_gating_linear(x, w, None, router_dtype), *operands)
    named = [zip(each.names, each.each, strict=True) for each in passes]
    counted = [sum(size for name, size in of_pass if name == "_to_copy") for of_pass in named]
    model = llama(
        n_layers=1,
        hidden_size=HIDDEN,
        n_heads=8,
        n_kv_heads=8,
        ffn_hidden_size=HIDDEN,
        vocab_size=4096,
        seq_len=TOKENS,
        experts=Experts(EXPERTS, 2, HIDDEN),
    )
    strategy = Megatron3D(has_experts=True, engine=load_engine(engine) if engine else IDEAL)
    kernels = operations(plan_of(strategy, model, Job(1, 1, TOKENS)).microstep)
    planned = {
        chain: sum(
            number(op.nbytes)
            for op in kernels
            if op.name.startswith(f"{chain}.router.") and op.name.endswith("fp32")
        )
        for chain in ("forward", "backward")
    }
    assert list(planned.values()) == counted
    formats = {
        op.number_format
        for op in kernels
        if isinstance(op, Gemm) and op.name.startswith("backward.router.")
    }
    assert formats == {TF32 if engine else ""}


RANKS, RANK = 4, 16


def planned_copies(layer, exchanges):
    """Copies around the messages of an adapter in a layer's passes: all bytes, and strided ones."""
    model = llama(
        n_layers=1,
        hidden_size=HIDDEN,
        n_heads=8,
        n_kv_heads=8,
        ffn_hidden_size=2 * HIDDEN,
        vocab_size=4096,
        seq_len=TOKENS,
    )
    job = Job(n_gpus=RANKS, global_batch=1, seq_len=TOKENS, adapters=Adapters(RANK, (layer,)))
    plan = plan_of(Megatron3D(exchanges_adapters=exchanges), model, job, tensor=RANKS)
    copies = {"forward": [0.0, 0.0], "backward": [0.0, 0.0]}
    for op in operations(plan.microstep):
        if isinstance(op, MemoryBound) and op.name.endswith((".joined", ".parted")):
            total = copies[op.name.split(".")[0]]
            total[0] += number(op.nbytes)
            total[1] += number(op.strided_bytes)
    return copies


class Group:
    """Stands in for a group of ranks whose messages arrive at once."""

    def size(self):
        return RANKS

    def rank(self):
        return 1


@pytest.mark.parametrize(("layer", "width"), [("proj", HIDDEN), ("qkv", RANK)])
def test_gathered_columns_of_an_adapter_are_joined_and_their_gradient_parted(
    layer, width, monkeypatch
):
    """In the forward pass the bytes that the message itself writes are not those of a kernel."""
    from megatron.core.tensor_parallel import mappings

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    monkeypatch.setattr(mappings, "dist_all_gather_func", lambda *_, **__: None)
    gather = mappings._GatherFromModelParallelRegion.apply
    forward, backward = moved(lambda x: gather(x, Group()), bf16(TOKENS, 1, width // RANKS))
    message_bytes = 2 * TOKENS * width
    assert planned_copies(layer, exchanges=False) == {
        "forward": [forward.priced_bytes - message_bytes, forward.strided_bytes],
        "backward": [backward.priced_bytes, backward.strided_bytes],
    }


def exchanged(tensor, parted_axis, joined_axis):
    """The copies of Megatron-Bridge's all-to-all, whose parts arrive as they were sent."""
    with Traffic() as counted, torch.no_grad():
        parts = [part.contiguous() for part in tensor.chunk(RANKS, dim=parted_axis)]
        torch.cat(parts, dim=joined_axis)
    return [counted.priced_bytes, counted.strided_bytes]


def test_columns_of_an_adapter_that_are_exchanged_are_copied_once_forward_and_twice_backward():
    assert planned_copies("proj", exchanges=True) == {
        "forward": exchanged(bf16(TOKENS, 1, HIDDEN // RANKS), 0, -1),
        "backward": exchanged(bf16(TOKENS // RANKS, 1, HIDDEN), -1, 0),
    }
