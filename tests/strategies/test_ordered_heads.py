"""Copies of heads and kernels of the loss in Megatron-LM of 2021 to 2023, in bytes by hand."""

from dataclasses import replace

import pytest
from build import number, operations, plan_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import MemoryBound
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of

TOKENS = 1024
MODEL = Model("m", n_layers=1, hidden_size=512, n_heads=4, vocab_size=1024, seq_len=TOKENS)
OLD_ENGINES = ("megatron-2021", "megatron-2022", "megatron-2023", "megatron-2021-09")


def kernels(strategy, attention, n_sequences, recompute="none", model=MODEL):
    """The kernels of a micro-step that memory bounds, by name; two ranks share the heads."""
    job = Job(2, n_sequences, TOKENS, attention=attention)
    options = {"micro_batch": n_sequences, "recompute": recompute}
    plan = plan_of(strategy, model, job, tensor=2, **options)
    plan = strategy.engine.as_run(plan)
    return {op.name: op for op in operations(plan.microstep) if isinstance(op, MemoryBound)}


@pytest.mark.parametrize(
    ("attention", "n_sequences", "copied"),
    [
        pytest.param("unfused", 1, {"forward": (0, 1), "backward": (0, 0)}, id="unfused"),
        pytest.param("flash", 1, {"forward": (3, 0), "backward": (0, 0)}, id="fused, one sequence"),
        pytest.param("flash", 2, {"forward": (3, 1), "backward": (1, 0)}, id="fused, several"),
    ],
)
@pytest.mark.parametrize("engine", OLD_ENGINES)
def test_heads_are_copied_around_attention(engine, attention, n_sequences, copied):
    """A rank has half of the heads, so that queries have 256 elements of two bytes for a token."""
    found = kernels(megatron_of(load_engine(engine), (1,)), attention, n_sequences)
    tensor_bytes = n_sequences * TOKENS * 256 * 2
    for chain, (before, after) in copied.items():
        for name, n_tensors in (("attention_order", before), ("attention_output_order", after)):
            kernel = found.get(f"{chain}.{name}")
            nbytes = 0.0 if kernel is None else number(kernel.nbytes)
            assert nbytes == 2.0 * n_tensors * tensor_bytes
            assert not nbytes or number(kernel.strided_bytes) == nbytes
    joined = found["backward.attention_join"]
    assert number(joined.nbytes) == 2.0 * 3.0 * tensor_bytes
    assert number(joined.strided_bytes) == 0.0


def test_recomputed_attention_copies_its_output_again():
    strategy = megatron_of(load_engine("megatron-2022"), (1,))
    found = kernels(strategy, "unfused", 1, "selective")
    again, first = (found[f"{c}.attention_output_order"] for c in ("recompute", "forward"))
    assert number(again.nbytes) == number(first.nbytes) > 0


@pytest.mark.parametrize("engine", OLD_ENGINES)
def test_a_kernel_adds_the_bias_of_heads_to_their_product(engine):
    """It reads and writes 3 x 256 elements of two bytes for a token, and broadcasts the bias."""
    found = kernels(megatron_of(load_engine(engine), (1,)), "unfused", 1, "full")
    for chain in ("forward", "recompute"):
        added = found[f"{chain}.qkv.bias"]
        assert number(added.nbytes) == 2.0 * TOKENS * 3 * 256 * 2
        assert number(added.strided_bytes) == number(added.nbytes)
    without = replace(MODEL, qkv_bias=False, bias=False)
    found = kernels(megatron_of(load_engine(engine), (1,)), "unfused", 1, "full", without)
    assert not [name for name in found if name.endswith("qkv.bias")]


@pytest.mark.parametrize("engine", OLD_ENGINES)
def test_selective_recomputation_repeats_attention_and_not_the_kernel_before_it(engine):
    found = kernels(megatron_of(load_engine(engine), (1,)), "unfused", 1, "selective")
    assert "recompute.attention_output_order" in found
    assert "recompute.qkv.bias" not in found


@pytest.mark.parametrize("engine", OLD_ENGINES)
def test_heads_are_rotated_after_their_bias_was_added(engine):
    rotated = replace(MODEL, position="rotary")
    order = list(kernels(megatron_of(load_engine(engine), (1,)), "unfused", 1, model=rotated))
    assert order.index("forward.qkv.bias") < order.index("forward.rotary")


def test_other_engines_add_no_bias_in_a_kernel():
    assert "forward.qkv.bias" not in kernels(Megatron3D(), "unfused", 1)


def test_other_engines_leave_heads_where_they_lie():
    assert not [name for name in kernels(Megatron3D(), "unfused", 1) if name.endswith("order")]


@pytest.mark.parametrize("engine", OLD_ENGINES)
def test_nothing_fuses_the_loss(engine):
    """Kernel by kernel, 38 bytes of each logit forward and 14 backward."""
    found = kernels(megatron_of(load_engine(engine), (1,)), "unfused", 1)
    n_logits = TOKENS * MODEL.padded_vocab_size / 2
    assert number(found["loss.softmax"].nbytes) / n_logits == pytest.approx(38.0)
    assert number(found["loss.gradient"].nbytes) / n_logits == pytest.approx(14.0, rel=2e-3)


@pytest.mark.parametrize("attention", ["unfused", "flash"])
def test_biases_are_copied_to_all_scores_in_each_forward_pass(attention):
    """Each of two heads has a score of 2 bytes for every pair of tokens: written once, read once.

    The copy broadcasts (pytorch at 002253ce, native/cuda/Blas.cpp, baddbmm_out_cuda_impl).
    """
    engine = load_engine("megatron-2021")
    biased = replace(engine, megatron=replace(engine.megatron, biases_scores=True))
    found = kernels(megatron_of(biased, (1,)), attention, 2, "full")
    biases = {name: op for name, op in found.items() if name.endswith("attention_bias")}
    is_unfused = attention == "unfused"
    assert set(biases) == {f"{c}.attention_bias" for c in ("forward", "recompute") if is_unfused}
    score_bytes = 2 * 2 * TOKENS * TOKENS * 2
    for bias in biases.values():
        assert number(bias.nbytes) == 2 * score_bytes
        assert number(bias.strided_bytes) == score_bytes
    unbiased = kernels(megatron_of(engine, (1,)), attention, 2, "full")
    assert set(found) - set(unbiased) == set(biases)
