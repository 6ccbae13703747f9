"""The reduction of gradients over data during the backward pass."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from runtime.cases import BATCH, reducing_cases, trained
from runtime.ranks import on_grid, on_ranks

from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer

N_STEPS = 2
BLOCK = "gradient.block.all_reduce"


def steps_of(case, mesh):
    """Losses and norms of a case that trains on a mesh, its weights, and the last step."""
    ours = trained(case, mesh)
    text = RandomTokens(case.spec.vocab_size, case.spec.seq_len)
    trainer = Trainer(ours.model, ours.optimizer, text, BATCH, case.micro_batch)
    steps = [trainer.step(index) for index in range(N_STEPS)]
    names = [operation.name for operation in trainer.last_operations]
    return [(step.loss, step.gradient_norm) for step in steps], ours.optimizer.weights, names


def check_training(rank, cases):
    for case in cases:
        with on_grid(case.grid) as mesh:
            later = replace(case, overlap=replace(case.overlap, grad_reduce=False))
            told, weights, names = steps_of(case, mesh)
            told_later, weights_later, names_later = steps_of(later, mesh)
            # Two ranks' sums are the same in any order, and so in buckets of any size.
            assert told == told_later, case
            assert torch.equal(weights, weights_later), case
            assert BLOCK not in names_later, case
            check_order(names, case.spec.n_layers)
            of_all = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, names)
            assert all(of_one == names for of_one in of_all), case


def check_order(names, n_layers):
    """Each block is sent once the next one of the last backward pass has formed its gradients."""
    formed = [at for at, name in enumerate(names) if name == "backward.qkv.gemm_weight"][-n_layers:]
    sent = [at for at, name in enumerate(names) if name == BLOCK]
    assert [sum(at < each for at in formed) for each in sent] == list(range(2, n_layers + 1))


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_bit_in_the_same_order_on_all_ranks(n_ranks):
    on_ranks(n_ranks, check_training, reducing_cases(n_ranks))
