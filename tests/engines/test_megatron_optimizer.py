"""The fp32 gradients of Megatron-Core's optimizer: bytes that torch moves in its released code."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engines.traffic import Copies

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.job import Job
from axonn_tune.strategies.optimizer import Gradients, Optimizer, clip_and_update, states_of
from axonn_tune.strategies.program import HostProgram

pytest.importorskip("megatron.core")
# Importing the package warns of what it deprecates, and of packages that it does without.
pytestmark = pytest.mark.filterwarnings("ignore")
N_WEIGHTS = 4096


def copied_by(method, gradient_type):
    """Return the bytes of each weight that a method of Megatron-Core's optimizer copies."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params as Optimizer

    weight = torch.nn.Parameter(torch.zeros(N_WEIGHTS, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(N_WEIGHTS, dtype=gradient_type)
    main = torch.nn.Parameter(torch.zeros(N_WEIGHTS))
    optimizer = SimpleNamespace(
        float16_groups=[[weight]],
        fp32_from_float16_groups=[[main]],
        fp32_from_fp32_groups=[],
        _dummy_overflow_buf=None,
    )
    get = Optimizer._get_model_and_main_params_data_float16
    optimizer._get_model_and_main_params_data_float16 = lambda: get(optimizer)
    with Copies() as copies:
        getattr(Optimizer, method)(optimizer)
    return copies.nbytes / N_WEIGHTS


def planned(name, gradient_bytes):
    """Return the bytes of each weight that a kernel of the plan moves; 0 where there is none."""
    host = HostProgram()
    has_main = load_engine("megatron-core").megatron.has_main_gradients
    job, one = Job(1, 1, 8), np.ones(1)
    optimizer = Optimizer(states_of(job), has_main_gradients=has_main)
    clip_and_update(host, job, Gradients(one, one, one, gradient_bytes), {}, optimizer)
    return sum(float(op.nbytes[0]) for op in host.phase("end").operations if op.name == name)


@pytest.mark.parametrize(
    ("gradient_type", "gradient_bytes"), [(torch.bfloat16, 2.0), (torch.float32, 4.0)]
)
def test_gradients_are_copied_unless_they_are_in_fp32(gradient_type, gradient_bytes):
    copied = copied_by("_copy_model_grads_to_main_grads", gradient_type)
    assert copied == planned("gradient.main", gradient_bytes)


def test_updated_weights_are_copied_to_the_model():
    copied = copied_by("_copy_main_params_to_model_params", torch.float32)
    assert copied == planned("weights.main", 4.0)
