"""Measure what it costs to record the operations of a training step.

Run: python tests/benchmarks/runtime_recorder.py [--rounds 101]

The same step of one GPT on grid 1x1x2x1 is timed with the recorder on and off (as
`Engine(record=...)` sets it), including the start of the recorder and the list of operations at the
end; then one operation's record is timed alone.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from runtime_common import compared, header, in_turn, on_ranks, say

from axonn_tune.runtime import GPT, Engine, Mesh, Optimizer, RandomTokens, Trainer, grid_layout
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.model import Model

N_RANKS, MICRO_BATCH, N_RECORDED = 2, 2, 2000
SPEC = Model("small", n_layers=4, hidden_size=256, n_heads=8, vocab_size=2048, seq_len=128)


def microseconds_per_kernel() -> float:
    """Return the time to record an empty kernel and to take it as an `Operation` at the end."""
    recorder = Recorder(torch.device("cpu"))
    recorder.start_step()
    begin = time.perf_counter()
    for _ in range(N_RECORDED):
        with recorder.kernel("kernel", "gemm", flops=1.0):
            pass
    recorder.take_step()
    return 1e6 * (time.perf_counter() - begin) / N_RECORDED


def microseconds_per_collective() -> float:
    """Return the time that the record adds to a collective over 2 ranks."""
    tensor = torch.ones(1)
    taken = {}
    for active in (False, True):
        recorder = Recorder(torch.device("cpu"), active)
        recorder.start_step()
        dist.barrier()
        begin = time.process_time()
        for _ in range(N_RECORDED // 10):
            recorder.collective(
                "reduce", "all_reduce", 4.0, "z", lambda: dist.all_reduce(tensor, async_op=True)
            ).wait()
        recorder.take_step()
        taken[active] = time.process_time() - begin
    return 1e6 * (taken[True] - taken[False]) / (N_RECORDED // 10)


def measure(n_rounds: int) -> None:
    engine = Engine(Mesh(grid_layout(1, 1, N_RANKS, 1)))
    model = GPT(engine, SPEC)
    batches = RandomTokens(SPEC.vocab_size, SPEC.seq_len)
    trainer = Trainer(
        model, Optimizer(model, engine), batches, N_RANKS * MICRO_BATCH, micro_batch=MICRO_BATCH
    )

    def step(record: bool) -> None:
        engine.recorder.active = record
        trainer.step(0)

    step(record=True)
    n_operations = len(trainer.last_operations)
    timed = in_turn({"off": lambda: step(False), "on": lambda: step(True)}, n_rounds)
    say(header("off", "on"))
    say(compared(timed["on"], timed["off"]))
    for name, measured in (
        ("kernel", microseconds_per_kernel),
        ("collective (CPU time)", microseconds_per_collective),
    ):
        say(f"{name}: {statistics.median(measured() for _ in range(9)):.2f} µs each")
    say(f"{n_operations} operations in a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    on_ranks(N_RANKS, measure, parser.parse_args().rounds)


if __name__ == "__main__":
    main()
