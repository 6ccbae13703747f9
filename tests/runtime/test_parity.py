"""Outputs, losses and gradients equal those of plain torch, on every grid of 1 to 8 ranks."""

import itertools

import pytest
import torch
from runtime.cases import BATCH, all_cases, telling_cases, trained
from runtime.ranks import assert_close, on_grid, on_ranks
from runtime.reference import Reference, whole_parameters

from axonn_tune.runtime.axonn.trainer import RandomTokens

FP32_TOLERANCE = 1e-5

_references = {}


def reference_of(case, layouts):
    """Whole parameters, and logits, loss and gradients of plain torch on the whole batch."""
    if case.model not in _references:
        spec = case.spec
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


def check(case, mesh, tolerance=FP32_TOLERANCE):
    ours = trained(case, mesh)
    layouts = {name: owner.layout for name, owner in ours.owners.items()}
    whole, tokens, targets, logits, loss, gradients = reference_of(case, layouts)
    ours.take(whole)
    share_tokens = ours.share(tokens)
    share_targets = ours.share(targets)
    with torch.no_grad():
        got = ours.model(share_tokens)
    wanted = ours.share(logits).chunk(case.grid.size("y"), dim=-1)[mesh.coordinate("y")]
    assert_close(got, wanted, tolerance, f"logits of {case}")
    # Twice, since the first step learns what to gather ahead; the second one is checked.
    for _ in range(2):
        ours.optimizer.gradients.zero_()
        total = torch.zeros(())
        for part in range(case.n_microsteps):
            rows = slice(part, None, case.n_microsteps)
            part_loss = ours.model.loss(share_tokens[rows], share_targets[rows], targets.numel())
            part_loss.backward()
            total += part_loss.detach()
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
    "n_ranks",
    [1, 2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.sweep)],
)
def test_every_grid_equals_plain_torch(n_ranks):
    on_ranks(n_ranks, check_cases, list(telling_cases(n_ranks)))


@pytest.mark.sweep
@pytest.mark.parametrize("n_ranks", [2, 4, 8])
def test_every_grid_overlap_and_recomputation_equals_plain_torch(n_ranks):
    on_ranks(n_ranks, check_cases, list(all_cases(n_ranks)))
