"""One training step of a small transformer under FSDP2, for ``axonn-tune rehearse --script``.

It runs under torchrun, too: ``torchrun --nproc-per-node 4 train_step.py`` trains for ten steps.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BATCH, SEQ_LEN, HIDDEN = 4, 512, 1024
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = nn.Sequential(
    *(nn.TransformerEncoderLayer(HIDDEN, 16, 4 * HIDDEN, 0.0, batch_first=True) for _ in range(4))
).to(device)
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


def step() -> None:
    """Train on one batch."""
    output = model(torch.randn(BATCH, SEQ_LEN, HIDDEN, device=device))
    output.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


if dist.get_backend() != "fake":
    for _ in range(10):
        step()
    dist.destroy_process_group()
