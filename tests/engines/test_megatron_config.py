"""Megatron-Core's own configuration refuses what `launch` refuses or avoids, and takes the rest."""

import warnings

import pytest

pytest.importorskip("megatron.core")
# Importing the package warns of what it deprecates, and of packages that it does without.
pytestmark = pytest.mark.filterwarnings("ignore")

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 1, "moe_router_pre_softmax": True}


def configuration(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            **{"add_bias_linear": False, **options},
        )


def test_a_single_expert_is_weighed_among_all():
    assert configuration(**EXPERTS).moe_router_pre_softmax
    with pytest.raises(ValueError, match="moe-router-pre-softmax when topk is 1"):
        configuration(**{**EXPERTS, "moe_router_pre_softmax": False})


def test_experts_with_biases_are_not_split():
    split = {**EXPERTS, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert configuration(**split).expert_tensor_parallel_size == 2
    with pytest.raises(AssertionError, match="Bias in Moe is only supported when ETP==1"):
        configuration(**split, add_bias_linear=True)


def test_experts_overlap_in_a_pipeline_with_virtual_stages_only():
    import torch

    options = {
        **EXPERTS,
        "overlap_moe_expert_parallel_comm": True,
        "moe_token_dispatcher_type": "alltoall",
        "expert_model_parallel_size": 2,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "pipeline_model_parallel_size": 2,
    }
    assert configuration(**options, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(AssertionError, match="must be specified when pipeline"):
        configuration(**options)
