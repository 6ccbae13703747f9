"""FSDP2 as torchtitan uses it: every second product, messages in fp32, pools, tensor groups."""

from collections import Counter
from dataclasses import replace

import pytest
from build import collectives, group_size, memory_terms, number, operations, plan_of
from worlds import llama, machine_of, quantity

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine, load_model
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine, MemoryForm
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Gemm, MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.step.prediction import hardware_flops
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.switches import Switches
from axonn_tune.strategies.zero.zero import zero3

SIZES = {"n_layers": 4, "hidden_size": 256, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 1024}
MODEL = llama(**SIZES, ffn_hidden_size=512, seq_len=64)
GPT = Model("gpt", 4, 256, 8, 1024, 64)
JOB = Job(16, 16, 64)
PRODUCTS = ("query", "key", "value", "proj", "gate", "up", "down")
KEPT = {"query", "value", "gate", "down"}


def engine_with(**facts):
    return Engine(zero=ZeroProgram(is_fsdp2=True, **facts))


def products(plan):
    return {op.name: op for op in operations(plan.microstep) if isinstance(op, Gemm)}


def flops(plan):
    return sum(
        2.0 * number(op.m) * number(op.n) * number(op.k)
        for op in operations(plan.microstep)
        if isinstance(op, Gemm)
    )


def step(engine, recompute="none", job=JOB, **sizes):
    sizes = {"shard": 16, "replica": 1, **sizes}
    configuration = Configuration(Layout(sizes), micro_batch=1, recompute=recompute)
    return predict(Scenario(MODEL, job, machine_of(), zero3(engine)), configuration)


# Full recomputation ------------------------------------------------------------------------


def runs(plan):
    """Names of operations, with their repeats."""
    return Counter(op.name for op in operations(plan.microstep))


@pytest.mark.parametrize("layout", [{"shard": 16}, {"shard": 4, "tensor": 4}], ids=str)
@pytest.mark.parametrize("model", [MODEL, GPT], ids=lambda model: model.name)
def test_a_block_is_recomputed_up_to_the_input_of_its_last_product(model, layout):
    def plan(recomputes):
        engine = engine_with(splits_layers="tensor" in layout)
        engine = replace(engine, recomputes_last_product=recomputes)
        return plan_of(zero3(engine), model, JOB, recompute="full", **layout)

    whole, shorter = plan(True), plan(False)
    last = {"recompute.down.gemm", "recompute.residual2"}
    if "tensor" in layout:
        last.add("recompute.down.reduce_scatter")
    assert runs(whole) - runs(shorter) == dict.fromkeys(last, model.n_layers)
    assert not runs(shorter) - runs(whole)


@pytest.mark.parametrize(
    "name",
    ["fsdp2", "fsdp2-eager", "fms-fsdp", "kempnerforge", "llm-foundry"]
    + [f"torchtitan{end}" for end in ("", "-2025", "-2024", "-2024-eager")],
)
def test_engines_with_torchs_checkpoint_leave_out_the_last_product(name):
    def flops(engine):
        return hardware_flops(Scenario(MODEL, JOB, machine_of(), zero3(engine)), "full")

    last = 2 * JOB.global_batch * JOB.seq_len * MODEL.n_layers * 512 * MODEL.hidden_size
    assert flops(Engine()) - flops(load_engine(name)) == last


# Every second product ----------------------------------------------------------------------


def test_every_second_product_is_formed_again_and_no_attention():
    strategy = zero3(engine_with(recomputes_products=True))
    again = products(plan_of(strategy, MODEL, JOB, recompute="selective", shard=16))
    none = products(plan_of(strategy, MODEL, JOB, shard=16))
    recomputed = {name: op for name, op in again.items() if name.startswith("recompute.")}
    assert set(again) - set(none) == set(recomputed)
    columns = {name.split(".")[1]: number(op.n) for name, op in recomputed.items()}
    kv_width = MODEL.n_kv_heads * MODEL.head_dim
    assert columns == {"qkv": kv_width, "proj": 256, "up": 512}


def test_an_ungated_block_forms_keys_and_attentions_output_again():
    assert GPT.recomputed_shares() == pytest.approx(
        {"qkv": 1 / 3, "proj": 1.0, "up": 0.0, "down": 0.0}
    )


def test_recomputed_flops_are_those_of_the_plan():
    engine = engine_with(recomputes_products=True)
    plans = [
        plan_of(zero3(engine), MODEL, JOB, recompute=recompute, shard=16)
        for recompute in ("selective", "none")
    ]
    tokens = JOB.tokens / JOB.n_gpus
    extra = flops(plans[0]) - flops(plans[1])
    assert extra == pytest.approx(MODEL.recomputed_product_flops(tokens))
    selective = step(engine, "selective")
    ratio = selective.hardware_tflops_per_gpu / selective.tflops_per_gpu
    model_flops = MODEL.model_flops(JOB.tokens, JOB.seq_len)
    assert ratio == pytest.approx(1.0 + extra * JOB.n_gpus / model_flops)


def test_separate_products_are_the_same_products_with_sums_of_their_gradients():
    apart = plan_of(zero3(engine_with(separates_products=True)), MODEL, JOB, shard=16)
    together = plan_of(zero3(engine_with()), MODEL, JOB, shard=16)
    assert {name.split(".")[1] for name in products(apart)} == {*PRODUCTS, "head"}
    assert flops(apart) == pytest.approx(flops(together))
    sums = [op for op in operations(apart.microstep) if op.name.endswith(".input_gradient")]
    moved = Counter({op.name.split(".")[1]: number(op.nbytes) for op in sums})
    # Two sums of three gradients and one of two; each reads two tensors and writes one.
    stream = 64 * 256 * 2
    assert moved == {"qkv": 2 * 3 * stream, "up": 3 * stream}


# Messages ----------------------------------------------------------------------------------


def test_gradients_that_are_reduced_once_stay_whole_and_weights_do_not():
    always, once = (
        plan_of(zero3(engine_with(reduces_once=each)), MODEL, JOB, shard=8)
        for each in (False, True)
    )
    reductions, gathers = "reduce_scatter", "all_gather"

    def kinds(plan, part):
        return Counter(op.kind for op in collectives(plan, part))

    for part in (always.microstep, once.sync_microstep):
        assert kinds(once, part)[reductions] and kinds(once, part)[gathers]
    assert not kinds(once, once.microstep)[reductions]
    assert kinds(once, once.microstep)[gathers] == kinds(always, always.microstep)[gathers]


def test_whole_gradients_are_held_in_the_type_in_which_they_are_summed():
    def gathered(global_batch, **facts):
        job = Job(16, global_batch, 64)
        predicted = step(engine_with(reduced_element_bytes=4.0, **facts), job=job)
        return predicted.memory_terms_bytes["gathered_weights"]

    one_microstep, several = (
        gathered(batch, reduces_once=True) - gathered(batch) for batch in (16, 64)
    )
    assert one_microstep == pytest.approx(0.0, abs=1.0)
    # The last message of a micro-step before is not held beside them.
    assert several > 0.8 * 4.0 * MODEL.parameters


def test_each_product_sums_the_gradient_of_its_input():
    one, each = (
        plan_of(
            zero3(engine_with(splits_layers=True, scatters_by_product=by_product)),
            MODEL,
            JOB,
            shard=4,
            tensor=4,
        )
        for by_product in (False, True)
    )
    sums = [
        {
            op.name.split(".")[1]: (number(op.n_calls), number(op.nbytes))
            for op in collectives(plan, plan.microstep)
            if op.name.startswith("backward.") and op.kind == "reduce_scatter"
        }
        for plan in (one, each)
    ]
    ratios = {
        layer: tuple(
            after / before for before, after in zip(sums[0][layer], sums[1][layer], strict=True)
        )
        for layer in ("qkv", "up")
    }
    assert ratios == {"qkv": (3.0, 3.0), "up": (2.0, 2.0)}


def test_a_whole_embedding_and_all_logits_are_on_each_rank_of_a_tensor_group():
    split, whole = (
        plan_of(
            zero3(
                engine_with(splits_layers=True, gathers_logits=all_of, replicates_embedding=all_of)
            ),
            MODEL,
            JOB,
            shard=4,
            tensor=4,
        )
        for all_of in (False, True)
    )

    def sent(plan):
        return {op.name: number(op.nbytes) for op in collectives(plan, plan.microstep)}

    logits = 64 * MODEL.vocab_size
    assert sent(whole)["loss.logits.all_gather"] == 2.0 * logits
    gone = {"forward.embedding.sum", "loss.maximum.all_reduce", "loss.sum.all_reduce"}
    assert gone <= sent(split).keys() and not gone & sent(whole).keys()
    softmax = [
        next(number(op.nbytes) for op in operations(plan.microstep) if op.name == "loss.softmax")
        for plan in (split, whole)
    ]
    assert softmax[1] == 4.0 * softmax[0]
    rows = MODEL.vocab_size * MODEL.hidden_size
    gathered = [sent(plan)["forward.root.all_gather"] for plan in (split, whole)]
    assert gathered[1] - gathered[0] == pytest.approx(2.0 * rows * 3 / 4)


def test_gradients_in_fp32_double_their_messages_and_no_others():
    sent = []
    for engine in (engine_with(), engine_with(reduced_element_bytes=4.0)):
        plan = plan_of(zero3(engine), MODEL, JOB, shard=8, replica=2)
        parts = (plan.microstep, plan.sync_microstep)
        sent.append({op.name: number(op.nbytes) for op in collectives(plan, *parts)})
    for name, nbytes in sent[0].items():
        assert sent[1][name] == (2.0 if name.startswith("gradient.") else 1.0) * nbytes
    assert any(name.startswith("gradient.") for name in sent[0])


def test_a_last_block_that_stays_is_gathered_once():
    calls = []
    for keeps in (False, True):
        engine = engine_with(keeps_last_block=keeps)
        plan = plan_of(zero3(engine), MODEL, JOB, shard=16)
        gathers = [op for op in collectives(plan, plan.microstep) if op.kind == "all_gather"]
        calls.append(sum(number(op.nbytes) for op in gathers if op.name.startswith("backward.")))
    assert calls[1] == pytest.approx(calls[0] * 3 / 4)


# Memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "keeps_output"), [("-2024", False), ("-2024-eager", True)])
def test_what_is_reserved_is_the_sum_over_streams(name, keeps_output):
    """Llama 3 8B on 8 GPUs, two sequences on each, tensor by tensor at the loss."""
    model = load_model("llama3-8b")
    tokens, hidden, kv_width, ffn, vocabulary = 2 * 8192, 4096, 1024, 14336, 128256
    block = hidden * (2 * hidden + 2 * kv_width + 3 * ffn) + 2 * hidden
    root = 2 * vocabulary * hidden + hidden
    parameters = 32 * block + root
    # The input, query, value, attention's output, gate and, without a compiler, the block's last
    # product.
    widths = 3 * hidden + kv_width + ffn + keeps_output * hidden
    saved = 32 * tokens * widths * 2
    at_loss = 14 * tokens * vocabulary + 2 * (2 * tokens * hidden)
    rotations = 4 * 128 * 8192
    computing = rotations + 12 * parameters / 8 + saved + at_loss + 2 * (root + block)
    receiving, reducing = 2 * (root + block), 4 * parameters / 8
    engine = load_engine(f"torchtitan{name}")
    job = Job(8, 16, 8192)
    terms = memory_terms(zero3(engine), model, job, 2, "selective", shard=8)
    assert sum(terms.values()) == pytest.approx(computing + receiving + reducing, rel=1e-6)


def test_pools_hold_at_least_what_is_held_at_once():
    for recompute in ("none", "selective", "full"):
        held, reserved = (
            sum(memory_terms(zero3(engine), MODEL, JOB, 1, recompute, shard=16).values())
            for engine in (engine_with(), engine_with(reserves_by_stream=True))
        )
        assert held < reserved


# Tensor groups -----------------------------------------------------------------------------

SPLIT = engine_with(splits_layers=True)


def test_a_tensor_group_of_one_changes_nothing():
    whole, split = step(engine_with()), step(SPLIT, tensor=1)
    assert split.step_seconds == pytest.approx(whole.step_seconds)
    assert split.memory_terms_bytes == pytest.approx(whole.memory_terms_bytes)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_tensor_group_shares_products_weights_and_tokens(recompute):
    strategy = zero3(replace(SPLIT, zero=replace(SPLIT.zero, recomputes_products=True)))
    plans = [
        plan_of(strategy, MODEL, JOB, recompute=recompute, tensor=tensor, shard=4)
        for tensor in (1, 4)
    ]
    assert flops(plans[1]) == pytest.approx(flops(plans[0]) / 4)
    terms = [
        memory_terms(strategy, MODEL, JOB, 1, recompute, tensor=tensor, shard=4)
        for tensor in (1, 4)
    ]
    norms = 9 * 256
    assert terms[1]["weights"] == pytest.approx((terms[0]["weights"] - norms) / 4 + norms)
    assert terms[1]["activations"] < terms[0]["activations"]


# A job and a model whose peak is the loss, with 4096 tokens on each rank.
AT_LOSS = replace(JOB, global_batch=1024)
WORDY = replace(MODEL, vocab_size=8192)
STREAM = 4096 * 256 * 2


def terms_at_loss(engine, recompute, **sizes):
    return memory_terms(zero3(engine), WORDY, AT_LOSS, 64, recompute, **sizes)


def test_gathered_inputs_are_saved_whole():
    """Without recomputation a block keeps both norms' outputs of all tokens."""
    whole, split = (
        terms_at_loss(SPLIT, "none", tensor=tensor, shard=4)["activations"] for tensor in (1, 4)
    )
    gathered = MODEL.n_layers * 2 * STREAM
    assert split == pytest.approx(gathered + (whole - gathered) / 4)


def test_split_logits_have_bytes_of_their_own_beside_a_gathered_input():
    memory = MemoryForm(logit_bytes=quantity(14.0), split_logit_bytes=quantity(18.0))
    engine = replace(SPLIT, memory=memory)
    logits = 4096 * 8192
    for tensor, nbytes in ((1, 14.0), (4, 18.0)):
        terms = terms_at_loss(engine, "full", tensor=tensor, shard=4)
        assert terms["working_set"] == pytest.approx(nbytes * logits / tensor + STREAM)


def test_a_block_gathers_and_sums_its_tokens_at_each_pair_of_products():
    """Forward: two gathers and two sums; backward: two of each, and none of a kept input."""
    plan = plan_of(zero3(SPLIT), MODEL, JOB, tensor=4, shard=4)
    per_block = Counter(
        op.kind
        for op in collectives(plan, plan.microstep)
        if op.axis == "tensor" and op.name.split(".")[1] not in ("head", "embedding")
        if not op.name.startswith("loss.")
    )
    assert per_block == {"all_gather": 4 * 4, "reduce_scatter": 4 * 4}


def test_tokens_out_of_order_are_copied_with_each_message():
    orders = engine_with(splits_layers=True, orders_tokens=True)
    plans = [plan_of(zero3(engine), MODEL, JOB, tensor=4, shard=4) for engine in (SPLIT, orders)]
    counts = []
    for plan in plans:
        kernels = [op for op in operations(plan.microstep) if isinstance(op, MemoryBound)]
        counts.append(Counter(number(op.nbytes) for op in kernels if op.kernel == "copy"))
    added = counts[1] - counts[0]
    stream = 64 * 256 * 2
    # Eight messages in each of four blocks, and the head's input and its gradient.
    assert added == {2.0 * stream: 8 * 4 + 2}


def test_a_group_divides_what_it_splits():
    strategy = zero3(SPLIT)
    placements = Placements.of(
        [Layout({"tensor": 8, "shard": 2, "replica": 1})], axes=strategy.axes
    )
    broken = strategy.rejections(MODEL, JOB, placements)
    assert {reason for reason, rows in broken.items() if rows.any()} == {
        "KV heads not divisible by tensor"
    }


def test_an_engine_without_tensor_groups_has_no_such_axis():
    assert zero3(engine_with()).axes.names == ("shard", "replica")
    assert zero3(SPLIT).axes.names == ("tensor", "shard", "replica")


def test_a_message_has_elements_of_some_bytes():
    with pytest.raises(InputError, match="reduced_element_bytes is 0"):
        ZeroProgram(reduced_element_bytes=0.0)


def test_users_may_let_gradients_be_reduced_once():
    usual = strategy_named("zero3", Switches(), load_engine("fsdp2"))
    once = strategy_named("zero3", Switches(reduces_once=True), load_engine("fsdp2"))
    always = Switches(reduces_once=False)
    layout = {"shard": 16, "replica": 1}

    def gradients(strategy):
        return memory_terms(strategy, MODEL, Job(16, 64, 64), **layout)["gathered_weights"]

    whole = 2 * MODEL.parameters
    assert gradients(once) - gradients(usual) > 0.5 * whole
    assert strategy_named("zero3", always, load_engine("kempnerforge")).sharding == usual.sharding
    for name in ("deepspeed", "deepspeed-2021"):
        with pytest.raises(InputError, match="--reduces-once: an engine of FSDP2"):
            strategy_named("zero3", Switches(reduces_once=True), load_engine(name))


# Context parallelism -------------------------------------------------------------------------


def shared(memory=None, **facts):
    """FSDP2 in which ranks share sequences."""
    engine = replace(engine_with(context_kind="ring", **facts), memory=memory or MemoryForm())
    return zero3(engine, context_kind="ring")


# Bytes of the keys and values of the 16 tokens of a rank, if four share a sequence.
SHARED_BYTES = 2 * 16 * 2 * MODEL.n_kv_heads * MODEL.head_dim


@pytest.mark.parametrize("is_eager", [True, False], ids=["eager", "compiled"])
def test_ranks_that_share_a_sequence_share_states_and_the_work(is_eager):
    whole = plan_of(zero3(engine_with()), MODEL, JOB, shard=16)
    parts = plan_of(shared(runs_eagerly=is_eager), MODEL, JOB, context=4, shard=4)
    assert flops(parts) == pytest.approx(flops(whole) / 4)
    axes = {op.axis for op in collectives(parts, parts.microstep) if op.kind == "all_gather"}
    assert axes == {"context*shard", "context"}
    assert group_size(parts, "context*shard") == 16
    sent = [op for op in collectives(parts, parts.microstep) if op.axis == "context"]
    # Keys and values are gathered in both passes, unless a compiled block has kept them, and the
    # backward pass sends four sums of their gradients on, which take twice as many bytes.
    nbytes = Counter()
    for op in sent:
        nbytes[op.kind] += number(op.nbytes)
    gathered, passed_on = (1 + is_eager) * 4 * SHARED_BYTES, 4 * 2 * SHARED_BYTES
    assert nbytes == {
        "all_gather": MODEL.n_layers * gathered,
        "send_recv": MODEL.n_layers * passed_on,
    }


def test_keys_are_copied_for_each_of_their_queries_before_they_are_shared():
    def sent(**facts):
        plan = plan_of(shared(**facts), MODEL, JOB, context=4, shard=4)
        return sum(
            number(op.nbytes) for op in collectives(plan, plan.microstep) if op.axis == "context"
        )

    n_copies = MODEL.n_heads / MODEL.n_kv_heads
    assert sent(repeats_kv_heads=True) == n_copies * sent()


def test_shared_sequences_take_less_memory_and_buffers():
    # So much that the loss is when most is held.
    memory = MemoryForm(logit_bytes=quantity(1000.0))
    whole = memory_terms(shared(memory), MODEL, JOB, context=1, shard=16)
    parts = memory_terms(shared(memory), MODEL, JOB, context=4, shard=4)
    assert parts["weights"] == whole["weights"]
    assert parts["optimizer_states"] == whole["optimizer_states"]
    # A compiled block keeps the keys and values that it has gathered.
    kept = MODEL.n_layers * 4 * SHARED_BYTES
    assert parts["activations"] == pytest.approx(whole["activations"] / 4 + kept)
    alone = memory_terms(zero3(replace(engine_with(), memory=memory)), MODEL, JOB, shard=16)
    assert alone == pytest.approx(whole)


@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("n_ranks", [1, 4])
def test_a_table_of_rotations_is_as_long_as_the_sequence_and_is_restored_from_a_copy(
    n_ranks, n_stages
):
    def weights(nbytes):
        strategy = shared(MemoryForm(rotation_bytes=quantity(nbytes)), has_stages=True)
        sizes = {"context": n_ranks, "shard": 4 // n_ranks, "pipeline": n_stages}
        return memory_terms(strategy, MODEL, replace(JOB, n_gpus=4 * n_stages), **sizes)["weights"]

    # The table of a stage has no copy.
    n_tables = 2 if n_ranks > 1 and n_stages == 1 else 1
    assert weights(4.0) - weights(0.0) == n_tables * 4.0 * MODEL.head_dim * JOB.seq_len


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_a_compiled_stage_holds_gathered_keys_from_recomputation_to_attention(n_ranks):
    model, n_stages = replace(MODEL, seq_len=4096, ffn_hidden_size=4096), 2

    def working(context):
        strategy = shared(repeats_kv_heads=True, has_stages=True)
        job = Job(n_stages * 4, 16, 1024 * context)
        layout = {"context": context, "shard": 4 // context, "pipeline": n_stages}
        terms = memory_terms(strategy, model, job, recompute="full", **layout)
        return terms["working_set"]

    # The MLP's backward pass is when such a block needs most.
    gathered = n_ranks * 1024 * 2 * 2 * MODEL.n_heads * MODEL.head_dim
    assert working(n_ranks) - working(1) == pytest.approx(gathered)


def test_a_sequence_is_cut_into_two_chunks_for_each_rank():
    odd = replace(JOB, seq_len=36)
    placements = Placements.of(
        [Layout({"context": 8, "shard": 2, "replica": 1})], ["xyzd"], shared().axes
    )
    broken = shared().rejections(MODEL, odd, placements)
    assert broken["sequence not divisible by twice context"].all()


def test_engines_without_context_parallelism_say_so():
    ring = Switches(context_kind="ring")
    assert strategy_named("zero3", ring, load_engine("fsdp2")).context_kind == "ring"
    with pytest.raises(InputError, match="allowed with engine fsdp2: ring"):
        strategy_named("zero3", Switches(context_kind="ulysses"), load_engine("fsdp2"))
    with pytest.raises(InputError, match="engine deepspeed: ulysses"):
        strategy_named("zero3", ring, load_engine("deepspeed"))
    with pytest.raises(InputError, match="engine llm-foundry: none, or --strategy megatron"):
        strategy_named("zero3", ring, load_engine("llm-foundry"))


# Asynchronous tensor parallelism -------------------------------------------------------------


def test_products_do_not_wait_for_tokens_that_travel_beside_them():
    titan = load_engine("torchtitan-2025")
    sizes = {"tensor": 4, "shard": 4}
    usual, beside = (
        plan_of(zero3(titan, overlaps_tensor=overlaps), MODEL, JOB, **sizes)
        for overlaps in (False, True)
    )

    def waiting(plan):
        return {
            op.name for op in operations(plan.microstep) if isinstance(op, Gemm) and op.waits_for
        }

    def sent(plan):
        found = collectives(plan, plan.microstep)
        return sum(number(op.nbytes) for op in found if op.axis == "tensor")

    def copied(plan):
        copies = [op for op in operations(plan.microstep) if op.name.endswith(".copy")]
        return {op.name for op in copies if number(op.nbytes) > 0}

    assert sent(beside) == pytest.approx(sent(usual))
    hidden = {"forward.up.gemm", "backward.down.gemm_input"}
    assert not hidden & waiting(beside)
    gone = copied(usual) - copied(beside)
    assert {"forward.up.all_gather.copy", "forward.down.sum.copy"} <= gone
    assert "backward.up.sum.copy" in copied(beside)


def test_asynchronous_messages_need_copies_of_their_own():
    """A rank shows its tokens to the others, adds parts of sums, and orders several sequences."""
    strategy = zero3(load_engine("torchtitan-2025"), overlaps_tensor=True)
    stream = 64 * MODEL.hidden_size * 2

    def moved(recompute, micro_batch):
        job = Job(16, 16 * micro_batch, 64)
        sizes = {"tensor": 4, "shard": 4, "micro_batch": micro_batch}
        plan = plan_of(strategy, MODEL, job, recompute=recompute, **sizes)
        return {
            op.name: number(op.nbytes) / micro_batch
            for op in operations(plan.microstep)
            if isinstance(op, MemoryBound)
        }

    full = moved("full", 2)
    assert full["forward.up.all_gather.shard"] == full["backward.down.all_gather.shard"]
    assert full["forward.up.all_gather.shard"] == 2 * stream / 4
    assert full["forward.down.reduce_scatter.add"] == (1 + 1 / 4) * stream
    ordered = {name for name in full if name.endswith("all_gather.copy") and full[name] > 0}
    of_gradients = {"backward.down.all_gather.copy", "backward.proj.all_gather.copy"}
    for_weights = {"recompute.qkv.all_gather.copy", "recompute.up.all_gather.copy"}
    assert ordered == of_gradients | for_weights
    assert full["backward.down.all_gather.copy"] == 2 * stream
    assert moved("none", 2)["forward.up.all_gather.copy"] == 2 * stream
    assert moved("none", 1)["forward.up.all_gather.copy"] == 0.0


def test_what_every_second_product_takes_is_gathered_again_and_its_sums_are_not():
    for overlaps in (False, True):
        strategy = zero3(load_engine("torchtitan-2025"), overlaps_tensor=overlaps)
        plan = plan_of(strategy, MODEL, JOB, recompute="selective", tensor=4, shard=4)
        sent = {op.name for op in collectives(plan, plan.microstep) if op.axis == "tensor"}
        again = {name for name in sent if name.startswith("recompute.")}
        assert again == {"recompute.qkv.all_gather", "recompute.up.all_gather"}
        ops = operations(plan.microstep)
        behind = [op for op in ops if "recompute.qkv.all_gather" in op.waits_for]
        assert behind and not any(op.name.startswith("backward") for op in behind)


def test_asynchronous_messages_shorten_a_step():
    titan = load_engine("torchtitan-2025")
    layout = Layout({"tensor": 4, "shard": 4, "replica": 1})
    configuration = Configuration(layout, micro_batch=1, recompute="none")
    usual, beside = (
        predict(
            Scenario(MODEL, JOB, machine_of(), zero3(titan, overlaps_tensor=overlaps)),
            configuration,
        )
        for overlaps in (False, True)
    )
    assert beside.step_seconds < usual.step_seconds


def test_engines_that_split_no_layers_have_no_such_messages():
    with pytest.raises(InputError, match="engine fsdp2 splits no layers"):
        strategy_named("zero3", Switches(overlaps_tensor=True), load_engine("fsdp2"))


# Groups that share all states ----------------------------------------------------------------


def test_every_microstep_sums_over_the_replicas_where_nothing_says_otherwise():
    counts = []
    for facts in ({}, {"sums_replicas_each_step": True}):
        plan = plan_of(zero3(engine_with(**facts)), MODEL, JOB, shard=8, replica=2)
        parts = (plan.microstep, plan.sync_microstep)
        counts.append(
            [sum(op.kind == "all_reduce" for op in collectives(plan, part)) for part in parts]
        )
    (_, in_sync), each = counts
    assert counts[0][0] == 0 and in_sync > 0 and each == [in_sync, in_sync]


@pytest.mark.parametrize(
    ("element_bytes", "first", "later"),
    [(4.0, 1.0, 2.0), (None, 1.5, 1.5)],
    ids=["fp32", "bf16"],
)
def test_sums_over_replicas_stay_until_the_backward_pass_ends(element_bytes, first, later):
    """Bytes over those of fp32 shards, as torch 2.13 held them on four ranks (gloo)."""
    engine = engine_with(
        reduced_element_bytes=element_bytes, sums_replicas_each_step=True, reserves_by_stream=True
    )
    held = []
    for global_batch in (16, 64):
        job = replace(JOB, global_batch=global_batch)
        held.append(memory_terms(zero3(engine), MODEL, job, shard=8, replica=2)["gradients"])
    shards = memory_terms(zero3(engine), MODEL, JOB, shard=8, replica=2)["optimizer_states"] / 2.0
    assert [nbytes / shards for nbytes in held] == pytest.approx([first, later])


# The root -----------------------------------------------------------------------------------


def test_a_root_that_is_released_is_gathered_beside_the_last_block_for_the_head():
    again = zero3(engine_with(reshards_root=True, has_stages=True))
    plan = plan_of(again, MODEL, JOB, shard=16, pipeline=1)
    phases = {phase.name: phase.operations for phase in plan.microstep.phases}
    [message] = [op for op in phases["forward_last"] if op.name == "backward.root.all_gather"]
    [first] = [op for op in phases["embedding"] if op.name == "forward.root.all_gather"]
    assert number(message.nbytes) == number(first.nbytes)
    [copy] = [op for op in phases["head"] if op.name == "backward.root.copy"]
    assert copy.waits_for == (message.name,)
    named = [op.name for op in phases["head"]]
    assert named.index(copy.name) < named.index("backward.head.gemm_input")
    late = replace(JOB, overlap=replace(JOB.overlap, oag=False))
    plan = plan_of(again, MODEL, late, shard=16, pipeline=1)
    [head] = [phase for phase in plan.microstep.phases if phase.name == "head"]
    assert "backward.root.all_gather" in {op.name for op in head.operations}


def test_a_stage_keeps_its_root():
    def names(reshards_root):
        strategy = zero3(engine_with(reshards_root=reshards_root, has_stages=True))
        job = Job(16, 64, 64)
        stages = plan_of(strategy, MODEL, job, shard=4, pipeline=4).pipeline
        return [op.name for op in operations(stages.sync.forward, stages.sync.backward)]

    assert names(True) == names(False)


# Gathered keys and values ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recompute", "gathers"),
    [
        ("none", ["forward"]),
        ("selective", ["forward", "backward"]),
        ("full", ["forward", "recompute"]),
    ],
)
def test_keys_and_values_are_gathered_once_for_each_use_that_nothing_has_saved(recompute, gathers):
    strategy = zero3(load_engine("torchtitan"), context_kind="all_gather")
    sizes = {"context": 4, "shard": 4}
    plan = plan_of(strategy, MODEL, JOB, recompute=recompute, **sizes)
    sent = [op for op in collectives(plan, plan.microstep) if op.axis == "context"]
    names = Counter(op.name for op in sent)
    expected = {f"{chain}.attention.all_gather" for chain in gathers}
    assert set(names) == expected | {"backward.attention.reduce_scatter"}
    assert set(names.values()) == {MODEL.n_layers}
    whole = 2 * MODEL.n_kv_heads * MODEL.head_dim * JOB.seq_len * 2
    assert {(number(op.nbytes), number(op.n_calls)) for op in sent} == {(whole, 2)}
    kernels = [op.name for op in operations(plan.microstep) if ".attention" in op.name]
    assert not any(name.endswith((".order", ".join", ".sum")) for name in kernels)


def test_whole_keys_and_values_are_saved_where_nothing_gathers_them_again():
    """Both have as many tokens, so many that most is held before the last block's gradients."""
    titan, n_sequences = load_engine("torchtitan"), 256
    shared, whole = (
        memory_terms(
            zero3(titan, context_kind=kind),
            replace(MODEL, seq_len=seq_len),
            Job(16, 16 // n_ranks * n_sequences, seq_len),
            n_sequences,
            **{"shard": 16 // n_ranks, **({"context": n_ranks} if kind else {})},
        )["activations"]
        for kind, seq_len, n_ranks in (("all_gather", 64, 4), ("", 16, 1))
    )
    others = 3 / 4 * 2 * MODEL.n_kv_heads * MODEL.head_dim * 64 * 2
    assert shared - whole == pytest.approx(MODEL.n_layers * n_sequences * others)
