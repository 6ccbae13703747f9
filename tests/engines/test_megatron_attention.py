"""What Megatron-Core's latent attention keeps of its heads, as autograd saves it on a CPU."""

import pytest
import torch
from build import number, table_of
from torch import distributed
from worlds import llama

from axonn_tune.spec.blocks import LatentAttention
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

# Importing the package warns of what it deprecates, and of packages that it does without.
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS, HIDDEN, HEADS = 64, 128, 8
LATENT = LatentAttention(kv_rank=24, q_rank=48, content_dim=32, position_dim=16, value_dim=24)


class Attention(torch.autograd.Function):
    """Stands in for a fused kernel, which saves what it reads."""

    @staticmethod
    def forward(ctx, queries, keys, values):
        ctx.save_for_backward(queries, keys, values)
        return torch.empty(TOKENS, 1, HEADS * LATENT.value_dim, dtype=torch.bfloat16)


class CoreAttention(torch.nn.Module):
    def __init__(self, *_, **__):
        super().__init__()

    def forward(self, queries, keys, values, *_, **__):
        return Attention.apply(queries, keys, values)


@pytest.fixture
def attention(monkeypatch):
    """Megatron-Core's layer with its own products, alone in its groups."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import MLATransformerConfig, multi_latent_attention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp

    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        q_lora_rank=LATENT.q_rank,
        kv_lora_rank=LATENT.kv_rank,
        qk_head_dim=LATENT.content_dim,
        qk_pos_emb_head_dim=LATENT.position_dim,
        v_head_dim=LATENT.value_dim,
        rope_type="rope",
        apply_rope_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gradient_accumulation_fusion=False,
    )
    columns = ("q", "q_down", "q_up", "kv_down", "kv_up")
    submodules = multi_latent_attention.MLASelfAttentionSubmodules(
        **{f"linear_{name}_proj": ColumnParallelLinear for name in columns},
        linear_proj=RowParallelLinear,
        core_attention=CoreAttention,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    yield multi_latent_attention.MLASelfAttention(
        config, submodules, 1, attn_mask_type=AttnMaskType.causal
    )
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


@pytest.mark.parametrize("copies_heads", [True, False])
def test_latent_attention_keeps_what_its_values_are_a_part_of(attention, copies_heads, monkeypatch):
    """Without Megatron-Core's copies, values keep all that their product has formed."""
    if not copies_heads:
        monkeypatch.setattr(torch.Tensor, "contiguous", lambda tensor: tensor)
    saved = {}

    def save(tensor):
        if tensor.ndim == 4 and tensor.shape[2] == HEADS:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.ones(TOKENS, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        attention(tokens, None)
    assert len(saved) == 3
    assert sum(saved.values()) == planned_bytes(copies_heads)


def planned_bytes(copies_heads):
    """The bytes of queries, keys and values that a plan keeps."""
    model = llama(
        n_layers=1,
        hidden_size=HIDDEN,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        ffn_hidden_size=2 * HIDDEN,
        vocab_size=1024,
        seq_len=TOKENS,
        latent_attention=LATENT,
    )
    job = Job(n_gpus=1, global_batch=1, seq_len=TOKENS)
    strategy = Megatron3D(engine=Engine(megatron=MegatronProgram(copies_heads=copies_heads)))
    shapes = strategy.shapes(model, job, table_of(strategy))
    return number(shapes.up_projected_bytes - shapes.latent_bytes)
