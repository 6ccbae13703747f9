"""The kernels of Megatron-Core that nothing fuses: bytes that torch moves in its released code."""

import pytest
import torch
from engines.traffic import bf16, moved

from axonn_tune.io.presets import load_engine

# Importing the package warns of what it deprecates, and of packages that it does without.
pytestmark = pytest.mark.filterwarnings("ignore")
KERNELS = load_engine("megatron-core").kernels
TOKENS, HIDDEN, EXPERTS = 256, 512, 4


def traffic(kernel):
    return KERNELS[kernel].traffic.value


def test_a_rotation_that_scales_moves_what_the_engines_say():
    from megatron.core.models.common.embeddings import rope_utils

    angles = torch.empty(TOKENS, 1, 1, HIDDEN, device="meta")
    queries = bf16(TOKENS, 1, 128, HIDDEN)
    turned = rope_utils._apply_rotary_pos_emb_bshd
    passes = moved(lambda x: turned(x, angles, mscale=1.3), queries)
    fused_bytes = 2.0 * 2.0 * queries.numel()
    mean = sum(counted.nbytes for counted in passes) / 2.0 / fused_bytes
    assert mean == pytest.approx(traffic("scaled_rotary"), rel=0.01)
    graphs = load_engine("megatron-core-graphs").kernels
    assert graphs["scaled_rotary"].traffic.value == traffic("scaled_rotary")


@pytest.mark.parametrize(
    ("dtype", "forward_bytes", "backward_bytes"),
    [(torch.bfloat16, 12, 16), (torch.float32, 28, 40)],
    ids=["bf16", "fp32"],
)
def test_biases_of_experts_move_what_the_engine_says(dtype, forward_bytes, backward_bytes):
    """With the router's weights in fp32, twice the bytes are predicted: 24 and 32 of an element."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    outputs = bf16(EXPERTS * TOKENS, HIDDEN)
    weights = torch.empty(EXPERTS * TOKENS, 1, dtype=dtype, device="meta", requires_grad=True)
    biases = [bf16(HIDDEN) for _ in range(EXPERTS)]

    def add_biases(x, p, *b):
        return TEGroupedMLP._apply_bias(x, list(b), EXPERTS * [TOKENS], p)

    forward, backward = moved(add_biases, outputs, weights, *biases)
    per_element = [counted.nbytes / outputs.numel() for counted in (forward, backward)]
    assert per_element == pytest.approx([forward_bytes, backward_bytes], rel=0.02)
    predicted = [4.0 * traffic("expert_bias"), 2.0 * traffic("expert_bias_backward")]
    if dtype is torch.bfloat16:
        assert per_element == pytest.approx(predicted, rel=0.02)
    else:
        assert [2.0 * nbytes for nbytes in predicted] == pytest.approx(per_element, rel=0.21)


def test_limits_of_a_gate_move_what_the_engine_says(monkeypatch):
    from megatron.core.fusions import fused_bias_geglu as module

    class Activation:
        """Stands in for the fused kernel, so that the limits alone are counted."""

        @staticmethod
        def apply(inputs, *_):
            return inputs.view_as(inputs)

    monkeypatch.setattr(module, "WeightedQuickGeGLUFunction", Activation)
    inputs = bf16(TOKENS, 2 * HIDDEN)

    def limited(x):
        weights = torch.empty(TOKENS, 1, device="meta")
        return module.weighted_bias_quick_geglu_impl(x, None, weights, clamp_value=7.0)

    input_bytes = 2.0 * inputs.numel()
    forward, backward = (counted.nbytes / input_bytes for counted in moved(limited, inputs))
    # The fused kernel reads the input and writes half as much; backward it reads and writes inputs.
    assert (1.5 + forward) / 1.5 == pytest.approx(traffic("clamped_swiglu"), rel=0.02)
    assert (2.5 + backward) / 2.5 == pytest.approx(traffic("clamped_swiglu_backward"), rel=0.02)
