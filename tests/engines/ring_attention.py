"""Prints the bytes that torch's attention of a shared sequence moves for each element, by pass.

It runs on the last of four ranks, whose process group sends nothing. Attention itself forms nothing
here, so that all kernels are those around it.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from traffic import stored_bytes, tensors

N_RANKS, HEADS, SEQ_LEN, HEAD_DIM = 4, 4, 64, 128
MESSAGES = {"all_gather_into_tensor": "all_gather", "all_to_all_single": "send_recv"}
# Views, and what marks the result of a message.
FREE = ("view", "split", "slice", "unsqueeze", "squeeze", "_wrap_tensor_autograd", "wait_tensor")


class Traffic(TorchDispatchMode):
    """Counts the bytes that kernels read and write, and those of full buffers of messages."""

    def __init__(self):
        super().__init__()
        self.kernels = 0
        self.messages = {kind: [0, 0] for kind in MESSAGES.values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        written = sum(map(stored_bytes, tensors(out)))
        if name in MESSAGES:
            number, nbytes = self.messages[MESSAGES[name]]
            self.messages[MESSAGES[name]] = [number + 1, nbytes + written]
        elif name == "zeros_like":
            self.kernels += written
        elif name not in FREE:
            self.kernels += written + sum(map(stored_bytes, tensors((args, kwargs))))
        return out


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def main():
    dist.init_process_group("fake", store=FakeStore(), rank=N_RANKS - 1, world_size=N_RANKS)
    whole, half = (1, HEADS, SEQ_LEN, HEAD_DIM), (1, HEADS, SEQ_LEN // 2, HEAD_DIM)
    query, key, value, output = (empty(*whole) for _ in range(4))
    logsumexp = empty(*whole[:-1], dtype=torch.float32)
    # On the last rank queries are always whole, and keys and values whole or halved.
    gradients = {shape: (empty(*whole), empty(*shape), empty(*shape)) for shape in (whole, half)}
    group = dist.group.WORLD
    with Traffic() as forward:
        _attention._templated_ring_attention(
            group, 2, lambda *_, **__: (output, logsumexp), query, key, value, is_causal=True
        )
    with Traffic() as backward:
        _attention._templated_ring_attention_backward(
            group,
            2,
            lambda key, **_: gradients[tuple(key.shape)],
            output,
            "grad_out",
            query,
            key,
            value,
            output,
            logsumexp,
            True,
        )
    n_elements = query.numel()
    print(
        json.dumps(
            {
                name: {
                    "kernels": counted.kernels / n_elements,
                    "messages": {
                        kind: [number, nbytes / n_elements]
                        for kind, (number, nbytes) in counted.messages.items()
                    },
                }
                for name, counted in (("forward", forward), ("backward", backward))
            }
        )
    )


if __name__ == "__main__":
    main()
