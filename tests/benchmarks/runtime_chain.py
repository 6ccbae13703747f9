"""Compare the 4D linear layer with the same collectives and products written out by hand.

Run: python tests/benchmarks/runtime_chain.py [--rounds 21] [--rows 512] [--grid 1x1x4x1]

A chain of two layers without bias, 1024 -> 4096 (normal) and 4096 -> 1024 (transposed), runs
forward and backward in fp32 on 4 ranks of one thread. `--rows` counts the whole batch, of which
each rank has 1 / (G_z * G_data). The plain version uses no autograd, keeps every buffer, and calls
blocking collectives as gloo offers them. Both sum the gradients over data.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from runtime_common import compared, header, in_turn, on_ranks, say

from axonn_tune.runtime import Engine, Linear4D, Mesh, grid_layout, parse_layout
from axonn_tune.runtime.ranks.collectives import wait
from axonn_tune.spec.layout import Layout

N_RANKS, HIDDEN, FFN = 4, 1024, 4096
GRIDS = [
    grid_layout(*sizes)
    for sizes in itertools.product((1, 2, 4), repeat=4)
    if grid_layout(*sizes).n_ranks == 4
]


def own_chain(
    mesh: Mesh, input: torch.Tensor, d_output: torch.Tensor
) -> tuple[Callable[[], None], list[Linear4D]]:
    engine = Engine(mesh)
    up = Linear4D(engine, HIDDEN, FFN, "up", bias=False)
    down = Linear4D(engine, FFN, HIDDEN, "down", bias=False, transposed=True)
    for layer in (up, down):
        layer.matrix.layout.initialise(layer.matrix.shard.data, mesh, layer.name, 0, 0.02)
        layer.matrix.gradient = torch.empty_like(layer.matrix.shard)  # as the optimizer does
    input = input.clone().requires_grad_()

    def step() -> None:
        engine.recorder.start_step()
        input.grad = None
        down(up(input)).backward(d_output)
        for layer in (up, down):
            wait(engine.collectives.all_reduce("gradient", layer.matrix.gradient, "data"))

    return step, [up, down]


class PlainLayer:
    """One layer's part of the algorithm, with buffers that are made once."""

    def __init__(self, mesh: Mesh, layer: Linear4D, n_rows: int) -> None:
        axes = (layer.input_axis, layer.output_axis, "z", "data")
        groups = (mesh.group(axis) if mesh.size(axis) > 1 else None for axis in axes)
        self.over_input, self.over_output, self.over_z, self.over_data = groups
        self.shard = layer.matrix.shard.detach()
        self.d_shard = torch.empty_like(self.shard)
        n_in, n_out = layer.matrix.block_shape
        self.weight = (
            self.shard.view(n_in, n_out) if self.over_z is None else torch.empty(n_in, n_out)
        )
        self.d_weight = (
            self.d_shard.view(n_in, n_out) if self.over_z is None else torch.empty(n_in, n_out)
        )
        self.output, self.d_input = torch.empty(n_rows, n_out), torch.empty(n_rows, n_in)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._gather()
        self.input = input
        torch.mm(input, self.weight, out=self.output)
        if self.over_input is not None:
            dist.all_reduce(self.output, group=self.over_input)
        return self.output

    def backward(self, d_output: torch.Tensor) -> torch.Tensor:
        self._gather()
        torch.mm(d_output, self.weight.t(), out=self.d_input)
        if self.over_output is not None:
            dist.all_reduce(self.d_input, group=self.over_output)
        torch.mm(self.input.t(), d_output, out=self.d_weight)
        if self.over_z is not None:
            dist.reduce_scatter_tensor(self.d_shard, self.d_weight.view(-1), group=self.over_z)
        return self.d_input

    def sum_over_data(self) -> None:
        if self.over_data is not None:
            dist.all_reduce(self.d_shard, group=self.over_data)

    def _gather(self) -> None:
        if self.over_z is not None:
            dist.all_gather_into_tensor(self.weight.view(-1), self.shard, group=self.over_z)


def measure(n_rounds: int, n_rows: int, grids: list[Layout]) -> None:
    say(f"{'grid':>10}{header('by hand', 'own')}")
    for grid in grids:
        mesh = Mesh(grid)
        rows = n_rows // (grid.size("z") * grid.size("data"))
        torch.manual_seed(mesh.batch_index)
        input = torch.randn(rows, HIDDEN // grid.size("x"))
        d_output = torch.randn(rows, HIDDEN // grid.size("x"))
        own_step, layers = own_chain(mesh, input, d_output)
        plain = [PlainLayer(mesh, layer, rows) for layer in layers]

        def plain_step(plain=plain, input=input, d_output=d_output) -> None:
            up, down = plain
            down.forward(up.forward(input))
            up.backward(down.backward(d_output))
            for layer in plain:
                layer.sum_over_data()

        timed = in_turn({"plain": plain_step, "own": own_step}, n_rounds)
        for layer, by_hand in zip(layers, plain, strict=True):
            torch.testing.assert_close(layer.matrix.gradient, by_hand.d_shard)
        say(f"{grid!s:>10}{compared(timed['own'], timed['plain'])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--grid", action="append", type=parse_layout)
    wanted = parser.parse_args()
    on_ranks(N_RANKS, measure, wanted.rounds, wanted.rows, wanted.grid or GRIDS)


if __name__ == "__main__":
    main()
