"""The runtime beside plain torch on one GPU: whole steps of a GPT with 1.3 billion parameters."""

import gc
import time

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from gpu.training import MODELS, SEQ_LEN, Training  # noqa: E402

from axonn_tune.runtime.axonn.trainer import RandomTokens  # noqa: E402
from axonn_tune.runtime.native.plain import PlainGPT  # noqa: E402
from axonn_tune.spec.model import Model  # noqa: E402

GPT3_XL = Model("gpt-1.3b", 24, 2048, 16, 50304, 2048)
BATCH, N_WARM_UP, N_TIMED = 8, 3, 3
MOST_RATIO = 1.1


def fastest(step, device):
    """The least time of some steps, after others."""
    times = []
    for _ in range(N_WARM_UP + N_TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return min(times[N_WARM_UP:])


def plain_step(spec, device, dtype, seq_len, micro_batch):
    """One step of plain torch: fp32 weights, products in bf16, clipping and a fused AdamW."""
    with device:
        model = PlainGPT(spec, "flash", "none").initialise(0)
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    text = RandomTokens(spec.vocab_size, seq_len).sequences(0, 0, BATCH, device)

    def step():
        for part in text.split(micro_batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
                logits = model(part[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
            (loss * micro_batch / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    return step


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_step_takes_about_as_long_as_one_of_plain_torch(alone, micro_batch, note):
    on_gpu = alone.type == "cuda"
    spec, seq_len = (GPT3_XL, 2048) if on_gpu else (MODELS["gpt"], SEQ_LEN)
    dtype = "bf16" if on_gpu else "fp32"
    seconds = {"plain": fastest(plain_step(spec, alone, dtype, seq_len, micro_batch), alone)}
    for record in (False, True):
        training = Training(spec, alone, dtype, BATCH, seq_len, micro_batch, record)
        name = "recorded" if record else "own"
        seconds[name] = fastest(lambda t=training: t.trainer.step(0), alone)
        del training
    flops = spec.model_flops(BATCH * seq_len, seq_len)
    note(
        micro_batch=micro_batch,
        ratio=seconds["own"] / seconds["plain"],
        own_tflops=1e-12 * flops / seconds["own"],
        **{f"{name}_s": value for name, value in seconds.items()},
    )
    assert not on_gpu or seconds["own"] <= MOST_RATIO * seconds["plain"]
