"""The training of DeepSeek-V3, for which its makers state the hours of 2,048 H800."""

from pathlib import Path

import pytest

from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.search.rank import rank_candidates
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.job import Job
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron3d import megatron_of

PAGE = " ".join((Path(__file__).parents[2] / "docs/experts.md").read_text().split())
# DeepSeek-AI, arXiv 2412.19437: Table 1, sections 3.2 (layout), 3.3 (precision) and 4.2 (batch).
PUBLISHED_HOURS = 180_000
N_GPUS, GLOBAL_BATCH, SEQ_LEN = 2048, 15_360, 4096
LAYOUT = {"tensor": 1, "context": 1, "pipeline": 16, "data": 128, "expert": 64}


def test_the_hours_for_a_trillion_tokens_are_met():
    """Exchange beside another micro-batch stands for DualPipe; a micro-batch of 1 is assumed."""
    engine = load_engine("megatron-core")
    strategy = megatron_of(
        engine, n_virtual=(1,), has_experts=True, sends_once=True, overlaps_experts=True
    )
    job = Job(N_GPUS, GLOBAL_BATCH, SEQ_LEN, precision="fp8-block", moments="bf16", mtp_modules=1)
    scenario = Scenario(load_model("deepseek-v3"), job, load_machine("h800"), strategy)
    constraints = Constraints(LAYOUT, micro_batch=1)
    ranking = rank_candidates(Search(scenario, constraints, ("none",), include_oom=True))
    steps = 1e12 / (GLOBAL_BATCH * SEQ_LEN)
    hours = steps * ranking.prediction(0).step_seconds * N_GPUS / 3600
    assert hours == pytest.approx(PUBLISHED_HOURS, rel=0.1)
    assert f"{hours / 1000:.0f} thousand GPU-hours are predicted, and 180 thousand" in PAGE
