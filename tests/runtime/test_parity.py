"""Outputs, losses and gradients equal those of plain torch, on every grid of 1 to 8 ranks."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from runtime.ranks import Trained, assert_close, grids, on_grid, on_ranks
from runtime.reference import Reference, whole_parameters

from axonn_tune.runtime.axonn.trainer import RandomTokens
from axonn_tune.spec.grid import Grid
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.model import RECOMPUTES, Model

GPT = Model("gpt", n_layers=2, hidden_size=32, n_heads=8, vocab_size=250, seq_len=8)
LLAMA = Model(
    "llama",
    n_layers=2,
    hidden_size=32,
    n_heads=8,
    n_kv_heads=4,
    ffn_hidden_size=48,
    vocab_size=200,
    seq_len=8,
    gated_mlp=True,
    norm="rms",
    position="rotary",
    bias=False,
    tied_embeddings=False,
)
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "parallel": replace(GPT, parallel_block=True, position="rotary"),
    "bare": replace(GPT, position="none", bias=False, qkv_bias=True, tied_embeddings=False),
}
BATCH = 16
FP32_TOLERANCE = 1e-5

ALL_ON, ALL_OFF = Overlap(), Overlap(False, False, False)
OVERLAPS = (ALL_ON, ALL_OFF, *(replace(ALL_ON, **{name: False}) for name in ("oar", "ors", "oag")))


@dataclass(frozen=True)
class Case:
    grid: Grid
    model: str = "gpt"
    order: str = "xyzd"
    overlap: Overlap = field(default_factory=Overlap)
    recompute: str = "none"
    attention: str = "flash"
    keep_gathered_weights: bool = False
    kernel_tuning: bool = False
    n_microsteps: int = 1
    dtype: str = "fp32"


def telling_cases(n_ranks):
    """Every grid; all overlaps, recomputations and other options take turns."""
    turns = itertools.cycle(
        [
            Case(Grid(1, 1, 1, 1), overlap=overlap, recompute=recompute, **options)
            for (overlap, recompute), options in zip(
                itertools.product(OVERLAPS, RECOMPUTES), itertools.cycle(OPTIONS)
            )
        ]
    )
    for grid in grids(n_ranks):
        for case in itertools.islice(turns, 4 if n_ranks < 8 else 2):
            is_legal = MODELS[case.model].n_kv_heads % grid.y == 0
            yield replace(case, grid=grid, model=case.model if is_legal else "gpt")


OPTIONS = [
    {},
    {"model": "llama"},
    {"keep_gathered_weights": True},
    {"order": "dzyx", "attention": "unfused"},
    {"model": "bare", "kernel_tuning": True},
    {"n_microsteps": 2},
    {"model": "parallel", "order": "zxyd"},
]


def all_cases(n_ranks):
    """Every grid with every overlap and every recomputation."""
    for grid, overlap, recompute in itertools.product(grids(n_ranks), OVERLAPS, RECOMPUTES):
        yield Case(grid, overlap=overlap, recompute=recompute)


_references = {}


def reference_of(case, layouts):
    """Whole parameters, and logits, loss and gradients of plain torch on the whole batch."""
    if case.model not in _references:
        spec = MODELS[case.model]
        whole = whole_parameters(layouts)
        plain = Reference(spec, whole)
        text = RandomTokens(spec.vocab_size, spec.seq_len).sequences(0, 0, BATCH, "cpu")
        tokens, targets = text[:, :-1], text[:, 1:]
        loss = plain.loss(tokens, targets)
        loss.backward()
        with torch.no_grad():
            logits = plain.logits(tokens)
        gradients = {name: p.grad for name, p in plain.parameters.items()}
        _references[case.model] = whole, tokens, targets, logits, loss.item(), gradients
    return _references[case.model]


def trained(case, mesh):
    return Trained(
        MODELS[case.model],
        mesh,
        model={"attention": case.attention, "recompute": case.recompute},
        dtype=case.dtype,
        overlap=case.overlap,
        keep_gathered_weights=case.keep_gathered_weights,
        kernel_tuning=case.kernel_tuning,
        record=True,
    )


def check(case, mesh, tolerance=FP32_TOLERANCE):
    ours = trained(case, mesh)
    layouts = {name: owner.layout for name, owner in ours.owners.items()}
    whole, tokens, targets, logits, loss, gradients = reference_of(case, layouts)
    ours.take(whole)
    own_tokens, own_targets = ours.own(tokens), ours.own(targets)
    with torch.no_grad():
        got = ours.model(own_tokens)
    wanted = ours.own(logits).chunk(case.grid.y, dim=-1)[mesh.coordinate("y")]
    assert_close(got, wanted, tolerance, f"logits of {case}")
    # Twice, since the first step learns what to gather ahead; the second one is checked.
    for _ in range(2):
        ours.optimizer.gradients.zero_()
        total = torch.zeros(())
        for part in range(case.n_microsteps):
            rows = slice(part, None, case.n_microsteps)
            share = ours.model.loss(own_tokens[rows], own_targets[rows], targets.numel())
            share.backward()
            total += share.detach()
    assert ours.summed(total) == pytest.approx(loss, rel=tolerance), f"loss of {case}"
    for name, got in ours.gradients().items():
        wanted = layouts[name].take(gradients[name], mesh)
        scale = gradients[name].abs().max()
        assert_close(got / scale, wanted / scale, tolerance, f"gradient of {name}, {case}", 1.0)
    squares = sum(gradient.double().square().sum() for gradient in gradients.values())
    norm = ours.optimizer._norm().item()
    assert norm == pytest.approx(squares.sqrt().item(), rel=tolerance), f"norm of {case}"


def check_cases(rank, cases):
    for (grid, order), group in itertools.groupby(cases, lambda case: (case.grid, case.order)):
        with on_grid(grid, order) as mesh:
            for case in group:
                check(case, mesh)


@pytest.mark.parametrize(
    "n_ranks", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_every_grid_equals_plain_torch(n_ranks):
    on_ranks(n_ranks, check_cases, list(telling_cases(n_ranks)))


@pytest.mark.slow
@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_every_grid_overlap_and_recomputation_equals_plain_torch(n_ranks):
    on_ranks(n_ranks, check_cases, list(all_cases(n_ranks)))
