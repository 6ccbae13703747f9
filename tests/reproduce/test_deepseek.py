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
# Sections 3.2.3 and 3.3.3: norms, up-projections and the output of SwiGLU are recomputed.
RECOMPUTED = "selective:layernorm,mla_up_proj,moe_act"
LAYOUT = {"tensor": 1, "context": 1, "pipeline": 16, "data": 128, "expert": 64}


def hours(recompute, **options):
    """GPU-hours for a trillion tokens; a micro-batch of 1 is assumed."""
    strategy = megatron_of(
        load_engine("megatron-core"),
        n_virtual=(1,),
        has_experts=True,
        sends_once=True,
        overlaps_experts=True,
        **options,
    )
    job = Job(N_GPUS, GLOBAL_BATCH, SEQ_LEN, precision="fp8-block", moments="bf16", mtp_modules=1)
    scenario = Scenario(load_model("deepseek-v3"), job, load_machine("h800"), strategy)
    constraints = Constraints(LAYOUT, micro_batch=1)
    ranking = rank_candidates(Search(scenario, constraints, (recompute,), include_oom=True))
    steps = 1e12 / (GLOBAL_BATCH * SEQ_LEN)
    return steps * ranking.prediction(0).step_seconds * N_GPUS / 3600


def test_the_hours_for_a_trillion_tokens_are_met():
    """Exchange beside another micro-batch stands for DualPipe."""
    predicted = hours("none")
    assert predicted == pytest.approx(PUBLISHED_HOURS, rel=0.1)
    assert f"{predicted / 1000:.0f} thousand GPU-hours are predicted, and 180 thousand" in PAGE


def test_the_hours_are_met_with_its_own_schedule_and_recomputation():
    """DualPipe, and what the report says is recomputed; nothing is fitted to it."""
    predicted = hours(RECOMPUTED, schedule="dualpipe")
    assert predicted == pytest.approx(PUBLISHED_HOURS, rel=0.05)
    assert f"as DualPipe with what it recomputes, {predicted / 1000:.0f} thousand" in PAGE
