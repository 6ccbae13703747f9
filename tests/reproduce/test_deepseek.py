"""The training of DeepSeek-V3, for which its makers state the hours of 2,048 H800."""

import pytest
from reproduced import words_of_page

from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.search.rank import rank_candidates
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.job import Job
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

PAGE = words_of_page("experts.md")
# DeepSeek-AI, arXiv 2412.19437: Table 1, sections 3.2 (layout), 3.3 (precision) and 4.2 (batch).
PUBLISHED_HOURS = 180_000
N_GPUS, GLOBAL_BATCH, SEQ_LEN = 2048, 15_360, 4096
# Sections 3.2.3 and 3.3.3: norms, up-projections and the output of SwiGLU are recomputed.
RECOMPUTED = "selective:layernorm,mla_up_proj,moe_act"
LAYOUT = {"tensor": 1, "context": 1, "pipeline": 16, "data": 128, "expert": 64}


def predicted_step(recompute, engine="megatron-core", **options):
    """The step of the published layout; a micro-batch of 1 is assumed."""
    strategy = megatron_of(
        load_engine(engine),
        n_virtual=(1,),
        has_experts=True,
        sends_once=True,
        overlaps_experts=True,
        **options,
    )
    job = Job(N_GPUS, GLOBAL_BATCH, SEQ_LEN, precision="fp8-block", moments="bf16", mtp_modules=1)
    scenario = Scenario(load_model("deepseek-v3"), job, load_machine("h800"), strategy)
    constraints = Constraints(LAYOUT, micro_batch=1)
    search = Search(scenario, constraints, (recompute,), include_oom=True)
    return rank_candidates(search).prediction(0)


def hours(recompute, **options):
    """GPU-hours for a trillion tokens."""
    steps = 1e12 / (GLOBAL_BATCH * SEQ_LEN)
    return steps * predicted_step(recompute, **options).step_seconds * N_GPUS / 3600


def test_the_hours_for_a_trillion_tokens_are_met():
    """Exchange beside another micro-batch stands for DualPipe."""
    predicted = hours("none")
    assert predicted == pytest.approx(PUBLISHED_HOURS, rel=0.1)
    assert f"{predicted / 1000:.0f} thousand GPU-hours are predicted, and 180 thousand" in PAGE


def test_the_hours_are_near_with_its_own_schedule_and_recomputation():
    """DualPipe, and what the report says is recomputed; nothing is fitted to it.

    The time of the casts between its formats is not predicted. Its router sends a token to four
    nodes at most (section 2.1.2), so that little of an exchange is left that nothing hides.
    """
    predicted = hours(RECOMPUTED, schedule="dualpipe")
    assert predicted == pytest.approx(PUBLISHED_HOURS, rel=0.21)
    assert f"as DualPipe with what it recomputes, {predicted / 1000:.0f} thousand" in PAGE
    with_its_facts = hours(RECOMPUTED, engine="hai-llm", schedule="dualpipe")
    assert with_its_facts == pytest.approx(PUBLISHED_HOURS, rel=0.21)


def test_it_fits_as_it_did():
    """The report trains without tensor parallelism (section 3.2) on GPUs of 80 GiB."""
    own = predicted_step(RECOMPUTED, engine="hai-llm", schedule="dualpipe")
    other = predicted_step(RECOMPUTED, schedule="dualpipe")
    assert own.memory_bytes < 80 * 2**30 < other.memory_bytes
    assert f"{own.memory_bytes / 2**30:.0f} GiB are predicted with `--engine hai-llm`" in PAGE
    with_both = predicted_step(RECOMPUTED, engine="hai-llm", schedule="dualpipe", low_weights=False)
    both_gib = with_both.memory_bytes / 2**30
    assert both_gib < 80
    assert f"(`--no-low-weights`) {both_gib:.0f} GiB are predicted" in PAGE
    assert f"With Megatron-Core's facts it is {other.memory_bytes / 2**30:.0f} GiB" in PAGE
    fewer = {
        term: (other.memory_terms_bytes[term] - own.memory_terms_bytes[term]) / 2**30
        for term in ("weights", "activations")
    }
    assert f"beside those in 8 bits ({fewer['weights']:.0f} GiB)" in PAGE
    assert f"in bf16 ({fewer['activations']:.0f} GiB)" in PAGE


def test_the_terms_of_its_memory_by_hand():
    """The rank of stages 1 and 14, which have four layers of experts each."""
    hidden, heads, inner, n_layers = 7168, 128, 2048, 8
    block = 1.0 + 4.0 / 128  # FP8 in blocks of 128, section 3.3.2
    routed = 256 * 3 * hidden * inner / 64
    attention = hidden * (1536 + 576) + 1536 * heads * 192 + 512 * heads * 256
    attention += heads * 128 * hidden
    matrices = routed + 3 * hidden * inner + attention
    others = 256 * hidden + 2 * hidden + 1536 + 512
    terms = predicted_step(RECOMPUTED, engine="hai-llm", schedule="dualpipe").memory_terms_bytes
    assert terms["weights"] == pytest.approx(n_layers * (matrices * 2 * block + others * 2))
    # Two copies of the parameters (table 2), whose gradients are summed in fp32 (3.3.3).
    assert terms["gradients"] == pytest.approx(n_layers * 4 * (matrices + others))
    # Moments in bf16, master weights in fp32, over 2 replicas of experts in each direction, or 128.
    shared = routed / 4 + (matrices - routed + others) / 256
    assert terms["optimizer_states"] == pytest.approx(n_layers * (2 + 2 + 4) * shared)
    # Inputs of two norms, latent vectors, attention's output in 12 bits; copies of a token in FP8,
    # with the inputs of SwiGLU (3.3.3), and the router. Norms, up-projections and the experts'
    # SwiGLU are formed again (3.2.3); what the shared expert's forms is kept.
    of_token = 2 * 2 * hidden + 2 * (1536 + 576) + (0.5 + block) * heads * 128
    of_token += 8 * (block * hidden + block * 2 * inner) + 4 * 256
    of_token += block * 2 * inner + 2 * inner
    # Table 2: PP + 1 chunks, of four layers each.
    assert terms["activations"] == pytest.approx(17 * 4 * SEQ_LEN * of_token)
