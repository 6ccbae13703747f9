"""Gradients of frequent tokens: their sums do not stop growing in bf16."""

import pytest

torch = pytest.importorskip("torch")

from axonn_tune.runtime.axonn.embedding import add_rows  # noqa: E402


class OnGpu(torch.Tensor):
    """Says that it is on a GPU; what is computed with it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda")


@pytest.mark.parametrize("begins", [True, False])
def test_a_frequent_token_gets_all_of_its_gradient(begins):
    places = torch.tensor([1] * 1000 + [2])
    rows = torch.ones(1001, 4, dtype=torch.bfloat16)
    block = torch.full((3, 4), 24.0, dtype=torch.bfloat16)
    add_rows(block, places, rows, begins)
    before = 0.0 if begins else 24.0
    assert block[:, 0].tolist() == [before, 1000.0 + before, 1.0 + before]


@pytest.mark.parametrize("begins", [True, False])
def test_the_kernel_for_gpus_adds_the_same_rows(begins):
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(0, 5, (200,), generator=generator)
    rows = torch.randn(200, 4, generator=generator)
    block, wanted = torch.ones(7, 4), torch.ones(7, 4)
    add_rows(block, places, rows.as_subclass(OnGpu), begins)
    add_rows(wanted, places, rows, begins)
    torch.testing.assert_close(block, wanted)
