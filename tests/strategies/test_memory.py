"""Memory of a rank against a list of its tensors, and against schedules played pass by pass."""

import math
from dataclasses import replace

import pytest
from build import memory_terms, number, table_of
from worlds import llama

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.engine import Engine, MemoryForm
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.model import Model
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of
from axonn_tune.strategies.zero.zero import zero3, zero_topo, zeropp

GPT = Model("gpt", n_layers=12, hidden_size=256, n_heads=8, vocab_size=1000, seq_len=128)
LLAMA = llama(
    n_layers=12,
    hidden_size=256,
    n_heads=8,
    n_kv_heads=4,
    head_dim=48,
    ffn_hidden_size=640,
    vocab_size=1500,
    seq_len=128,
    qkv_bias=True,
)
MODELS = pytest.mark.parametrize(
    "model",
    [
        GPT,
        LLAMA,
        replace(LLAMA, bias=True, qkv_bias=False),
        replace(LLAMA, bias=True, proj_bias=False),
        replace(GPT, norms_per_block=1),  # Falcon 7B
        replace(LLAMA, norms_per_block=4),  # Gemma
    ],
)
JOB = Job(n_gpus=64, global_batch=64, seq_len=128)
PIPELINED = Axonn4D(pipelined=True)
PLAIN = Megatron3D(False, False, False)
SHARDED = Megatron3D(True, True, True)


@pytest.mark.parametrize(
    ("dtype", "gradient_bytes", "main_bytes"), [("fp16", 2, 2), ("bf16", 4, 0)]
)
def test_an_optimizer_holds_gradients_in_fp32_where_the_sums_are_in_16_bits(
    dtype, gradient_bytes, main_bytes
):
    """They replace the sums when no activations are there, so that one of both counts."""
    strategy = replace(megatron_of(load_engine("megatron-2021")), n_virtual=(1,))
    job = Job(n_gpus=8, global_batch=8, seq_len=2, dtype=dtype)
    terms = memory_terms(strategy, replace(GPT, seq_len=2), job, data=8)
    n_weights = terms["weights"] / 2
    assert terms["gradients"] == gradient_bytes * n_weights
    working = terms["activations"] + terms["working_set"]
    assert working >= main_bytes * n_weights
    if main_bytes:
        assert working == main_bytes * n_weights
    job = replace(job, seq_len=2048)
    many = memory_terms(strategy, replace(GPT, seq_len=2048), job, data=8)
    assert many["activations"] > 2 * n_weights
    plain = replace(strategy, distributed_optimizer=True)
    assert (
        many["working_set"]
        == memory_terms(plain, replace(GPT, seq_len=2048), job, data=8)["working_set"]
    )


# A list of a stage's tensors ---------------------------------------------------------------------


def tensors(model, n_layers, first, last):
    """Elements of every tensor, with how it may be split.

    `matrix`: its elements; `stream`: along the residual stream; `wide`: along heads or MLP.
    """
    h, d = model.hidden_size, model.head_dim
    qkv = (model.n_heads + 2 * model.n_kv_heads) * d
    up = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
    vocabulary = math.ceil(model.vocab_size / 128) * 128
    norm = h * (2 if model.norm == "layer" else 1)
    block = [
        ("stream", norm),
        ("matrix", h * qkv),
        ("wide", qkv if model.qkv_bias else 0),
        ("matrix", model.n_heads * d * h),
        ("stream", h if model.proj_bias else 0),
        ("stream", norm),
        ("matrix", h * up),
        ("wide", up if model.bias else 0),
        ("matrix", model.ffn_hidden_size * h),
        ("stream", h if model.bias else 0),
    ]
    if model.norms_per_block == 1:  # Attention and MLP share the first norm.
        del block[5]
    if model.norms_per_block == 4:  # The outputs of both have a norm, too.
        block += [("stream", norm), ("stream", norm)]
    whole = block * n_layers
    if first:
        whole.append(("matrix", vocabulary * h))
        whole.append(("stream", model.seq_len * h if model.position == "learned" else 0))
    if last:
        whole.append(("stream", norm))
        if not (model.tied_embeddings and first):
            whole.append(("matrix", vocabulary * h))
    return whole


def stored(model, matrix, stream, wide, n_layers=None, first=True, last=True):
    """Return the elements that a rank stores where tensors are split over some numbers of ranks."""
    parts = {"matrix": matrix, "stream": stream, "wide": wide}
    n_layers = model.n_layers if n_layers is None else n_layers
    return sum(size / parts[how] for how, size in tensors(model, n_layers, first, last))


def adam_bytes(dtype):
    """Two fp32 moments, and an fp32 master copy of weights of fewer bytes."""
    return 8.0 if dtype == "fp32" else 12.0


def saved_elements(model, job, x=1, y=1, copies_queries=False):
    """Elements that a block saves for each token, and those that are cheap to form again.

    The residual stream is split over `x`, heads and MLP over `y`.
    """
    h, d = model.hidden_size, model.head_dim
    qkv = (model.n_heads + 2 * model.n_kv_heads) * d
    up = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
    kept = [
        h / x,  # the block's input, which the first norm needs
        qkv / y,  # q, k, v
        model.n_heads * d / y,  # what attention gives to the projection
        h / x,  # the residual stream after attention, which the second norm needs
        up / y,  # the input of the activation
    ]
    cheap = [
        h / x,  # the first norm's output
        h / x,  # the second norm's output
        model.ffn_hidden_size / y,  # the activation's output
    ]
    if model.norms_per_block == 1:  # The MLP reads the first norm's output.
        del kept[3], cheap[1]
    if model.norms_per_block == 4:
        kept += [h / x, h / x]  # the outputs of attention and MLP, which have norms of their own
    if copies_queries and model.n_kv_heads < model.n_heads:
        kept.append(model.n_heads * d / y)  # q without the keys and values between its groups
    if job.attention == "unfused":
        cheap.append(model.n_heads * job.seq_len / y)  # the softmax of a token's scores
    return sum(kept), sum(cheap)


def working_bytes(model, job, tokens, saved_share, x=1, y=1):
    """One block at work, or the logits in the job's dtype and in fp32."""
    element = 4.0 if job.dtype == "fp32" else 2.0
    kept, cheap = saved_elements(model, job, x, y)
    up = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
    gradients = (up + model.ffn_hidden_size) / y
    block = tokens * element * (kept + cheap - saved_share + gradients)
    return max(block, logit_bytes(model, tokens, y, element + 4.0))


def logit_bytes(model, tokens, y, each):
    """The logits of a rank's part of the vocabulary, padded to a multiple of 128."""
    return tokens * math.ceil(model.vocab_size / 128) * 128 / y * each


def megatron_working_bytes(model, job, tokens, split):
    """One block's gradients beside that of the residual stream, or the logits beside the head's.

    Those before and after the activation; or that before it, and the whole stream's, with which
    sequence parallelism gathers the whole input.
    """
    element = 4.0 if job.dtype == "fp32" else 2.0
    h, ffn = model.hidden_size, model.ffn_hidden_size
    up = ffn * (2 if model.gated_mlp else 1) / 4
    whole = h * (2 if split > 1 else 1)
    block = tokens * element * (h / split + up + max(ffn / 4, whole))
    saved_by_the_final_norm = 2 * h / split
    at_head = tokens * element * (whole + saved_by_the_final_norm)
    at_head += logit_bytes(model, tokens, 4, element)
    return max(block, at_head, logit_bytes(model, tokens, 4, element + 4.0))


DTYPES = pytest.mark.parametrize("dtype", ["bf16", "fp32"])


@MODELS
@DTYPES
@pytest.mark.parametrize("sharded", [False, True])
def test_states_of_the_4d_grid_are_its_tensors(model, dtype, sharded):
    """X, Y and Z split matrices, X and Y the vectors along them; data may split the states."""
    job = replace(JOB, dtype=dtype)
    terms = memory_terms(Axonn4D(sharded_optimizer=sharded), model, job, x=2, y=4, z=2, data=4)
    elements = stored(model, 16, 2, 4)
    element = 4.0 if dtype == "fp32" else 2.0
    assert terms["weights"] == pytest.approx(elements * element, rel=1e-12)
    assert terms["gradients"] == pytest.approx(elements * (4.0 + element), rel=1e-12)
    states = elements * adam_bytes(dtype) / (4 if sharded else 1)
    assert terms["optimizer_states"] == pytest.approx(states, rel=1e-12)


@MODELS
@DTYPES
@pytest.mark.parametrize("fp32_gradients", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_states_of_megatron_are_its_tensors(model, dtype, fp32_gradients, distributed):
    """Tensor parallelism splits matrices and the vectors along them; replicas the states."""
    strategy = replace(PLAIN, distributed_optimizer=distributed, fp32_gradients=fp32_gradients)
    job = replace(JOB, dtype=dtype)
    terms = memory_terms(strategy, model, job, tensor=4, context=2, data=8)
    elements = stored(model, 4, 1, 4)
    element = 4.0 if dtype == "fp32" else 2.0
    assert terms["weights"] == pytest.approx(elements * element, rel=1e-12)
    gradient = 4.0 if fp32_gradients else element
    assert terms["gradients"] == pytest.approx(elements * gradient, rel=1e-12)
    states = elements * adam_bytes(dtype) / (16 if distributed else 1)
    assert terms["optimizer_states"] == pytest.approx(states, rel=1e-12)


ZEROS = [
    (zero3(), {"shard": 1, "replica": 64}, (1, 1, 1), 0),
    (zero3(), {"shard": 2, "replica": 32}, (2, 2, 2), 0),
    (zero3(), {"shard": 64}, (64, 64, 64), 0),
    (zeropp(), {"secondary": 8, "across": 8}, (64, 64, 64), 8),
    (zeropp(secondary=False), {"secondary": 8, "across": 8}, (64, 64, 64), 0),
    (zero_topo(), {"weights": 2, "gradients": 4, "states": 8}, (2, 8, 64), 0),
]


@MODELS
@DTYPES
@pytest.mark.parametrize(("strategy", "sizes", "shards", "copy"), ZEROS)
def test_states_of_the_zero_family_are_its_tensors_in_shards(
    model, dtype, strategy, sizes, shards, copy
):
    job = replace(JOB, dtype=dtype)
    terms = memory_terms(strategy, model, job, **sizes)
    elements, element = stored(model, 1, 1, 1), 4.0 if dtype == "fp32" else 2.0
    weights = elements * element * (1 / shards[0] + (1 / copy if copy else 0))
    assert terms["weights"] == pytest.approx(weights, rel=1e-12)
    assert terms["gradients"] == pytest.approx(elements * element / shards[1], rel=1e-12)
    states = elements * adam_bytes(dtype) / shards[2]
    assert terms["optimizer_states"] == pytest.approx(states, rel=1e-12)
    # Two blocks, embedding, head and final norm: their gradients, and if they are sharded the
    # weights gathered for them.
    block = stored(model, 1, 1, 1, 1, False, False)
    at_once = (2 * block + stored(model, 1, 1, 1, 0)) * element
    copies = 2 if shards[0] > 1 else 1
    assert terms["gathered_weights"] == pytest.approx(copies * at_once, rel=1e-12)


def share_saved(recompute, kept, cheap, scores, stream, selective_drops_cheap):
    """Elements of a block that stay for each token."""
    if recompute == "full":
        return stream
    if recompute == "none":
        return kept + cheap
    return kept if selective_drops_cheap else kept + cheap - scores


RECOMPUTES = pytest.mark.parametrize("recompute", ["none", "selective", "full"])
ATTENTIONS = pytest.mark.parametrize("attention", ["flash", "unfused"])


@MODELS
@RECOMPUTES
@ATTENTIONS
@DTYPES
@pytest.mark.parametrize("vocabulary", [128, 100_000])
def test_activations_of_the_zero_family_are_whole_blocks(
    model, recompute, attention, dtype, vocabulary
):
    model = replace(model, vocab_size=vocabulary)
    job = replace(JOB, attention=attention, dtype=dtype)
    terms = memory_terms(zero3(), model, job, 2, recompute, shard=2, replica=32)
    tokens, element = 2 * 128, 4.0 if dtype == "fp32" else 2.0
    kept, cheap = saved_elements(model, job)
    scores = model.n_heads * 128 if attention == "unfused" else 0
    share = share_saved(recompute, kept, cheap, scores, model.hidden_size, False)
    activations = tokens * element * (model.n_layers * share + model.hidden_size)
    assert terms["activations"] == pytest.approx(activations, rel=1e-12)
    working = working_bytes(model, job, tokens, share)
    assert terms["working_set"] == pytest.approx(working, rel=1e-12)


def moments_of_the_4d_grid(model, job, recompute, tokens, x, y):
    """What is held at points of the backward pass besides what blocks saved, by hand.

    Each moment lists the weights in use or gathered ahead, the weight gradients under way (the one
    that is formed comes last), and the bytes of activations in work. Matrices are lists of names.
    """
    element = 4.0 if job.dtype == "fp32" else 2.0
    h, f = tokens * model.hidden_size / x, tokens * model.ffn_hidden_size / y
    gate = 2 if model.gated_mlp else 1
    scores = tokens * job.seq_len * model.n_heads / y
    logits = tokens * math.ceil(model.vocab_size / 128) * 128 / y
    kept, cheap = (tokens * n for n in saved_elements(model, job, x, y, copies_queries=True))
    softmax = scores if job.attention == "unfused" else 0
    again = {"none": 0, "selective": f + softmax, "full": kept + cheap - h}[recompute]
    fp32_per_element = 4.0 / element
    moments = [
        # The logits, their copy in fp32 if they are not, the softmax; the head's input.
        (["head"], [], logits * (element + (4 if element < 4 else 0) + 4) + h * element),
        # Gradients of the logits and of the head's input, which is still there.
        (["head", "qkv" if recompute == "full" else "down"], ["head"], (logits + 2 * h) * element),
        # The gradient of the activation, next to the activation.
        (["down", "up"], ["head", "down"], (again + f) * element),
    ]
    if model.gated_mlp:
        # The activation is gone; dO, the sigmoid, its slope, two products and both side by side.
        moments.append((["up"], ["head", "down"], (again - f + 7 * f) * element))
    if job.attention == "unfused":
        # The MLP is gone. Gradients of the softmax and of the scores, before and after the scale,
        # in fp32; then in the weights' type.
        of_scores = 3 * fp32_per_element + (1 if element < 4 else 0)
        in_work = again + of_scores * scores - (1 + gate) * f
        moments.append((["qkv"], ["up", "proj"], in_work * element))
    return moments


def matrices(model):
    """Return the elements of the matrices of a block and of the head."""
    h = model.hidden_size
    heads = model.n_heads * model.head_dim
    return {
        "qkv": h * (heads + 2 * model.n_kv_heads * model.head_dim),
        "proj": heads * h,
        "up": h * model.ffn_hidden_size * (2 if model.gated_mlp else 1),
        "down": model.ffn_hidden_size * h,
        "head": math.ceil(model.vocab_size / 128) * 128 * h,
    }


@MODELS
@RECOMPUTES
@ATTENTIONS
@DTYPES
@pytest.mark.parametrize("vocabulary", [128, 100_000])
@pytest.mark.parametrize(
    "overlap", [Overlap(o, r, g) for o, r, g in ((1, 1, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
)
@pytest.mark.parametrize("keep", [False, True])
def test_a_rank_of_the_4d_grid_holds_most_at_one_moment(
    model, recompute, attention, dtype, vocabulary, overlap, keep
):
    model = replace(model, vocab_size=vocabulary)
    job = replace(
        JOB, attention=attention, dtype=dtype, overlap=overlap, keep_gathered_weights=keep
    )
    terms = memory_terms(AXONN, model, job, 2, recompute, x=2, y=4, z=2, data=4)
    tokens, element = 2 * 128, 4.0 if dtype == "fp32" else 2.0
    kept, cheap = saved_elements(model, job, 2, 4, copies_queries=True)
    share = share_saved(recompute, kept, cheap, 0, model.hidden_size / 2, True)
    activations = tokens * element * (model.n_layers * share + model.hidden_size / 2)
    assert terms["activations"] == pytest.approx(activations, rel=1e-12)
    elements = {name: size / (2 * 4) for name, size in matrices(model).items()}
    all_of_them = model.n_layers * (sum(elements.values()) - elements["head"])
    totals = []
    for weights, gradients, working in moments_of_the_4d_grid(model, job, recompute, tokens, 2, 4):
        used = weights if overlap.oag else weights[:1]
        under_way = gradients if overlap.ors else gradients[-1:]
        gathered = sum(elements[name] for name in used)
        if keep:
            gathered = all_of_them + 2 * elements["head"]
        totals.append((gathered + sum(elements[name] for name in under_way)) * element + working)
    held = terms["gathered_weights"] + terms["working_set"]
    assert held == pytest.approx(max(totals), rel=1e-12)
    # Where Z does not split weights, there is nothing to gather.
    alone = memory_terms(AXONN, model, job, 2, recompute, x=2, y=4, z=1, data=8)
    assert alone["gathered_weights"] == 0
    assert alone["working_set"] == pytest.approx(
        max(
            working for _, _, working in moments_of_the_4d_grid(model, job, recompute, tokens, 2, 4)
        ),
        rel=1e-12,
    )


@MODELS
@ATTENTIONS
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("vocabulary", [128, 100_000])
def test_working_set_of_megatron(model, attention, sequence_parallel, vocabulary):
    """One block's gradients are in work if everything is saved, or the logits are."""
    model = replace(model, vocab_size=vocabulary)
    job = replace(JOB, attention=attention)
    strategy = replace(PLAIN, sequence_parallel=sequence_parallel)
    terms = memory_terms(strategy, model, job, 2, "none", tensor=4, context=2, data=8)
    working = megatron_working_bytes(model, job, 2 * 64, 4 if sequence_parallel else 1)
    assert terms["working_set"] == pytest.approx(working, rel=1e-12)


# Pipelines: schedules played pass by pass --------------------------------------------------------


def most_alive(rank, n_stages, n_virtual, n_micro):
    """Most chunks whose activations one rank holds at once.

    A forward pass makes a chunk's activations, its backward pass frees them. The order of passes
    is that of Narayanan et al., SC21: warm-up, then one forward and one backward in turn.
    """
    total = n_micro * n_virtual
    warmup = n_stages - 1 - rank
    if n_virtual > 1:
        warmup = 2 * warmup + (n_virtual - 1) * n_stages
    order = ["forward"] * min(warmup, total)
    for _ in range(total - len(order)):
        order += ["forward", "backward"]
    order += ["backward"] * (total - order.count("backward"))
    alive = most = 0
    for direction in order:
        alive += 1 if direction == "forward" else -1
        most = max(most, alive)
    assert alive == 0
    return most


def layers_held(strategy, n_layers, n_stages, n_virtual, n_micro, **sizes):
    """Layers whose activations are counted, from the bytes of models of one layer more."""
    model = replace(GPT, n_layers=n_layers)
    job = Job(64, 2 * n_micro, 128)

    def activations(model, stages, n_virtual):
        options = {"n_virtual": n_virtual, **sizes}
        return memory_terms(strategy, model, job, data=2, pipeline=stages, **options)["activations"]

    alone = activations(model, 1, 1)
    of_layer = activations(replace(model, n_layers=n_layers + 1), 1, 1) - alone
    fixed = alone - n_layers * of_layer
    return (activations(model, n_stages, n_virtual) - fixed) / of_layer


PIPELINES = pytest.mark.parametrize("strategy", [PLAIN, SHARDED, PIPELINED])
SCHEDULES = [
    (n_stages, n_virtual, n_micro)
    for n_stages in (2, 3, 4, 6)
    for n_virtual in (1, 2)
    for n_micro in (1, 2, 3, 4, 6, 8, 12, 24)
    if n_virtual == 1 or n_micro % n_stages == 0
]


@PIPELINES
@pytest.mark.parametrize(("n_stages", "n_virtual", "n_micro"), SCHEDULES)
def test_the_first_stage_holds_what_its_schedule_has_in_flight(
    strategy, n_stages, n_virtual, n_micro
):
    """The first stage has warmed up longest, so that it holds most."""
    n_layers = 48
    of_chunk = n_layers / (n_stages * n_virtual)
    chunks = [most_alive(rank, n_stages, n_virtual, n_micro) for rank in range(n_stages)]
    held = layers_held(strategy, n_layers, n_stages, n_virtual, n_micro)
    assert held == pytest.approx(max(chunks) * of_chunk, rel=1e-9)
    assert chunks[0] == max(chunks)


@PIPELINES
def test_a_first_stage_with_the_embedding_for_a_layer_holds_one_layer_less(strategy):
    """14 layers, embedding and head in four stages of four."""
    held = layers_held(strategy, 14, 4, 1, 8)
    assert held == pytest.approx(3 * most_alive(0, 4, 1, 8), rel=1e-9)


@PIPELINES
@pytest.mark.parametrize(("n_layers", "n_virtual", "of_chunk"), [(16, 1, 3), (22, 2, 2)])
def test_a_second_stage_with_more_layers_than_the_first_holds_most(
    strategy, n_layers, n_virtual, of_chunk
):
    """Six stages: the first has one layer less, since the embedding counts as a layer."""
    held = layers_held(strategy, n_layers, 6, n_virtual, 24)
    assert held == pytest.approx(of_chunk * most_alive(1, 6, n_virtual, 24), rel=1e-9)


def test_with_zb_h1_a_second_stage_with_more_layers_holds_as_many_micro_batches():
    """Every stage postpones gradients of weights until it holds as many as there are stages."""
    held = layers_held(replace(PLAIN, schedule="zb-h1"), 16, 6, 1, 24)
    assert held == pytest.approx(3 * 6, rel=1e-9)


@PIPELINES
def test_stages_between_an_embedding_and_a_head_alone_need_most(strategy):
    """Two layers in four stages: neither the first nor the last stage holds any activations."""
    held = layers_held(strategy, 2, 4, 1, 8)
    assert held == pytest.approx(most_alive(1, 4, 1, 8), rel=1e-9)


HEADY = Model(
    "heady", n_layers=8, hidden_size=64, n_heads=4, vocab_size=200_000, seq_len=64, bias=False,
    tied_embeddings=False, position="rotary",
)  # fmt: skip


@PIPELINES
@pytest.mark.parametrize("n_micro", [1, 2, 8])
def test_a_last_stage_with_a_wide_head_needs_most(strategy, n_micro):
    """It holds one micro-batch and its logits, and no embedding."""
    job = Job(8, 2 * n_micro, 64)
    terms = memory_terms(strategy, HEADY, job, 1, "none", data=2, pipeline=4)
    elements = stored(HEADY, 1, 1, 1, 2, False, True)
    assert terms["weights"] == pytest.approx(2 * elements, rel=1e-12)
    logits = 64 * math.ceil(200_000 / 128) * 128
    # AxoNN's runtime copies the logits to fp32 and keeps the head's input, too.
    more = 4.0 * logits + 2 * 64 * 64 if strategy is PIPELINED else 0.0
    assert terms["working_set"] == (2.0 + 4.0) * logits + more
    alone = memory_terms(strategy, replace(HEADY, n_layers=2), job, 1, "none", data=8)
    assert terms["activations"] == pytest.approx(alone["activations"], rel=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("n_micro", [2, 8])
def test_stages_but_the_last_may_keep_what_they_send(stages, n_micro):
    """Without sequence parallelism a rank sends a quarter of 2 bytes of 64 features and tokens."""
    job = Job(4 * stages, n_micro, 64)
    table = table_of(Megatron3D(), recompute="full", tensor=4, pipeline=stages)
    frees, keeps = (
        Megatron3D(sequence_parallel=False, engine=engine)
        for engine in (Engine(), Engine(memory=MemoryForm(keeps_transfers=True)))
    )
    first, first_keeps = (each.first_stage_memory(HEADY, job, table) for each in (frees, keeps))
    n_sent = min(stages, n_micro) if stages > 1 else 0
    kept = number(first_keeps.pop("activations")) - number(first.pop("activations"))
    assert kept == pytest.approx(n_sent * 2 * 64 * 64 / 4, abs=1e-6)
    assert first_keeps == first
    # The last stage, with the wide head, needs most.
    assert keeps.memory(HEADY, job, table) == frees.memory(HEADY, job, table)


@PIPELINES
def test_the_first_stage_is_asked_for_by_name_where_the_last_needs_most(strategy):
    """It holds the embedding and as many micro-batches as there are stages, and forms no logits."""
    table = table_of(strategy, data=2, pipeline=4)
    one, full, neediest = (
        {term: number(nbytes) for term, nbytes in memory(HEADY, Job(8, batch, 64), table).items()}
        for memory, batch in (
            (strategy.first_stage_memory, 2),
            (strategy.first_stage_memory, 16),
            (strategy.memory, 16),
        )
    )
    elements = stored(HEADY, 1, 1, 1, 2, True, False)
    assert full["weights"] == pytest.approx(2 * elements, rel=1e-12)
    # AxoNN keeps the output of one embedding besides.
    assert 3.5 * one["activations"] < full["activations"] <= 4 * one["activations"]
    assert full["working_set"] < neediest["working_set"] / 10
    assert sum(full.values()) < sum(neediest.values())


@pytest.mark.parametrize(
    ("strategy", "axis"), [(PLAIN, "data"), (PIPELINED, "data"), (zero3(), "shard")]
)
def test_without_stages_the_first_stage_is_the_only_one(strategy, axis):
    table = table_of(strategy, **{axis: 64})
    assert strategy.first_stage_memory(HEADY, JOB, table) == strategy.memory(HEADY, JOB, table)


@pytest.mark.parametrize("n_virtual", [2, 4])
@pytest.mark.parametrize("n_micro", [2, 8])
def test_an_interleaved_last_stage_holds_at_least_its_schedule(n_virtual, n_micro):
    """No less than what is in flight, and no more than one micro-batch above that."""
    model = replace(HEADY, n_layers=8)
    job = Job(4, n_micro, 64)
    terms = memory_terms(PLAIN, model, job, 1, "none", n_virtual, data=1, pipeline=2)
    alone = memory_terms(PLAIN, model, replace(job, global_batch=1), 1, "none", data=1)
    of_layer = alone["activations"] / model.n_layers
    assert terms["working_set"] == 64 * 200_064 * 6.0  # the logits of the last stage
    held = terms["activations"] / of_layer
    chunk, chunks = 4 / n_virtual, most_alive(1, 2, n_virtual, n_micro)
    assert chunks * chunk - 1e-9 <= held
    assert held <= min(chunks + n_virtual - 1, n_micro * n_virtual) * chunk + 1e-9


@PIPELINES
def test_a_stage_stores_its_layers_and_the_first_the_embedding(strategy):
    """Twelve layers in four stages; the first one with embedding and positions stores most."""
    sizes = {"data": 4, "pipeline": 4}
    terms = memory_terms(strategy, GPT, JOB, 1, "none", **sizes)
    first = stored(GPT, 1, 1, 1, 3, True, False)
    assert terms["weights"] == pytest.approx(2 * first, rel=1e-12)


def test_what_norms_of_queries_and_keys_read_is_saved():
    normed = replace(LLAMA, qk_norm="head")
    heads = 128 * (8 + 4) * 48 * 2.0

    def added(strategy, **sizes):
        with_norms, without = (
            memory_terms(strategy, model, JOB, **sizes)["activations"] for model in (normed, LLAMA)
        )
        return with_norms - without

    assert added(Megatron3D(), data=64) == pytest.approx(12 * heads)
    assert added(Megatron3D(), tensor=4, data=16) == pytest.approx(12 * heads / 4)
    # A rank holds most when the backward pass of one block has ended, or of two.
    for eager, n_left in ((True, 11), (False, 10)):
        engine = Engine(zero=ZeroProgram(is_fsdp2=True, runs_eagerly=eager))
        in_blocks = added(zero3(engine), shard=64, replica=1)
        assert in_blocks == pytest.approx(n_left * heads, abs=1.0)
