"""Train a GPT with AxoNN 0.2.0 on the grid of settings.json.

The ranks must have joined torch.distributed before `initialise` is called: AxoNN would otherwise
take the rank that MPI gives, which is not the one that the rank order of the grid asks for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from axonn import axonn as ax
from axonn.intra_layer import optimize_communication, overlap_communication, sync_gradients
from axonn_gpt import Stage, mean_loss_over_y
from pipeline import Neighbours, run_schedule
from torch import nn
from training import CLIP_NORM, DTYPES, joined, load_settings, parse_arguments, train


def initialise(settings: SimpleNamespace) -> None:
    """Form AxoNN's groups: G_x is the column group, G_y the row group, G_z the depth group."""
    layout = settings.layout
    ax.init(
        G_inter=layout.pipeline,
        G_data=layout.data,
        G_intra_r=layout.y,
        G_intra_c=layout.x,
        G_intra_d=layout.z,
    )


@contextmanager
def overlapped(
    settings: SimpleNamespace, model: nn.Module, gathers_ahead: bool = True
) -> Iterator[None]:
    """Do what is inside with the overlaps that the prediction assumed.

    Gradients are complete at the end. Gathers ahead follow one forward pass.
    """
    overlap = settings.overlap
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    with optimize_communication(
        overlap_all_reduce=overlap.oar,
        overlap_reduce_scatter=overlap.ors,
        overlap_all_gather=overlap.oag and gathers_ahead,
        model_object_for_overlapping_allgathers=model,
    ):
        yield
        # Selective recomputation lets torch save weights as other objects, to which AxoNN would
        # add the gradients.
        for pending in overlap_communication.pending_grad_accumulations:
            pending[0] = parameters[pending[0].data_ptr()]


class MixedAdamW:
    """AdamW on fp32 copies of the parameters, with gradients that are summed in fp32.

    The sums are the attribute `main_grad` of each parameter.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._model = model
        self._parameters = list(model.parameters())
        self._masters = []
        for parameter in self._parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            self._masters.append(nn.Parameter(parameter.detach().float().clone()))
        self._adamw = torch.optim.AdamW(self._masters, lr=lr)

    def add_gradients(self) -> None:
        """Add the gradients of a micro-step to the sums."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.main_grad += parameter.grad
                parameter.grad = None

    def step(self) -> None:
        """Sum the gradients over ranks, clip them, and update the weights."""
        sync_gradients(self._model, gradient_attr_name="main_grad", expert_mode=True)
        if self._model.shared_by_ends is not None:
            add_gradient_of_other_end(self._model.shared_by_ends.main_grad)
        scale = CLIP_NORM / self._norm().clamp(min=CLIP_NORM)
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = parameter.main_grad.mul_(scale)
        self._adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)
                parameter.main_grad.zero_()

    def _norm(self) -> torch.Tensor:
        """Return the norm of the whole gradient: squares of copies count in equal parts."""
        squares = []
        for parameter in self._parameters:
            group = parameter.process_group_for_norm_reduction
            n_copies = ax.config.G_intra * ax.config.G_data / dist.get_world_size(group)
            if parameter is self._model.shared_by_ends:
                n_copies *= 2
            squares.append(parameter.main_grad.square().sum() / n_copies)
        total = torch.stack(squares).sum()
        dist.all_reduce(total)
        return total.sqrt()


def pipeline_ranks() -> list[int]:
    """Return the ranks of the stages of this rank's pipeline, in order."""
    config = ax.config
    first = config.data_parallel_rank * config.G_inter * config.G_intra
    first += config.intra_layer_parallel_rank
    return [first + stage * config.G_intra for stage in range(config.G_inter)]


def add_gradient_of_other_end(gradient: torch.Tensor) -> None:
    """Sum the gradients of a matrix that the first and the last stage share."""
    ranks = pipeline_ranks()
    other = ranks[-1] if dist.get_rank() == ranks[0] else ranks[0]
    received = torch.empty_like(gradient)
    operations = [
        dist.P2POp(dist.isend, gradient, other),
        dist.P2POp(dist.irecv, received, other),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient += received


def stage_blocks(n_layers: int, n_stages: int, stage: int) -> range:
    """Return the blocks of a stage; embedding and head count as blocks if layers do not divide."""
    n_ends = 0 if n_layers % n_stages == 0 else 1
    size = (n_layers + 2 * n_ends) // n_stages
    first = stage * size - n_ends
    return range(max(first, 0), min(first + size, n_layers))


def run(
    settings: SimpleNamespace, arguments: argparse.Namespace, device: torch.device
) -> list[float]:
    """Train in the process group that exists, and return the losses."""
    initialise(settings)
    config, layout = ax.config, settings.layout
    stage, n_stages = config.inter_layer_parallel_rank, layout.pipeline
    blocks = stage_blocks(settings.model.n_layers, n_stages, stage)
    dtype = DTYPES[settings.dtype]
    model = Stage(settings, blocks, is_first=stage == 0, is_last=stage == n_stages - 1)
    model = model.to(device, dtype)
    optimizer = MixedAdamW(model, arguments.lr)
    width = settings.model.hidden_size // layout.x
    shape = (settings.micro_batch, settings.seq_len, width)
    stream = torch.empty(shape, dtype=dtype, device=device)
    neighbours = Neighbours(pipeline_ranks(), like=stream)
    n_shares = layout.z * layout.data
    share = config.data_parallel_rank * layout.z + config.intra_layer_depth_parallel_rank

    def train_step(texts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=device)

        def forward(number: int, stream: torch.Tensor | None) -> torch.Tensor:
            output = model(texts[number][:, :-1] if stream is None else stream)
            if not model.is_last:
                return output
            loss = mean_loss_over_y(output, texts[number][:, 1:]) / len(texts)
            total.add_(loss.detach())
            return loss / n_shares

        def forward_of_stage(number: int, stream: torch.Tensor | None) -> torch.Tensor:
            with overlapped(settings, model):
                return forward(number, stream)

        def backward_of_stage(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
            with overlapped(settings, model, gathers_ahead=False):
                output.backward(gradient)
            optimizer.add_gradients()

        if n_stages > 1:
            run_schedule(neighbours, len(texts), forward_of_stage, backward_of_stage)
        else:
            for number in range(len(texts)):
                with overlapped(settings, model):
                    forward(number, None).backward()
                optimizer.add_gradients()
        optimizer.step()
        return total * n_stages

    return train(settings, arguments, device, share, n_shares, train_step)


if __name__ == "__main__":
    given = parse_arguments("Train a GPT with AxoNN.")
    with joined() as own_device:
        run(load_settings(), given, own_device)
