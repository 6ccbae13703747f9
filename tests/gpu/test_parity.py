"""A GPU computes what a CPU does: losses, gradients, checkpoints, sums of many terms."""

import gc

import pytest

torch = pytest.importorskip("torch")

from gpu.training import MODELS, SEQ_LEN, Training  # noqa: E402

from axonn_tune.runtime import load, save  # noqa: E402
from axonn_tune.runtime.axonn.embedding import add_rows  # noqa: E402

CPU = torch.device("cpu")
N_STEPS = 5
VARIANTS = [
    {},
    {"tuning": True},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"attention": "unfused"},
    {"micro_batch": 2},
    {"record": False},
]
# Rounding of bf16 is 0.4 %; a norm of gradients sums up many.
TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}


@pytest.fixture(scope="module", params=MODELS)
def expected(request, alone):
    spec = MODELS[request.param]
    return spec, Training(spec, CPU, "fp32", 8, SEQ_LEN).curve(N_STEPS)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_losses_and_norms_are_those_of_a_cpu(expected, variant, dtype, device, note):
    spec, wanted = expected
    got = Training(spec, device, dtype, 8, SEQ_LEN, **variant).curve(N_STEPS)
    worst = max(abs(a / b - 1) for a, b in zip(got, wanted, strict=True))
    note(model=spec.name, dtype=dtype, variant=str(variant), worst_error=worst)
    assert worst < TOLERANCES[dtype]


def test_a_checkpoint_goes_on_with_the_same_loss(alone, tmp_path):
    first = Training(MODELS["gpt"], alone, "bf16", 8, SEQ_LEN)
    first.curve(2)
    save(tmp_path / "kept", first.model, first.optimizer, 2)
    second = Training(MODELS["gpt"], alone, "bf16", 8, SEQ_LEN)
    assert load(tmp_path / "kept", second.model, second.optimizer) == 2
    assert second.curve(1) == pytest.approx(first.curve(1), rel=1e-3)


def test_a_frequent_token_gets_all_of_its_gradient(device):
    block = torch.full((3, 64), 24.0, dtype=torch.bfloat16, device=device)
    places = torch.tensor([1] * 1000 + [2], device=device)
    add_rows(block, places, torch.ones(1001, 64, dtype=torch.bfloat16, device=device), begins=True)
    assert block[:, 0].tolist() == [0.0, 1000.0, 1.0]


@pytest.mark.gpu_only
def test_one_buffer_of_more_than_two_billion_elements_is_updated(device):
    n = 2**31 + 2**20
    free, _ = torch.cuda.mem_get_info(device)
    if free < 5 * 4 * n:
        pytest.skip("needs 43 GB of free memory")
    weight = torch.nn.Parameter(torch.zeros(n, device=device))
    weight.grad = torch.ones(n, device=device)
    torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0, fused=True).step()
    assert torch.allclose(weight[:4], weight[-4:]) and weight[-1] != 0
    del weight
    gc.collect()
    torch.cuda.empty_cache()
