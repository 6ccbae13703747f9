"""The loss of Megatron-Core as torch compiles it: bytes of each logit that its kernels move."""

from math import prod

import pytest
import torch

from axonn_tune.io.presets import load_engine

pytest.importorskip("megatron.core")
# Importing the package warns of what it deprecates, and of packages that it does without.
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS, VOCABULARY = 64, 2048
N_LOGITS = TOKENS * VOCABULARY
# One kernel reads logits twice and writes their softmax in fp32, and one the gradients of that.
FUSED_BYTES = {"softmax": 8.0, "softmax_backward": 6.0}


class Counted(Exception):
    """Ends a compilation whose kernels have been counted."""


def number_of(ranges):
    """The number of elements that a kernel handles, reduced ones included."""
    return prod(prod(sizes) if isinstance(sizes, (tuple, list)) else int(sizes) for sizes in ranges)


@pytest.fixture
def kernels(monkeypatch):
    """Bytes of each logit that kernels move which handle all of them, in order."""
    from torch._inductor import config

    each = []

    def counting(nodes):
        for node in nodes:
            group = getattr(node, "group", None)
            if group is not None and number_of(group[1]) == N_LOGITS:
                each.append(round(node.get_read_write_buffers_sizes() / N_LOGITS))
        raise Counted

    monkeypatch.setattr(config, "_post_fusion_custom_pass", counting)
    monkeypatch.setattr(config, "force_disable_caches", True)
    torch._dynamo.reset()
    yield each
    torch._dynamo.reset()


def result(function, *inputs):
    """What a function returns, as it is written, after its compilation has ended."""
    with pytest.raises(Exception, match="Counted"):
        function(*inputs)
    return function._torchdynamo_orig_callable(*inputs)


def bytes_of(engine):
    """Bytes of each logit that an engine's loss moves, forward and backward."""
    kernels = load_engine(engine).kernels
    return [kernels[name].traffic.value * size for name, size in FUSED_BYTES.items()]


def test_the_compiled_loss_moves_what_the_engine_says(kernels):
    """A GPU casts and finds the largest value in one kernel, and reads nothing again for it (4).

    The compiler counts the softmax as read where gradients only take its place (4).
    """
    from megatron.core.fusions import fused_cross_entropy as loss

    logits = torch.randn(TOKENS, 1, VOCABULARY, dtype=torch.bfloat16)
    targets = torch.randint(0, VOCABULARY, (TOKENS, 1))
    with torch.no_grad():
        in_fp32, largest = result(loss.calculate_logits_max, logits)
        mask, target, sums, exponentials = result(
            loss.calculate_predicted_logits, in_fp32, targets, largest, 0, VOCABULARY
        )
        softmax, losses = result(loss.calculate_cross_entropy_loss, exponentials, sums)
        forward = list(kernels)
        kernels.clear()
        result(loss.calculate_gradients, softmax, torch.ones(TOKENS, 1), mask, target)
    wanted = torch.nn.functional.cross_entropy(logits[:, 0].float(), targets[:, 0], reduction="sum")
    assert losses.sum().item() == pytest.approx(wanted.item(), rel=1e-4)
    assert (forward, kernels) == ([6, 4, 8, 8], [8, 14])
    moved = [sum(forward) - 4, sum(kernels) - 4]
    assert bytes_of("megatron-core") == bytes_of("megatron-core-graphs") == moved


def test_transformer_engines_loss_is_one_kernel():
    from axonn_tune.reproduce.runs import LOSS_KERNELS, with_fused_loss

    engine = load_engine("megatron-core")
    assert set(engine.kernels) - set(with_fused_loss(engine).kernels) == set(LOSS_KERNELS)
