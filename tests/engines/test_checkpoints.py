"""What torch's checkpoints form again, counted as torch runs them, and what the plans say of it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from build import number, operations, plan_of
from engines.counted_products import Products
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import llama

from axonn_tune.io.presets import load_engine
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Gemm
from axonn_tune.strategies.zero.zero import zero3

GPT = Model("gpt", 2, 32, 4, 256, 16)
LLAMA = llama(n_layers=2, hidden_size=32, ffn_hidden_size=96, vocab_size=256, n_heads=4, seq_len=16)
MODELS = [GPT, LLAMA]
STOPS = Engine(recomputes_last_product=False)


class Function(torch.autograd.Function):
    """A product as Transformer Engine forms it, which torch sees as a whole."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.flatten(0, -2) @ weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class OfFunctions(nn.Linear):
    def forward(self, x):
        output = Function.apply(x, self.weight)
        return output if self.bias is None else output + self.bias


def backward_products(run, x):
    """The products of a backward pass."""
    output = run(x)
    with Products() as counted:
        output.sum().backward()
    return counted.columns


def formed_again(model, reentrant, linear=nn.Linear):
    """The products that the runtime's model forms again in its backward pass."""
    columns = {}
    for recompute in ("none", "full"):
        gpt = PlainGPT(model, "flash", recompute, reentrant=reentrant)
        for module in gpt.blocks.modules():
            if type(module) is nn.Linear:
                module.__class__ = linear
        tokens = torch.zeros(2, model.seq_len, dtype=torch.long)
        columns[recompute] = backward_products(gpt, tokens)
    return columns["full"] - columns["none"]


def planned_again(model, engine):
    """The products that a plan forms again."""
    plan = plan_of(zero3(engine), model, Job(2, 2, model.seq_len), recompute="full", shard=2)
    again = [op for op in operations(plan.microstep) if op.name.startswith("recompute.")]
    return Counter(int(number(op.n)) for op in again if isinstance(op, Gemm))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("engine", "reentrant"),
    [("fsdp2-eager", False), ("deepspeed-eager", True)],
)
def test_a_checkpoint_stops_before_the_last_product_unless_it_is_reentrant(
    model, engine, reentrant
):
    again = formed_again(model, reentrant)
    assert again == planned_again(model, load_engine(engine))
    n_products = model.n_layers * (4 if reentrant else 3)
    assert again.total() == n_products


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_products_that_are_functions_of_their_own_are_all_formed_again(model):
    """Torch asks for what such a function saves once it has returned."""
    again = formed_again(model, reentrant=False, linear=OfFunctions)
    engine = load_engine("automodel-2025")
    # Queries, keys and values have one product here.
    joined = replace(engine, zero=replace(engine.zero, separates_products=False))
    assert again == planned_again(model, joined)
    assert again.total() == model.n_layers * 4


@pytest.mark.parametrize(
    ("last", "model", "job", "is_left_out"),
    [
        (nn.Identity(), GPT, Job(2, 2, 16), True),
        (nn.Dropout(0.1), GPT, Job(2, 2, 16, dropout=True), False),
        (nn.RMSNorm(32), replace(LLAMA, norms_per_block=4), Job(2, 2, 16), False),
    ],
    ids=["nothing", "dropout", "norm"],
)
def test_what_reads_the_last_product_has_it_formed_again(last, model, job, is_left_out):
    block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), last)
    x = torch.randn(16, 32, requires_grad=True)
    plain = backward_products(block, x)
    again = backward_products(lambda x: checkpoint(block, x, use_reentrant=False), x) - plain
    assert again == Counter([64] if is_left_out else [64, 32])
    assert STOPS.leaves_out_last_product(model, job) == is_left_out
