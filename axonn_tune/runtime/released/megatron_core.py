"""Parallelism through Megatron-Core, by its local layers (without other packages).

Megatron-Core's optimizer and its norm of gradients ask for CUDA; torch's AdamW takes their place.
"""

from __future__ import annotations

import functools
import warnings
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.gpt import INITIAL_STD
from axonn_tune.runtime.axonn.optimizer import CLIP_NORM
from axonn_tune.runtime.native.trainer import RecordedTrainer, adamw
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.runtime.released.megatron_experts import (
    fields_of,
    layers_of,
    replace_compiled,
    replace_streams,
)
from axonn_tune.runtime.released.megatron_pipeline import OnDevice, train_stage
from axonn_tune.runtime.released.torch_calls import TorchCalls
from axonn_tune.runtime.request import RunRequest
from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.layout import EXPERT, Layout
from axonn_tune.spec.model import Model
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}


@functools.cache
def _replace_cuda_calls() -> None:
    """Let Megatron-Core allocate on a CPU in this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    replace_streams()
    replace_compiled()


def form_groups(layout: Layout) -> Any:
    """Form Megatron-Core's groups anew, neighbours along the tensor axis, and return their module.

    Nothing here draws random numbers in a layer, so that its tracker of CUDA's random numbers is
    the one that does nothing.
    """
    parallel_state = import_module("megatron.core.parallel_state")
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.size("tensor"),
        pipeline_model_parallel_size=layout.n_stages,
        expert_model_parallel_size=layout.size(EXPERT),
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    random = import_module("megatron.core.tensor_parallel.random")
    random.initialize_rng_tracker(inference_rng_tracker=True)
    return parallel_state


def config_of(spec: Model, layout: Layout) -> Any:
    """Return Megatron-Core's description of the layers of a model on a layout.

    Experts with tensor parallelism need sequence parallelism.

    Raises
    ------
    InputError
        Megatron-Core has no such norms, or no such biases, or the layers do not divide evenly.
    """
    tensor_size = layout.size("tensor")
    if spec.n_layers % layout.n_stages:
        raise InputError(
            f"model {spec.name}: n_layers is {spec.n_layers}; allowed to run on "
            f"{layout.n_stages} stages of Megatron-Core: a multiple of {layout.n_stages}"
        )
    require_choice(f"model {spec.name}", "proj_bias", str(spec.proj_bias), (str(spec.bias),))
    require_choice(f"model {spec.name}", "qk_norm", spec.qk_norm, ("", "head"))
    return import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=spec.n_layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.n_heads,
        num_query_groups=spec.n_kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn_hidden_size,
        normalization="RMSNorm" if spec.norm == "rms" else "LayerNorm",
        gated_linear_unit=spec.gated_mlp,
        activation_func=F.silu if spec.gated_mlp else functools.partial(F.gelu, approximate="tanh"),
        add_bias_linear=spec.bias,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=bool(spec.qk_norm),
        init_method_std=INITIAL_STD,
        tensor_model_parallel_size=tensor_size,
        pipeline_model_parallel_size=layout.n_stages,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=False,
        sequence_parallel=spec.experts is not None and tensor_size > 1,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="native",
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **{"bias_activation_fusion": False, **fields_of(spec, layout)},
    )


def parallel_gpt(request: RunRequest, device: torch.device) -> Any:
    """Return the model of this rank's stage within Megatron-Core's data parallelism.

    Gradients are summed in the end.
    """
    stages = import_module("megatron.core.parallel_state")
    spec = request.model
    config = config_of(spec, request.configuration.layout)
    torch.manual_seed(request.seed)
    model = import_module("megatron.core.models.gpt.gpt_model").GPTModel(
        config,
        layers_of(spec, config),
        vocab_size=spec.padded_vocab_size,
        max_sequence_length=spec.seq_len,
        pre_process=stages.is_pipeline_first_stage(),
        post_process=stages.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=spec.tied_embeddings,
        position_embedding_type=_POSITIONS[spec.position],
    )
    distributed = import_module("megatron.core.distributed")
    data_parallel = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return distributed.DistributedDataParallel(config, data_parallel, model.to(device))


class MegatronCoreTrainer(RecordedTrainer):
    """Trains Megatron-Core's GPT on `tensor` x `data` x `pipeline` ranks."""

    def __init__(self, request: RunRequest, device: torch.device) -> None:
        # It names the packages that it can do without, and calls what torch has replaced.
        for category in (UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        if device.type == "cpu":
            _replace_cuda_calls()
        layout = request.configuration.layout
        recorder = WaitRecorder(device)
        groups = form_groups(layout)
        share = groups.get_data_parallel_rank()
        super().__init__(recorder, request, device, layout.size("data"), share)
        self._is_pipelined = layout.n_stages > 1
        self._model_group = groups.get_model_parallel_group()
        self._tensor_group = groups.get_tensor_model_parallel_group()
        self._calls = TorchCalls(recorder, layout, Megatron3D().axes)
        with OnDevice(device):
            self._model = parallel_gpt(request, device)
        seq_len = request.job.seq_len
        self._positions = torch.arange(seq_len, device=device).unsqueeze(0)
        ahead = torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).triu(1)
        self._hidden = ahead.view(1, 1, seq_len, seq_len)
        self._parameters = list(self._model.parameters())
        self._adamw = adamw([weight] for weight in self._parameters)

    def train(self, texts: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        """Train on the micro-steps of this rank's share; return their mean loss and the norm."""
        model = self._model
        total = torch.zeros((), device=self._device)
        with self._calls.recorded():
            if self._is_pipelined:
                total = train_stage(model, self._forward, texts, self._device)
            else:
                for text in texts:
                    loss = self._forward(text).mean() / len(texts)
                    loss.backward()
                    total += loss.detach()
            import_module("megatron.core.distributed").finalize_model_grads([model])
            norm = self._clip()
        self._adamw.step()
        self._adamw.zero_grad()
        model.zero_grad_buffer()
        return total, norm.item()

    def _forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token, or what a stage before the last one hands on."""
        output: torch.Tensor = self._model(
            text[:, :-1], self._positions, self._hidden, labels=text[:, 1:]
        )
        return output

    @torch.no_grad()
    def _clip(self) -> torch.Tensor:
        """Clip the whole gradient, and return its norm before that."""
        is_first = dist.get_rank(self._tensor_group) == 0
        square = torch.zeros((), device=self._device)
        for weight in self._parameters:
            if is_first or getattr(weight, "tensor_model_parallel", False):
                square += weight.main_grad.square().sum()
        dist.all_reduce(square, group=self._model_group)
        norm = square.sqrt()
        for weight in self._parameters:
            weight.grad = weight.main_grad.mul_((CLIP_NORM / norm).clamp(max=1.0))
        return norm
