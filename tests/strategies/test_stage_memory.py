"""The memory of one stage of a pipeline agrees with that of the stages that may need most."""

import numpy as np
import pytest
from build import table_of
from worlds import small_llama

from axonn_tune.spec.job import Job
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.pipeline import neediest

STRATEGY = Megatron3D(n_virtual=(1,))
MODEL = small_llama(8)


@pytest.mark.parametrize("global_batch", [2, 64])
def test_a_stage_holds_as_many_micro_batches_as_stages_follow(global_batch):
    job = Job(8, global_batch, 512, "bf16")
    table = table_of(STRATEGY, tensor=2, pipeline=4)
    stages = [STRATEGY.stage_memory(MODEL, job, table, stage) for stage in range(4)]
    first = STRATEGY.first_stage_memory(MODEL, job, table)
    assert stages[0] == {term: pytest.approx(nbytes) for term, nbytes in first.items()}
    whole = STRATEGY.memory(MODEL, job, table)
    assert sum(neediest(stages).values()) == pytest.approx(sum(whole.values()))
    held = np.array([terms["activations"][0] for terms in stages[1:3]])
    n_held = np.minimum([3, 2], global_batch)
    assert held / held[0] == pytest.approx(n_held / n_held[0])
