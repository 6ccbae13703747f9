"""DeepSpeed's ZeRO-3 on CPUs over gloo, each collective of which is noted."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from engines.deepspeed_gpt import GPT
from engines.events import recorded
from engines.live_tensors import LiveTensors

from axonn_tune.runtime.released.deepspeed import import_deepspeed
from axonn_tune.spec.layout import grid_layout

PASSES = ("forward", "backward", "step")


@contextmanager
def recorded_deepspeed():
    """Import DeepSpeed, and yield a list that grows while this rank trains with it.

    DeepSpeed looks torch's functions up once in a process, so that all training of a process has
    one recorder.
    """
    import_deepspeed(torch.device("cpu"))
    with recorded(grid_layout(1, 1, dist.get_world_size(), 1), products=()) as events:
        yield events


def trained(
    spec,
    zero_settings,
    recompute,
    n_microsteps,
    n_steps,
    events,
    reentrant=False,
    has_activation=False,
):
    """Train on this rank; return for each micro-step what is recorded in each of `PASSES`."""
    engine, ids = started(spec, zero_settings, recompute, n_microsteps, reentrant, has_activation)
    events.clear()
    microsteps = []
    for _ in range(n_steps * n_microsteps):
        loss = engine(ids)
        forward = taken(events)
        engine.backward(loss)
        backward = taken(events)
        engine.step()
        microsteps.append(dict(zip(PASSES, (forward, backward, taken(events)), strict=True)))
    engine.destroy()
    return microsteps


def most_live_bytes(spec, zero_settings, recompute, n_steps, least_bytes):
    """Train on this rank; return the most bytes that the last step's passes made and held at once.

    Tensors of less than `least_bytes` do not count. The first step records the order of modules.
    """
    engine, ids = started(spec, zero_settings, recompute, 1, reentrant=True)
    for _ in range(n_steps - 1):
        engine.backward(engine(ids))
        engine.step()
    with LiveTensors(least_bytes) as live:
        engine.backward(engine(ids))
    engine.destroy()
    return live.most_bytes


def started(
    spec,
    zero_settings,
    recompute,
    n_microsteps,
    reentrant,
    has_activation=False,
    **further_settings,
):
    """Return DeepSpeed's engine around a model, and the tokens on which it trains."""
    import deepspeed

    torch.manual_seed(0)
    ids = torch.randint(spec.vocab_size, (1, spec.seq_len))
    model = GPT(spec, recompute, reentrant, has_activation)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": n_microsteps,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **zero_settings},
        "zero_allow_untested_optimizer": True,
        **further_settings,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine, ids


def taken(events):
    """Return what has been recorded, and forget it."""
    result = list(events)
    events.clear()
    return result
