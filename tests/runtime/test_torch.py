"""Training through torch's own parallelism: the same losses on every layout, named collectives."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from runtime.ranks import on_ranks  # noqa: E402
from torch import nn  # noqa: E402

from axonn_tune.api.searching import build_search  # noqa: E402
from axonn_tune.errors import InputError  # noqa: E402
from axonn_tune.io.presets import load_model  # noqa: E402
from axonn_tune.runtime.native.trainer import MasterWeights  # noqa: E402
from axonn_tune.runtime.rehearsal.world import rehearsed  # noqa: E402
from axonn_tune.runtime.request import RunRequest  # noqa: E402
from axonn_tune.runtime.run import build_trainer  # noqa: E402
from axonn_tune.search.one_layout import best_of_layout  # noqa: E402
from axonn_tune.spec.blocks import Experts, LatentAttention  # noqa: E402
from axonn_tune.spec.candidates import Layout  # noqa: E402
from axonn_tune.spec.configuration import Configuration  # noqa: E402
from axonn_tune.spec.engine import IDEAL, Engine  # noqa: E402
from axonn_tune.spec.job import Job, Overlap  # noqa: E402
from axonn_tune.spec.model import Model  # noqa: E402
from axonn_tune.spec.programs import ZeroProgram  # noqa: E402
from axonn_tune.step.explain import explain  # noqa: E402

MODELS = {
    "gpt": Model("gpt", 2, 32, 4, 256, 16),
    "llama": Model(
        "llama",
        2,
        32,
        4,
        256,
        16,
        n_kv_heads=2,
        ffn_hidden_size=48,
        gated_mlp=True,
        norm="rms",
        position="rotary",
        bias=False,
        tied_embeddings=False,
    ),
}


ONCE = Engine(zero=ZeroProgram(is_fsdp2=True, reduces_once=True))


def train(rank, model, strategy, sizes, recompute, overlap, engine=IDEAL):
    request = RunRequest(
        model=MODELS[model],
        job=Job(4, 8, 16, dtype="fp32", overlap=Overlap(oar=True, ors=False, oag=overlap)),
        configuration=Configuration(Layout(sizes), recompute=recompute),
        n_steps=3,
        seed=3,
        strategy=strategy,
        engine=engine,
    )
    trainer = build_trainer(request, torch.device("cpu"))
    steps = [trainer.step(0) for _ in range(request.n_steps)]  # the same text, to learn it
    return [(s.loss, s.gradient_norm) for s in steps], [op.name for op in trainer.last_operations]


def losses_of(rank, model, cases):
    expected = None
    for case in cases:
        curve, _ = train(rank, model, *case)
        losses = torch.tensor(curve, dtype=torch.float64)
        if expected is None:
            expected = losses
        torch.testing.assert_close(losses, expected, rtol=2e-4, atol=1e-6, msg=str(case))
    assert expected[-1, 0] < expected[0, 0]  # it learns


CASES = [
    ("zero3", {"shard": 4, "replica": 1}, "none", True),
    ("zero3", {"shard": 4, "replica": 1}, "full", False),
    ("zero3", {"shard": 2, "replica": 2}, "none", True),
    ("zero3", {"shard": 2, "replica": 2}, "none", True, ONCE),
    ("zero3", {"shard": 1, "replica": 4}, "none", False),
    ("megatron", {"tensor": 1, "data": 4}, "none", True),
    ("megatron", {"tensor": 2, "data": 2}, "none", True),
    ("megatron", {"tensor": 2, "data": 2}, "full", True),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", [pytest.param("gpt", marks=pytest.mark.sweep), "llama"])
def test_every_layout_learns_the_same(model):
    on_ranks(4, losses_of, model, CASES)


def built(strategy, sizes, dtype, n_layers=12):
    """A trainer as one of the ranks builds it, and the most memory that this takes."""
    request = RunRequest(
        model=Model("deep", n_layers, 256, 8, 1024, 16),
        job=Job(8, 8, 16, dtype=dtype),
        configuration=Configuration(Layout(sizes)),
        n_steps=1,
        strategy=strategy,
    )
    with rehearsed(8) as tape:
        trainer = build_trainer(request, torch.device("cpu"))
        return trainer, request.model.parameters, tape.memory.peak()[0]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("zero3", {"shard": 8, "replica": 1}), ("megatron", {"tensor": 8, "data": 1})],
)
def test_no_rank_holds_the_whole_model_while_it_is_built(strategy, sizes):
    _, n_parameters, peak_bytes = built(strategy, sizes, "fp32")
    assert 4 * n_parameters / 8 < peak_bytes < 4 * n_parameters / 2


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [("zero3", {"shard": 8, "replica": 1}), ("megatron", {"tensor": 2, "data": 4})],
)
def test_weights_in_bf16_are_updated_in_fp32(strategy, sizes):
    trainer, *_ = built(strategy, sizes, "bf16", n_layers=1)
    groups = trainer._adamw.param_groups
    assert {p.dtype for group in groups for p in group["params"]} == {torch.float32}


def test_small_updates_are_not_lost_to_rounding():
    layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(layer.weight)
    masters = MasterWeights(layer)
    (weight,) = masters.weights
    for _ in range(1000):  # bf16 has no number between 1 and 1.0078
        layer.weight.grad = torch.full_like(layer.weight, 0.001)
        masters.take_gradients()
    assert masters.gradients()[0].mean().item() == pytest.approx(1.0, rel=0.01)
    for _ in range(100):
        weight.data.add_(1e-4)
        masters.give_back()
    assert layer.weight[0, 0].item() == pytest.approx(1.01, rel=0.004)


def names_of(rank, recompute, expected):
    _, names = train(rank, "gpt", "zero3", {"shard": 4, "replica": 1}, recompute, True)
    assert set(names) == expected, set(names) ^ expected


@pytest.mark.parametrize(
    "recompute",
    [pytest.param("full", marks=pytest.mark.slow), pytest.param("none", marks=pytest.mark.sweep)],
)
def test_collectives_have_the_names_of_the_step_plan(recompute):
    search = build_search(
        MODELS["gpt"],
        4,
        strategy="zero3",
        global_batch=8,
        micro_batch=1,
        recompute=recompute,
        dtype="fp32",
        seq_len=16,
    )
    explained = explain(best_of_layout(search, "shard=4"))
    planned = {op.name for op in explained.operations if op.axis} - {"gradient.norm.all_reduce"}
    on_ranks(4, names_of, recompute, planned | {"computation"})


def reductions_of(rank, expected):
    for engine, number in expected:
        _, names = train(rank, "gpt", "zero3", {"shard": 4, "replica": 1}, "none", True, engine)
        assert sum(name.startswith("gradient.") for name in names) == number


@pytest.mark.slow
def test_gradients_are_reduced_once_in_a_step_or_in_every_micro_step():
    """Two blocks and the root, in two micro-steps or in the last of them."""
    on_ranks(4, reductions_of, [(IDEAL, 6), (ONCE, 3)])


PLAIN = Configuration(Layout({"shard": 4, "replica": 1}))
SELECTIVE = replace(PLAIN, recompute="selective")
REDUCING = Overlap(grad_reduce=True)
LATENT = LatentAttention(kv_rank=8, q_rank=0, content_dim=8, position_dim=4, value_dim=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"configuration": SELECTIVE}, "recompute is 'selective'"),
        ({"goldfish": 3}, "goldfish is given, which .* does not have; allowed: axonn"),
        ({"job": Job(4, 8, 16, dtype="fp32", dropout=True)}, "dropout is not executed"),
        (
            {"job": Job(4, 8, 16, "fp32", overlap=REDUCING)},
            "overlap_grad_reduce is true, which .* does not have",
        ),
        ({"strategy": "zeropp"}, "strategy is 'zeropp'; allowed: axonn, zero3, megatron"),
        ({"model": Model("p", 2, 32, 4, 256, 16, parallel_block=True)}, "parallel blocks"),
        ({"model": Model("p", 2, 32, 4, 256, 16, experts=Experts(4, 2, 32))}, "has experts, which"),
        ({"model": Model("p", 2, 32, 4, 256, 16, latent_attention=LATENT)}, "latent attention"),
        ({"model": Model("p", 2, 32, 4, 256, 16, window=8)}, "a sliding window of 8 tokens"),
        ({"model": Model("p", 2, 32, 4, 256, 16, qk_norm="head")}, "norms of queries and keys"),
    ],
)
def test_what_torch_does_not_run_is_refused(options, message):
    arguments = {
        "model": load_model("tiny"),
        "job": Job(4, 8, 16, dtype="fp32"),
        "configuration": PLAIN,
        "n_steps": 1,
        "strategy": "zero3",
        **options,
    }
    with pytest.raises(InputError, match=message):
        RunRequest(**arguments)


def test_a_window_that_no_sequence_exceeds_is_built():
    model = Model("p", 2, 32, 4, 256, 16, window=16)
    request = RunRequest(model, Job(4, 8, 16, dtype="fp32"), PLAIN, 1, strategy="zero3")
    assert request.model is model
