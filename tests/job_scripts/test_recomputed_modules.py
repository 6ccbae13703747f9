"""Megatron-LM is told to recompute single modules, or one line says why it cannot be."""

import pytest

import axonn_tune
from axonn_tune.errors import InputError

JOB = {
    "model": "deepseek-v2",
    "gpus": 64,
    "machine": "dgx-h100",
    "global_batch": 64,
    "strategy": "megatron",
    "grid": "data=16,pipeline=4,expert=16",
}
OVERLAPPED = {"recompute": "selective:moe", "overlaps_experts": True}


def test_megatron_gets_granularity_and_modules():
    files = axonn_tune.launch(**JOB, recompute="selective:moe_act,mla_up_proj")
    flags = " ".join("\n".join(files.values()).replace("\\\n", " ").split())
    assert "--recompute-granularity selective --recompute-modules mla_up_proj moe_act -" in flags


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "selective:moe_act", "precision": "fp8-delayed"}, "fp8-delayed; allowed"),
        (OVERLAPPED | {"virtual_stages": 1}, "allowed: none, selective, modules but moe"),
        (OVERLAPPED, "exchanges of experts need virtual stages in a pipeline"),  # of 60 layers
    ],
)
def test_what_megatron_core_refuses_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        axonn_tune.launch(**JOB, **options)
