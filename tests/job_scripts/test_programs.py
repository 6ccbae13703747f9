"""The training programs that `launch` writes train on gloo ranks, and alike on every layout."""

import importlib
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.io.presets import list_models, load_model
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import parse_layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.named import strategy_named

torch = pytest.importorskip("torch")

from engines.axonn_on_cpu import destroy_groups, replace_cuda_calls  # noqa: E402
from programs import arguments, imported, settings_in  # noqa: E402
from runtime.ranks import on_ranks  # noqa: E402
from worlds import llama, machine_of  # noqa: E402

from axonn_tune.runtime.released.deepspeed import forget_groups, import_deepspeed  # noqa: E402

CPU = torch.device("cpu")
GPT = Model("gpt", n_layers=2, hidden_size=32, n_heads=4, vocab_size=128, seq_len=8)
LLAMA = llama(
    n_layers=4,
    hidden_size=32,
    n_heads=4,
    n_kv_heads=2,
    vocab_size=128,
    seq_len=8,
    ffn_hidden_size=64,
)
PARALLEL = replace(GPT, name="parallel", parallel_block=True)
RECOMPUTES = ("none", "selective", "full")


def prediction_of(model, n_ranks, strategy, layout, recompute="none", **job):
    strategy = strategy_named(strategy)
    job = Job(n_ranks, 8, model.seq_len, **{"dtype": "fp32", **job})
    configuration = Configuration(parse_layout(layout, strategy.axes), recompute=recompute)
    return predict(Scenario(model, job, machine_of(), strategy), configuration)


def settings_of(*given, **options):
    return settings_in(launch_files(prediction_of(*given, **options)))


def plain_losses(model, settings):
    """Train a model on one rank, on the whole batch at once."""
    training = imported("training")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments().lr)
    tokens, losses = training.Tokens(settings, None), []
    for step in range(arguments().steps):
        text = torch.cat(tokens.share(step, 0, 1))
        loss = training.mean_loss(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def count_parameters(rank, models):
    gpt = imported("gpt")
    for model, settings in models:
        with torch.device("meta"):
            built = gpt.GPT(settings)
        padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size
        padding *= 1 if model.tied_embeddings else 2
        assert sum(p.numel() for p in built.parameters()) == model.parameters + padding


def test_a_program_has_the_parameters_of_its_model():
    models = []
    for model in map(load_model, list_models()):
        if not model.special_parts(model.seq_len):
            short = replace(model, n_layers=2)
            models.append((short, settings_of(short, 8, "zero3", "shard=8")))
    on_ranks(1, count_parameters, models)


def train_with_fsdp2(rank, cases):
    warnings.filterwarnings("ignore", message="DTensor random operators")
    program, gpt = imported("train_fsdp2"), imported("gpt")
    for settings in cases:
        losses = program.run(settings, arguments(), CPU)
        whole = gpt.GPT(settings)
        sharded = program.sharded_gpt(settings, CPU)
        assert sum(p.to_local().numel() for p in sharded.parameters()) < 0.6 * sum(
            p.numel() for p in whole.parameters()
        )
        is_tied = settings.model.tied_embeddings
        assert (sharded.head.weight is sharded.embedding.weight) == is_tied
        state = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
        whole.load_state_dict(state)
        np.testing.assert_allclose(losses, plain_losses(whole, settings), rtol=1e-4)


@pytest.mark.parametrize(
    "model",
    [GPT, *(pytest.param(model, marks=pytest.mark.slow) for model in (LLAMA, PARALLEL))],
    ids=lambda model: model.name,
)
def test_fsdp2_trains_as_one_rank_does(model):
    cases = [settings_of(model, 2, "zero3", "shard=2", recompute=each) for each in RECOMPUTES]
    cases.append(settings_of(model, 2, "zero3", "shard=2", attention="unfused"))
    cases[0].recompute = "full:1"
    cases[1].offload = "optimizer"
    on_ranks(2, train_with_fsdp2, cases)


@pytest.mark.slow
def test_fsdp2_trains_with_replicas():
    on_ranks(4, train_with_fsdp2, [settings_of(GPT, 4, "zero3", "shard=2,replica=2")])


def compare_models(rank, settings):
    """AxoNN's model on one rank is the model for one device."""
    replace_cuda_calls()
    axonn_gpt, gpt, program = (imported(n) for n in ("axonn_gpt", "gpt", "train_axonn"))
    program.initialise(settings)
    own = axonn_gpt.Stage(settings, range(settings.model.n_layers), True, True)
    plain = gpt.GPT(settings)
    state = plain.state_dict()
    names = {"gain": "weight", "shift": "bias", "position": "weight"}
    for name, parameter in own.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        owner = "position" if last == "position" else owner
        target = f"{owner}.{names.get(last, last)}".lstrip(".")
        state[target] = parameter.detach().view(state[target].shape)
    plain.load_state_dict(state)
    tokens = torch.arange(16).view(2, 8)
    torch.testing.assert_close(own(tokens), plain(tokens))
    loss = axonn_gpt.mean_loss_over_y(own(tokens), tokens)
    torch.testing.assert_close(loss, imported("training").mean_loss(plain(tokens), tokens))


@pytest.mark.parametrize("model", [GPT, LLAMA, PARALLEL], ids=lambda model: model.name)
def test_axonn_computes_the_model(model):
    pytest.importorskip("axonn")
    on_ranks(1, compare_models, settings_of(model, 1, "axonn", "1x1x1x1"))


def train_with_axonn(rank, cases):
    replace_cuda_calls()
    program, wanted = imported("train_axonn"), None
    for settings in cases:
        losses = program.run(settings, arguments(), CPU)
        destroy_groups()
        wanted = wanted or losses
        np.testing.assert_allclose(losses, wanted, rtol=1e-4, err_msg=str(settings))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(GPT, marks=pytest.mark.sweep), LLAMA], ids=lambda model: model.name
)
def test_axonn_trains_alike_on_every_grid(model):
    """The first case is data parallelism, in which AxoNN only sums gradients."""
    pytest.importorskip("axonn")
    grids = ("1x1x1x4", "2x1x2x1", "1x2x1x2", "1x1x4x1", "2x2x1x1")
    recomputes = ("none", "selective", "full", "none", "selective")
    cases = [
        settings_of(model, 4, "axonn", grid, recompute=recompute)
        for grid, recompute in zip(grids, recomputes, strict=True)
    ]
    for grid, recompute in (("1x1x1x2x2", "none"), ("2x1x1x1x2", "full"), ("1x1x1x1x4", "none")):
        cases.append(settings_of(model, 4, "axonn-pipeline", grid, recompute=recompute))
    on_ranks(4, train_with_axonn, cases)


def blocks_of_stages(rank, cases):
    program = imported("train_axonn")
    for n_layers, n_stages in cases:
        stages = [program.stage_blocks(n_layers, n_stages, stage) for stage in range(n_stages)]
        assert [block for stage in stages for block in stage] == list(range(n_layers))


def test_stages_share_the_blocks():
    """Embedding and head count as blocks where the stages do not divide the layers."""
    pytest.importorskip("axonn")
    on_ranks(1, blocks_of_stages, [(8, 2), (8, 8), (6, 4), (126, 16), (2, 4)])


def read_tokens(rank, path):
    settings = settings_of(GPT, 1, "zero3", "shard=1")
    tokens = imported("training").Tokens(settings, path)
    texts = [tokens.sequence(step, number) for step in range(2) for number in range(3)]
    assert torch.equal(texts[1], torch.arange(9, 18)), "the second sequence follows the first"
    assert all(text.shape == (9,) and text.max() < 100 for text in texts)


def test_tokens_of_a_file_are_read_in_turn(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(100, dtype=np.uint32).tofile(path)
    on_ranks(1, read_tokens, str(path))


def train_with_deepspeed(rank, folder):
    """Train by the files of a folder, in which a program finds its settings next to itself."""
    deepspeed = import_deepspeed(CPU)
    sys.path.insert(0, folder)
    program = importlib.import_module("train_deepspeed")
    settings, losses = importlib.import_module("training").load_settings(), []
    for settings.recompute in ("none", "full"):
        losses.append(program.run(settings, program.load_config(), arguments(), CPU))
        forget_groups(deepspeed)
    assert losses[0] == losses[1] and len(losses[0]) == arguments().steps


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "layout"), [("zero2", "data=2"), ("zero3", "shard=2")])
def test_deepspeed_trains(tmp_path, strategy, layout):
    """DeepSpeed reads its configuration and trains, with the same losses for any recomputation."""
    pytest.importorskip("deepspeed")
    prediction = prediction_of(LLAMA, 2, strategy, layout)
    for name, text in launch_files(prediction, "deepspeed").items():
        (tmp_path / name).write_text(text)
    on_ranks(2, train_with_deepspeed, str(tmp_path))
