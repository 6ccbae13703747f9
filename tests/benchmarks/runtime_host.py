"""Compare the host's time for a layer with that of plain torch, where a GPU would be faster.

Run: python tests/benchmarks/runtime_host.py [--rounds 41]

A tiny model trains on one rank and one thread, forward and backward, without an optimizer. Its
kernels take next to no time, so what is measured is what Python, autograd and torch's dispatch take
for each layer: on a GPU, a step cannot be shorter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from axonn_tune.runtime import GPT, Engine, Optimizer
from axonn_tune.runtime.axonn.mesh import Alone
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.spec.model import Model

N_LAYERS, SEQ_LEN = 12, 16
GPT_LIKE = Model("gpt", N_LAYERS, 32, 4, 64, SEQ_LEN)
LLAMA_LIKE = replace(
    GPT_LIKE,
    name="llama",
    ffn_hidden_size=96,
    gated_mlp=True,
    norm="rms",
    position="rotary",
    bias=False,
    tied_embeddings=False,
)
Pass = Callable[[], object]


def own_pass(spec: Model, text: torch.Tensor, record: bool) -> Pass:
    engine = Engine(Alone(), kernel_tuning=False, record=record)
    model = GPT(engine, spec)
    Optimizer(model, engine)

    def both_ways() -> None:
        engine.recorder.start_step()
        model.loss(text[:, :-1], text[:, 1:], float(SEQ_LEN)).backward()

    return both_ways


def plain_pass(spec: Model, text: torch.Tensor) -> Pass:
    model = PlainGPT(spec, "flash", "none").initialise(0)

    def both_ways() -> None:
        logits = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        model.zero_grad()

    return both_ways


def layer_seconds(passes: dict[str, Pass], n_rounds: int) -> dict[str, float]:
    """Return the median time of each pass over the number of layers; the passes take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(n_rounds):
        for name, both_ways in passes.items():
            begin = time.thread_time()
            both_ways()
            seconds[name].append((time.thread_time() - begin) / N_LAYERS)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    n_rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)  # so that one thread's time is all of it
    print(f"{'model':>8}{'plain us':>10}{'own us':>10}{'ratio':>8}{'recorded':>10}")
    for spec in (GPT_LIKE, LLAMA_LIKE):
        text = torch.randint(0, spec.vocab_size, (1, SEQ_LEN + 1))
        passes = {
            "plain": plain_pass(spec, text),
            "own": own_pass(spec, text, record=False),
            "recorded": own_pass(spec, text, record=True),
        }
        layer_seconds(passes, 3)
        found = layer_seconds(passes, n_rounds)
        ratios = [found[name] / found["plain"] for name in ("own", "recorded")]
        print(
            f"{spec.name:>8}{1e6 * found['plain']:10.0f}{1e6 * found['own']:10.0f}"
            f"{ratios[0]:8.2f}{ratios[1]:10.2f}"
        )


if __name__ == "__main__":
    main()
