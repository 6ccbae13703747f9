"""Megatron-AxoNN copies around fused attention what its engine says, counted on torch itself."""

import pytest

from axonn_tune.io.presets import load_engine

torch = pytest.importorskip("torch")
dispatch = pytest.importorskip("torch.utils._python_dispatch")

TOKENS, SEQUENCES, HEADS, WIDTH = 8, 3, 4, 16
# Operations that write a new tensor with what they read.
COPIES = ("clone", "cat", "index_select", "index_add")


class Copies(dispatch.TorchDispatchMode):
    """Counts the bytes that copies read and write, over those of attention's output."""

    def __init__(self):
        super().__init__()
        self.passes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in COPIES:
            n_elements = TOKENS * SEQUENCES * HEADS * WIDTH
            self.passes[name] = self.passes.get(name, 0) + 2 * result.numel() / n_elements
        return result


class Attention(torch.autograd.Function):
    """Stands for the kernel: it takes and returns sequences in one piece."""

    @staticmethod
    def forward(ctx, q, k, v):
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(torch.empty_like(gradient) for _ in range(3))


def attend(mixed):
    """The lines of ParallelAttention.forward and FlashSelfAttention.forward (885d2e7)."""
    heads = mixed.view(TOKENS, SEQUENCES, HEADS, 3 * WIDTH)
    query, key, value = torch.split(heads, [WIDTH, WIDTH, WIDTH], dim=3)
    query = query.view(TOKENS, SEQUENCES, -1, WIDTH)
    key = key.repeat_interleave(1, dim=2)
    value = value.repeat_interleave(1, dim=2)
    ordered = [part.transpose(0, 1).contiguous() for part in (query, key, value)]
    packed = [part.reshape(SEQUENCES * TOKENS, HEADS, WIDTH) for part in ordered]
    context = Attention.apply(*packed).view(SEQUENCES, TOKENS, HEADS, WIDTH)
    return context.transpose(0, 1).reshape(TOKENS, SEQUENCES, HEADS * WIDTH).contiguous()


def test_attention_is_copied_as_the_engine_says():
    program = load_engine("axonn-sc24").axonn
    mixed = torch.randn(TOKENS, SEQUENCES, 3 * HEADS * WIDTH, requires_grad=True)
    with Copies() as forward:
        output = attend(mixed)
    with Copies() as backward:
        output.backward(torch.ones_like(output))
    assert sum(forward.passes.values()) == program.forward_copies.value
    assert sum(backward.passes.values()) == program.backward_copies.value
