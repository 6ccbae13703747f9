"""Gradients of biases: which kernel forms them, and what it reads."""

import pytest
from build import number, plan_of

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of

MODEL = Model("gpt", 2, 1024, 8, 4096, 2048)
JOB = Job(n_gpus=8, global_batch=8, seq_len=2048)
# Bytes of the gradients of the outputs of a block's layers in bf16, all of them on one rank.
WHOLE = {"qkv": 3 * 1024, "proj": 1024, "up": 4096, "down": 1024}
OUTPUT_BYTES = {layer: 2 * 2048 * width for layer, width in WHOLE.items()}


def read_bytes(strategy, **sizes):
    """The bytes that the kernels of a block read, by layer; 0 where there is none."""
    found = {
        op.name.split(".")[1]: number(op.nbytes)
        for op in plan_of(strategy, MODEL, JOB, **sizes).operations
        if isinstance(op, MemoryBound) and op.name.endswith(".bias")
    }
    return {layer: found.get(layer, 0.0) for layer in OUTPUT_BYTES}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_bias_of_a_sum_is_added_to_the_tokens_that_a_rank_keeps(sequence_parallel):
    found = read_bytes(Megatron3D(sequence_parallel=sequence_parallel), tensor=4, data=2)
    own = 4 if sequence_parallel else 1
    assert found == {
        "qkv": OUTPUT_BYTES["qkv"] / 4,
        "proj": OUTPUT_BYTES["proj"] / own,
        "up": OUTPUT_BYTES["up"] / 4,
        "down": OUTPUT_BYTES["down"] / own,
    }


def test_a_product_may_form_the_gradient_of_the_bias_that_it_adds():
    engine = Engine(megatron=MegatronProgram(fuses_bias_gradient=True))
    usual, found = (read_bytes(s, data=8) for s in (Megatron3D(), Megatron3D(engine=engine)))
    assert usual == OUTPUT_BYTES
    assert found == {**OUTPUT_BYTES, "qkv": 0.0}


@pytest.mark.parametrize("name", ["megatron-core", "megatron-core-graphs", "nemo"])
def test_transformer_engine_fuses_it(name):
    assert read_bytes(megatron_of(load_engine(name)), data=8)["qkv"] == 0.0


@pytest.mark.parametrize("name", ["megatron-2022", "megatron-2023"])
def test_earlier_programs_do_not(name):
    assert read_bytes(megatron_of(load_engine(name)), data=8)["qkv"] == OUTPUT_BYTES["qkv"]


def test_axonn_reads_all_tokens():
    assert read_bytes(Axonn4D(), x=1, y=1, z=1, data=8) == OUTPUT_BYTES
