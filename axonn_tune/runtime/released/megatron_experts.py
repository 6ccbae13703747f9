"""Mixtures of experts in Megatron-Core, whose router here keeps all experts equally busy."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from copy import copy
from importlib import import_module
from typing import Any

import torch

from axonn_tune.errors import InputError
from axonn_tune.runtime.rehearsal.tape import as_one_kernel
from axonn_tune.spec.layout import EXPERT, Layout
from axonn_tune.spec.model import Model


class _HostStream:
    """Takes the place of a stream of CUDA on a CPU, where nothing runs beside the host."""

    def record_event(self) -> _HostStream:
        """Return an event, which has happened already."""
        return self

    def synchronize(self) -> None:
        """Wait for nothing."""


def replace_streams() -> None:
    """Let the dispatcher of tokens run on a CPU in this process."""
    cuda: Any = torch.cuda
    stream = _HostStream()
    cuda.current_stream = lambda: stream
    cuda.stream = lambda _: nullcontext()
    dispatchers: Any = import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatchers.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = stream
    dispatchers.maybe_move_tensor_to_cpu = _for_host
    # Without Transformer Engine, Megatron-Core 0.16 asks for a name that it does not define.
    utilities: Any = import_module("megatron.core.transformer.moe.moe_utils")
    utilities.te_general_gemm = getattr(utilities, "te_general_gemm", None)


def _for_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return a tensor of sizes as the host reads them: as a list where it asks for an array."""
    return tensor.tolist() if as_numpy and torch.is_tensor(tensor) else tensor


def replace_compiled() -> None:
    """Let kernels that Megatron-Core would compile run as they are written in this process."""
    for name in ("fused_bias_swiglu", "fused_cross_entropy"):
        module = vars(import_module(f"megatron.core.fusions.{name}"))
        for kernel, function in list(module.items()):
            if hasattr(function, "_torchdynamo_orig_callable"):
                module[kernel] = as_one_kernel(function._torchdynamo_orig_callable)


def fields_of(spec: Model, layout: Layout) -> dict[str, Any]:
    """Return what Megatron-Core's description of a model says of its experts."""
    experts = spec.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.n_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.hidden_size,
        "moe_shared_expert_intermediate_size": experts.shared_hidden_size or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_layer_freq": [int(block.has_experts) for block in spec.blocks],
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_enable_routing_replay": True,
        "bias_activation_fusion": spec.gated_mlp,
        "expert_model_parallel_size": layout.size(EXPERT),
        "expert_tensor_parallel_size": 1,
    }


def layers_of(spec: Model, config: Any) -> Any:
    """Return the layers of a model, whose routers choose all experts equally often."""
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    if spec.experts is None:
        return specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)
    block = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    block.layer_norm = _norm()
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _norm()
        if config.qk_layernorm:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = _norm()
        mixture = layer.submodules.mlp.submodules
        if hasattr(mixture, "router"):
            mixture.router = _even_router()
    return block


def _norm() -> Any:
    """Return the class of torch's norm, which Megatron-Core refuses with sequence parallelism.

    Megatron-Core sums the gradients of a weight over the tensor group if the weight says so.
    """
    torch_norm = import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
            plain = copy(config)
            plain.sequence_parallel = False
            norm: torch.nn.Module = torch_norm(plain, hidden_size, eps)
            for weight in norm.parameters():
                vars(weight)["sequence_parallel"] = config.sequence_parallel
            return norm

    return Norm


@functools.cache
def _even_router() -> Any:
    """Return a class of routers that choose experts in turn, and score them as Megatron-Core's."""
    base: Any = import_module("megatron.core.transformer.moe.router").TopKRouter
    replay = import_module("megatron.core.transformer.moe.router_replay").RouterReplayAction

    class EvenRouter(base):
        def routing(self, logits: torch.Tensor, padding_mask: Any = None) -> Any:
            n_tokens = logits.shape[0] * logits.shape[1]
            choice = even_choice(n_tokens, self.topk, self.config.num_moe_experts)
            self.router_replay.clear_indices()
            self.router_replay.set_target_indices(choice)
            self.router_replay.set_router_replay_action(replay.REPLAY_FORWARD)
            probabilities, _ = super().routing(logits, padding_mask)
            chosen = torch.zeros(n_tokens, self.config.num_moe_experts, dtype=torch.bool)
            return probabilities, chosen.scatter(1, choice, True)

    return EvenRouter


def even_choice(n_tokens: int, top_k: int, n_experts: int) -> torch.Tensor:
    """Return the experts of each token, shape (n, k): all experts take their turns.

    Raises
    ------
    InputError
        The experts cannot be equally busy.
    """
    if n_tokens * top_k % n_experts:
        raise InputError(
            f"{n_tokens} tokens of a micro-batch, {top_k} times each, do not keep {n_experts} "
            "experts equally busy; allowed: a multiple, by --seq-len or --micro-batch"
        )
    return torch.arange(n_tokens * top_k).view(n_tokens, top_k) % n_experts
