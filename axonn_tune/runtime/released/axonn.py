"""AxoNN's 4D algorithm through AxoNN itself.

AxoNN has no norm, attention or loss for a split hidden dimension: those of the runtime stand around
the linear layers of its blocks, with the runtime's embedding. A head that does not share the
embedding's matrix is AxoNN's, too.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axonn_tune.runtime.axonn.engine import Engine
from axonn_tune.runtime.axonn.gpt import GPT
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.axonn.optimizer import BETAS, CLIP_NORM, LR, WEIGHT_DECAY
from axonn_tune.runtime.axonn.weights import Vector
from axonn_tune.runtime.native.trainer import RecordedTrainer
from axonn_tune.runtime.ranks.recorder import PendingCollective, Recorder
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.runtime.released.torch_calls import TorchCalls
from axonn_tune.runtime.request import RunRequest
from axonn_tune.spec.blocks import Linear
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import AXONN_AXES, Layout


@functools.cache
def replace_cuda_calls() -> None:
    """Let AxoNN, which must not have been imported before, train on a CPU in this process."""
    # AxoNN calls collectives by names that torch has replaced since.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = _await_collectives
    amp: Any = torch.amp
    amp.custom_fwd = partial(_for_cpu, torch.amp.custom_fwd)
    amp.custom_bwd = partial(_for_cpu, torch.amp.custom_bwd)
    distributed: Any = dist
    distributed.new_group = partial(_over_gloo, dist.new_group)
    layers: Any = import_module("axonn.intra_layer.fully_connected")
    layers.initialize_params = partial(layers.initialize_params, init_device="cpu")


def _await_collectives() -> None:
    """Wait for the collectives that AxoNN leaves to the synchronisation of the device."""
    for handle in import_module("axonn.intra_layer.overlap_communication").handles:
        handle.wait()


def _for_cpu(decorator: Any, *functions: Any, device_type: str) -> Any:
    return decorator(*functions, device_type="cpu")


def _over_gloo(new_group: Any, ranks: Any, backend: str) -> Any:
    return new_group(ranks=ranks, backend="gloo")


def form_groups(layout: Layout) -> Any:
    """Form AxoNN's groups, and return what holds them.

    G_x is AxoNN's column group, G_y its row group, and G_z its depth group.
    """
    axonn = import_module("axonn.axonn")
    axonn.init(
        G_data=layout.size("data"),
        G_intra_r=layout.size("y"),
        G_intra_c=layout.size("x"),
        G_intra_d=layout.size("z"),
    )
    return axonn.comm_handle


@contextmanager
def overlapped(model: nn.Module, overlap: Overlap) -> Iterator[None]:
    """Do what is inside with AxoNN's overlaps; the gradients are complete at the end."""
    intra_layer = import_module("axonn.intra_layer")
    communication = import_module("axonn.intra_layer.overlap_communication")
    parameters = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    with intra_layer.optimize_communication(
        overlap_all_reduce=overlap.oar,
        overlap_reduce_scatter=overlap.ors,
        overlap_all_gather=overlap.oag,
        model_object_for_overlapping_allgathers=model,
    ):
        yield
        # Recomputation lets torch save weights as other objects, to which AxoNN would add.
        for pending in communication.pending_grad_accumulations:
            pending[0] = parameters[pending[0].data_ptr()]


class _CollectivesOnly(Recorder):
    """Records the collectives of the runtime's layers together with those of AxoNN."""

    def __init__(self, device: torch.device, recorder: WaitRecorder) -> None:
        super().__init__(device, active=False)
        self._waits = recorder

    def collective(
        self,
        name: str,
        kind: str,
        nbytes: float,
        axis: str,
        issue: Callable[[], PendingCollective],
    ) -> PendingCollective:
        """Issue a collective and record it."""
        return self._waits.collective(name, kind, nbytes, axis, issue)


class _Layer(nn.Module):
    """A linear layer of AxoNN, which the runtime's blocks call as they call their own."""

    def __init__(self, linear: Linear, keep_gathered_weights: bool) -> None:
        super().__init__()
        self._keep = keep_gathered_weights
        self.layer = import_module("axonn.intra_layer").Linear(
            linear.n_in,
            linear.n_out,
            transpose=linear.transposed,
            bias=linear.bias,
            expert_mode=True,
        )
        if self.layer.bias is not None:
            # AxoNN 0.2.0 does not ask for this sum over Z itself (fully_connected.py).
            self.layer.bias.needs_gradient_sync = True

    def forward(self, input: torch.Tensor, recipe: object = None) -> torch.Tensor:
        """Map the input, whose columns are split over X, or over Y if the layer is transposed."""
        return self.layer(input, cache_weights_in_all_gather=self._keep)


def axonn_gpt(engine: Engine, request: RunRequest, groups: Any) -> GPT:
    """Return the runtime's model with AxoNN's linear layers in the place of its own."""
    spec = request.model
    job = request.job
    gpt = GPT(
        engine,
        spec,
        attention=job.attention,
        recompute=request.configuration.recompute,
        seed=request.seed,
    )
    torch.manual_seed(request.seed)
    for block in gpt.blocks:
        for linear in spec.block_linears:
            setattr(block, linear.name, _Layer(linear, job.keep_gathered_weights))
    if not spec.tied_embeddings:
        gpt.head = _Layer(spec.head, job.keep_gathered_weights)
    for module in gpt.modules():
        if isinstance(module, Vector):
            _spread(module.shard, groups.inner_intra_layer_parallel_group, summed_over_z=True)
    _spread(gpt.embedding.matrix.shard, groups.intra_layer_group, summed_over_z=False)
    return gpt


def _vectors(gpt: GPT) -> list[nn.Parameter]:
    """Return the gains, shifts and positions of the runtime's layers, and AxoNN's biases."""
    modules = list(gpt.modules())
    of_runtime = [module.shard for module in modules if isinstance(module, Vector)]
    layers = [module.layer for module in modules if isinstance(module, _Layer)]
    return of_runtime + [layer.bias for layer in layers if layer.bias is not None]


def _spread(parameter: Any, group: dist.ProcessGroup, summed_over_z: bool) -> None:
    """Tell AxoNN which ranks hold parts of a parameter, and whether Z must sum its gradient."""
    parameter.is_tensor_parallel = True
    parameter.process_group_for_norm_reduction = group
    parameter.needs_gradient_sync = summed_over_z


class AxonnTrainer(RecordedTrainer):
    """Trains a model whose blocks have AxoNN's linear layers."""

    def __init__(self, request: RunRequest, device: torch.device) -> None:
        job = request.job
        layout = request.configuration.layout
        if device.type == "cpu":
            replace_cuda_calls()
        groups = form_groups(layout)
        mesh = Mesh(layout, request.configuration.order, device)
        recorder = WaitRecorder(device)
        n_shares = mesh.size("z") * mesh.size("data")
        super().__init__(recorder, request, device, n_shares, mesh.batch_index)
        self._calls = TorchCalls(recorder, layout, AXONN_AXES)
        self._n_shares = n_shares
        self._n_counted = job.tokens
        self._overlap = job.overlap
        engine = Engine(
            mesh,
            job.dtype,
            job.overlap,
            job.keep_gathered_weights,
            kernel_tuning=False,
            recorder=_CollectivesOnly(device, recorder),
        )
        self._model = axonn_gpt(engine, request, groups)
        vectors = {id(vector) for vector in _vectors(self._model)}
        decays = [
            {"params": [weight], "weight_decay": 0.0 if id(weight) in vectors else WEIGHT_DECAY}
            for weight in self._model.parameters()
        ]
        self._adamw = torch.optim.AdamW(decays, lr=LR, betas=BETAS, fused=True)

    def train(self, texts: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Train on the micro-steps of this rank's share; return their mean loss and the norm."""
        intra_layer = import_module("axonn.intra_layer")
        model = self._model
        total = torch.zeros((), device=self._device)
        with self._calls.recorded():
            for text in texts:
                with overlapped(model, self._overlap):
                    loss = model.loss(text[:, :-1], text[:, 1:], self._n_counted)
                    loss.backward()
                total += loss.detach()
            intra_layer.sync_gradients(model, expert_mode=True)
            norm = intra_layer.clip_grad_norm_(model.parameters(), CLIP_NORM)
        self._adamw.step()
        self._adamw.zero_grad()
        return total * self._n_shares, norm.item()
