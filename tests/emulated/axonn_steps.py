"""On every rank: train a GPT whose linear layers are AxoNN's; rank 0 prints predicted and measured.

AxoNN has no embedding, norm, attention or loss for a split hidden dimension, so that those of the
runtime stand around its layers. AxoNN's collectives go through the runtime's own, which calibration
measured, since gloo's exchange does not use a slow link in both directions at once.
"""

import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from engines.axonn_on_cpu import groups_of, launched, replace_cuda_calls

from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.trainer import RandomTokens
from axonn_tune.runtime.ranks.collectives import issuer_of
from axonn_tune.runtime.ranks.session import joined, place_in_job
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import parse_layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.axonn4d import Axonn4D

BATCH = 8
N_WARM_UP, N_STEPS = 1, 3


class RuntimeCollectives:
    """The functions of torch.distributed that AxoNN calls, carried out by the runtime's issuers."""

    def __init__(self):
        self._issuers = {}

    def _issued(self, kind, group, async_op, *arguments):
        if dist.get_world_size(group) == 1:
            return None
        if group not in self._issuers:
            self._issuers[group] = issuer_of(group)
        pending = getattr(self._issuers[group], kind)(*arguments)
        if async_op:
            return pending
        pending.wait()
        return None

    def all_reduce(self, tensor, group=None, async_op=False):
        return self._issued("all_reduce", group, async_op, tensor, dist.ReduceOp.SUM)

    def all_gather_into_tensor(self, full, shard, group=None, async_op=False):
        return self._issued("all_gather", group, async_op, full, shard)

    def all_gather(self, parts, shard, group=None):
        full = torch.empty(len(parts) * shard.numel(), dtype=shard.dtype)
        self.all_gather_into_tensor(full, shard, group)
        for part, gathered in zip(parts, full.tensor_split(len(parts)), strict=True):
            part.copy_(gathered.view_as(part))

    def reduce_scatter_tensor(self, shard, full, group=None, async_op=False):
        return self._issued("reduce_scatter", group, async_op, shard, full)

    @contextmanager
    def in_place_of_torchs(self):
        """Let AxoNN's calls come here within this context."""
        names = ("all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor")
        with ExitStack() as patches:
            for name in names:
                patches.enter_context(patch.object(dist, name, getattr(self, name)))
            yield


def axonn_gpt(engine, spec):
    """The runtime's model with AxoNN's linear layers in place of its own."""
    from axonn import axonn
    from axonn.intra_layer import Linear

    class AxonnLinear(Linear):
        """A layer of AxoNN, called as the runtime's blocks call theirs."""

        def __init__(self, linear):
            super().__init__(
                linear.n_in,
                linear.n_out,
                transpose=linear.transposed,
                bias=linear.bias,
                expert_mode=True,
            )

        def forward(self, input, recipe=None):
            return super().forward(input)

    gpt = GPT(engine, spec)
    for block in gpt.blocks:
        for linear in spec.block_linears:
            setattr(block, linear.name, AxonnLinear(linear))
    gpt.head = AxonnLinear(spec.head)
    # AxoNN must know that Z splits the embedding, too.
    table = gpt.embedding.matrix.shard
    table.is_tensor_parallel = True
    table.process_group_for_norm_reduction = axonn.comm_handle.intra_layer_group
    return gpt


def measured_seconds(prediction):
    """Median time of a step on the slowest rank."""
    from axonn.intra_layer import clip_grad_norm_, sync_gradients

    scenario, configuration = prediction.scenario, prediction.configuration
    module = launched(prediction)
    with groups_of(module), RuntimeCollectives().in_place_of_torchs():
        mesh = Mesh(configuration.layout)
        model = axonn_gpt(Engine(mesh), scenario.model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        text = RandomTokens(scenario.model.vocab_size, scenario.job.seq_len)
        first = mesh.batch_index * configuration.micro_batch
        seconds = []
        for index in range(N_WARM_UP + N_STEPS):
            tokens = text.sequences(index, first, configuration.micro_batch, mesh.device)
            dist.barrier()
            start = time.perf_counter()
            with module["overlapped"](model):
                loss = model.loss(tokens[:, :-1], tokens[:, 1:], scenario.job.tokens)
                loss.backward()
            sync_gradients(model, expert_mode=True)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
        mesh.close()
    slowest = torch.tensor(seconds[N_WARM_UP:])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return median(slowest.tolist())


def scenario_of(machine, overlap, n_ranks):
    spec = replace(load_model("tiny"), tied_embeddings=False)
    job = Job(n_ranks, BATCH, spec.seq_len, dtype="fp32", overlap=Overlap(**overlap))
    return Scenario(spec, job, load_machine(machine), Axonn4D(engine=load_engine("axonn")))


def main(machine, overlap, grids):
    place, device = place_in_job(os.environ), torch.device("cpu")
    scenario = scenario_of(machine, overlap, place.n_ranks)
    replace_cuda_calls()
    with joined(place, device, 100.0):
        for grid in map(parse_layout, grids):
            micro_batch = BATCH // (grid.size("z") * grid.size("data"))
            prediction = predict(scenario, Configuration(grid, micro_batch=micro_batch))
            seconds = measured_seconds(prediction)
            if place.rank == 0:
                print(json.dumps([str(grid), prediction.step_seconds, seconds]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:])
