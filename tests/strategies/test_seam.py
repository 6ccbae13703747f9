"""The seam between transformer and strategy, and what all strategies share at the end of a step."""

import ast
import inspect
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import numpy as np
import pytest

import axonn_tune.strategies
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import GRADIENTS_IN_FLIGHT, Collective, MemoryBound
from axonn_tune.strategies.axonn.communication import AxonnCommunication, gradients_awaited_by
from axonn_tune.strategies.communication import Communication
from axonn_tune.strategies.megatron.communication import MegatronCommunication
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.megatron.replicas import ReplicaCommunication
from axonn_tune.strategies.optimizer import (
    Gradients,
    Optimizer,
    States,
    clip_and_update,
    states_of,
)
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.transformer import Transformer
from axonn_tune.strategies.zero.communication import ZeroCommunication
from axonn_tune.strategies.zero.gathers import ZeroGathers
from axonn_tune.strategies.zero.zero import zeropp

MODEL = Model("m", n_layers=4, hidden_size=256, n_heads=8, vocab_size=1024, seq_len=128)
JOB = Job(16, 32, 128)
COMMUNICATIONS = (
    AxonnCommunication,
    MegatronCommunication,
    ReplicaCommunication,
    ZeroCommunication,
    ZeroGathers,
)


def public(names):
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_a_strategy_overrides_nothing_that_the_seam_does_not_list(communication):
    own_facts = {field.name for field in fields(communication)}
    assert public(vars(communication)) <= public(dir(Communication)) | own_facts


@pytest.mark.parametrize("communication", COMMUNICATIONS)
def test_a_strategy_keeps_the_signatures_of_the_seam(communication):
    for name in public(vars(communication)):
        declared = getattr(Communication, name, None)
        if inspect.isfunction(declared):
            overriding = inspect.signature(getattr(communication, name))
            assert list(overriding.parameters) == list(inspect.signature(declared).parameters)


def test_nothing_derives_from_the_transformer_and_it_names_no_strategy():
    folder = Path(axonn_tune.strategies.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert "Transformer" not in {getattr(base, "id", "") for base in node.bases}
    text = "".join((folder / name).read_text() for name in ("transformer.py", "block.py")).lower()
    assert not [name for name in ("axonn4d", "megatron3d", "zero.py") if name in text]


def test_every_decision_says_when_it_is_taken():
    for name in public(vars(Communication)):
        decision = getattr(Communication, name)
        if inspect.isfunction(decision):
            assert "alled" in decision.__doc__, name


def test_a_micro_step_stays_of_its_kind():
    strategy = zeropp()
    table = CandidateTable.single(
        Configuration(Layout({"secondary": 4, "across": 4})), strategy.axes
    )
    shapes = strategy.shapes(MODEL, JOB, table.executed("none", 1))
    usual, sync = (strategy.communication(shapes, sync) for sync in (False, True))
    with pytest.raises(FrozenInstanceError):
        usual.sync = True
    with pytest.raises(FrozenInstanceError):
        shapes.tokens = np.ones(1)

    def names(communication):
        phases = Transformer(shapes, communication).microstep("none")
        return [(op.name, op.__class__) for phase in phases for op in phase.operations]

    before = names(usual)
    assert names(sync) != before and names(usual) == before


def test_sequence_parallelism_splits_the_residual_stream_only():
    layout = Layout({"tensor": 4, "context": 1, "data": 4, "pipeline": 1})
    whole, split = (
        strategy.shapes(MODEL, JOB, CandidateTable.single(Configuration(layout), strategy.axes))
        for strategy in (Megatron3D(sequence_parallel=False), Megatron3D())
    )
    assert whole.residual_bytes == whole.stream_bytes == 128 * 256 * 2
    assert split.residual_bytes * 4 == split.stream_bytes == whole.stream_bytes
    assert split.mlp_bytes == whole.mlp_bytes
    assert split.linears["qkv"].input_bytes == whole.linears["qkv"].input_bytes


@pytest.mark.parametrize(
    ("n_in_flight", "awaited"),
    [
        (
            1,
            {
                "down": ("qkv", "head"),
                "up": ("down",),
                "proj": ("up",),
                "qkv": ("proj",),
                "embedding": ("qkv",),
            },
        ),
        (
            GRADIENTS_IN_FLIGHT,
            {
                "down": ("proj",),
                "up": ("qkv", "head"),
                "proj": ("down",),
                "qkv": ("up",),
                "embedding": ("proj",),
            },
        ),
    ],
)
def test_a_gradient_waits_for_one_that_makes_room(n_in_flight, awaited):
    """Gradients form in the order head, then down, up, proj, qkv a block, embedding."""
    assert gradients_awaited_by(n_in_flight) == awaited


@pytest.mark.parametrize(
    ("dtype", "update_bytes"),
    # Gradient, master copy and two moments read and written, weight written; or, without a master
    # copy, two moments and the weight read and written.
    [("bf16", 4 + 2 * 12 + 2), ("fp32", 4 + 2 * 8 + 2 * 4)],
)
@pytest.mark.parametrize("cleared", [10.0, 80.0])
def test_the_end_of_a_step_by_hand(dtype, update_bytes, cleared):
    host, job, owned = HostProgram(), replace(JOB, dtype=dtype), np.array([10.0])
    gradients = Gradients(owned, owned, np.array([cleared]), 4.0)
    clip_and_update(host, job, gradients, {"sum": "data"}, Optimizer(states_of(job)))
    norm, summed, clip, step = host.phase("end").operations
    assert (norm.name, norm.nbytes, norm.kernel) == ("gradient.norm", 40.0, "reduce")
    assert isinstance(summed, Collective) and (summed.nbytes, summed.axis) == (4.0, "data")
    assert isinstance(clip, MemoryBound) and clip.nbytes == 80.0 and clip.waits_for == ("sum",)
    assert step.name == "optimizer.step" and step.nbytes == 10 * update_bytes + 4 * cleared


@pytest.mark.parametrize(
    ("dtype", "gradient_bytes", "expected"),
    # Bytes that the copy to fp32, the kernel that undoes the scale, norm, clipping, and the update
    # with its three states read and write; the latter clears the gradient of 2 or 4 bytes.
    [
        ("fp16", 2.0, {"main": 2 + 4, "unscale": 8, "norm": 4, "clip": 8, "step": 28 + 2}),
        ("fp16", 4.0, {"unscale": 8, "norm": 4, "clip": 8, "step": 28 + 4}),
        ("bf16", 2.0, {"main": 2 + 4, "norm": 4, "clip": 8, "step": 28 + 2}),
        ("bf16", 4.0, {"norm": 4, "clip": 8, "step": 28 + 4}),
    ],
)
def test_main_gradients_and_weights_by_hand(dtype, gradient_bytes, expected):
    """Megatron-LM at 78a69eaf, optimizer.py, Float16OptimizerWithFloat16Params.step."""
    host, owned = HostProgram(), np.array([10.0])
    job = replace(JOB, dtype=dtype)
    optimizer = Optimizer(states_of(job), has_main_gradients=True)
    clip_and_update(host, job, Gradients(owned, owned, owned, gradient_bytes), {}, optimizer)
    *kernels, to_model = ((op.name, op.nbytes[0]) for op in host.phase("end").operations)
    names = [*(f"gradient.{name}" for name in [*expected][:-1]), "optimizer.step"]
    assert kernels == [(n, 10.0 * b) for n, b in zip(names, expected.values(), strict=True)]
    assert to_model == ("weights.main", 10.0 * (4 + 2))


@pytest.mark.parametrize(
    ("dtype", "states"), [("fp32", States(4.0, 0.0)), ("bf16", States(2.0, 2.0))]
)
def test_states_that_are_not_in_fp32_have_no_main_gradients(dtype, states):
    """Nor are there any where the weights themselves are in fp32."""

    def end_of_step(has_main_gradients):
        host, job, owned = HostProgram(), replace(JOB, dtype=dtype), np.array([10.0])
        optimizer = Optimizer(states, has_main_gradients=has_main_gradients)
        clip_and_update(host, job, Gradients(owned, owned, owned, 2.0), {}, optimizer)
        return [(op.name, op.nbytes[0]) for op in host.phase("end").operations]

    assert end_of_step(True) == end_of_step(False)
