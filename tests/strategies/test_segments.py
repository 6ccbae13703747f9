"""What PyTorch's allocator keeps beside the tensors of a stage, against nanotron's measured runs.

The sums by hand are those of a replay of the allocations of nanotron's first steps.
"""

import math
from dataclasses import replace

import pytest
from worlds import NANOTRON_8B, llama

from axonn_tune.io.presets import load_engine, load_machine
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step import evaluate
from axonn_tune.step.predict import first_stage_bytes, predict
from axonn_tune.strategies.megatron.megatron3d import megatron_of

GIB = 2**30
# 16 layers of 2048 features, of which an MLP has 8192, and one embedding of 131072 words.
PARAMETERS = 16 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
# Four inputs and outputs of norms, six widths of attention, and four of the MLP.
SAVED = 16 * 4096 * 2 * (10 * 2048 + 4 * 8192)
LOGITS = 4096 * 131072


def nanotron(global_batch, micro_batch=1, sharded=False, n_kv_heads=32, **sizes):
    model = llama(
        n_layers=16,
        hidden_size=2048,
        n_heads=32,
        n_kv_heads=n_kv_heads,
        ffn_hidden_size=8192,
        vocab_size=131072,
        seq_len=4096,
        tied_embeddings=True,
    )
    engine = load_engine("nanotron")
    strategy = megatron_of(engine, n_virtual=(1,), distributed_optimizer=sharded)
    job = Job(math.prod(sizes.values()), global_batch, 4096)
    scenario = Scenario(model, job, load_machine("aws-p5-2024"), strategy)
    return predict(
        scenario, Configuration(Layout(sizes), micro_batch=micro_batch, recompute="none")
    )


@pytest.mark.parametrize(
    ("micro_batch", "sizes", "measured_gib"),
    [
        (1, {"data": 8}, 36.7),
        (2, {"data": 8}, 50.2),
        (1, {"data": 8, "sharded": True}, 24.2),
        (1, {"data": 64, "sharded": True}, 23.8),
        (2, {"data": 16, "sharded": True}, 35.0),
        (2, {"data": 32, "pipeline": 2, "sharded": True}, 24.3),
        (4, {"data": 8, "pipeline": 2, "sharded": True}, 41.1),
        (2, {"data": 8, "pipeline": 4, "sharded": True}, 22.1),
    ],
)
def test_what_was_reserved_without_tensor_parallelism_is_met(micro_batch, sizes, measured_gib):
    """These numbers are of the Ultra-Scale Playbook; nothing is fitted to them."""
    held_gib = first_stage_bytes(nanotron(256, micro_batch, **sizes)) / GIB
    assert held_gib == pytest.approx(measured_gib, rel=0.025)


@pytest.mark.parametrize(
    ("micro_batch", "n_replicas", "sharded", "replayed_gib"),
    [
        (1, 8, False, 36.727),
        (2, 8, False, 50.252),
        (1, 8, True, 24.258),
        (1, 64, True, 23.773),
        (2, 16, True, 35.031),
        (2, 64, True, 34.828),
    ],
)
def test_a_replay_of_the_allocations_reserves_as_much(
    micro_batch, n_replicas, sharded, replayed_gib
):
    """Without rests of segments, small tensors and the final norm it is up to 0.21 GiB less."""
    held = nanotron(256, micro_batch, sharded, data=n_replicas)
    assert first_stage_bytes(held) / GIB == pytest.approx(replayed_gib, abs=0.025)


def test_gains_cost_a_segments_rounding_only_where_each_has_a_bucket_of_its_own():
    """Two ranks halve attention's weights to 16 MiB, which a bucket of 25 MiB takes with others."""
    for tensor, n_gains in ((1, 33), (2, 0)):
        terms = nanotron(256, tensor=tensor, data=8).memory_terms_bytes["gradients"]
        sums = 6 * ((PARAMETERS / tensor) + 33 * 2048)
        assert terms - sums == pytest.approx(n_gains * 2 * 2**20, abs=2**20)


def test_queries_keep_their_joint_copy_with_keys_and_values_only_where_no_heads_share():
    """Two and a half widths of attention with a quarter of the keys, instead of six."""
    saved = [nanotron(256, n_kv_heads=n, data=8).memory_terms_bytes["activations"] for n in (32, 8)]
    assert saved[0] == pytest.approx(SAVED, rel=0.005)
    # q, its output, and k and v of a quarter of the heads
    assert saved[1] == pytest.approx(SAVED - 16 * 4096 * 2 * 2048 * (6 - 2.5), rel=0.005)


def test_nothing_is_added_for_fragmentation_where_the_engine_counts_segments():
    assert nanotron(256, data=8).memory_terms_bytes["fragmentation"] == 0.0


def test_states_take_whole_blocks_of_logits():
    """The moments of 10 GiB take three blocks of 4 GiB, of the fp32 logits of two sequences."""
    terms = nanotron(256, 2, data=8).memory_terms_bytes
    blocks = 3 * 4 * 2 * LOGITS
    assert terms["held_back"] == pytest.approx(blocks - 8 * PARAMETERS, rel=1e-3)


def test_a_workspace_spoils_a_block_of_logits_for_the_second_micro_batch():
    """Moments take a part of it; copies fit into other blocks, and one micro-batch spoils none.

    Those of qkv, proj and down, of at most 1 MiB each, are in the pool of small tensors.
    """
    several, one = (
        nanotron(n, 2, sharded=True, data=64).memory_terms_bytes["held_back"] for n in (256, 128)
    )
    assert one == 0.0
    small = 8 * 16 * (4 * 2048**2 + 2048 * 8192) / 64
    assert several == pytest.approx(4 * 2 * LOGITS - 8 * PARAMETERS / 64 + small, rel=1e-3)


def test_copies_of_gathered_weights_keep_segments_of_their_own():
    """A rank's part of 224 MiB fits into no tensor of a layer; with 64 replicas all parts fit."""
    few, many = (
        nanotron(256, sharded=True, data=n, pipeline=2).memory_terms_bytes["held_back"]
        for n in (8, 64)
    )
    stored = 10 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    assert many == pytest.approx(2 * stored, rel=1e-3)
    assert few == pytest.approx(2 * stored * (2 + 1 / 8), rel=1e-3)


@pytest.mark.parametrize(
    ("micro_batch", "replicas", "replayed_gib", "measured_gib"),
    [(1, 2, 2.74, 2.6), (2, 4, 3.56, 3.4), (4, 2, 5.89, 6.0), (4, 8, 5.41, 5.4)],
)
def test_states_of_a_stage_with_a_tensor_group_share_the_segments_of_copies(
    micro_batch, replicas, replayed_gib, measured_gib
):
    """A replay of the first steps of eight tensor ranks and two stages; hosts are not ahead."""
    sizes = {"tensor": 8, "data": replicas, "pipeline": 2}
    held = nanotron(256, micro_batch, sharded=True, **sizes)
    assert not held.runs_ahead
    assert first_stage_bytes(held) / GIB == pytest.approx(replayed_gib, rel=0.045)
    assert first_stage_bytes(held) / GIB == pytest.approx(measured_gib, rel=0.06)


def test_gradients_of_a_stage_take_the_memory_of_its_activations():
    """Only that of the embedding is larger than any tensor of a layer."""
    terms = nanotron(256, sharded=True, data=8, pipeline=2).memory_terms_bytes
    stored = 10 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    assert terms["gradients"] == pytest.approx(4 * stored + 2 * 131072 * 2048, rel=1e-3)
    assert terms["activations"] == pytest.approx(2 * 10 / 16 * SAVED, rel=0.005)


@pytest.mark.parametrize(
    ("tensor", "n_stages", "micro_batch", "measured_gib"),
    [(4, 8, 16, 55.8), (4, 8, 8, 29.4), (4, 4, 16, 49.9), (8, 2, 8, 10.8)],
)
def test_a_stage_holds_tensors_back_where_its_kernels_take_longer_than_its_host(
    tensor, n_stages, micro_batch, measured_gib
):
    """A full queue of them: two passes of the three layers of an eighth have but twelve."""
    held = nanotron(256, micro_batch, tensor=tensor, pipeline=n_stages, data=1)
    assert held.runs_ahead is (n_stages > 2)
    assert first_stage_bytes(held) / GIB == pytest.approx(measured_gib, rel=0.05)


# Two for each of the three layers of the first stage, and one for the embedding.
OF_FORWARD_PASS = 7


def held_back_tensors(prediction, beside):
    tensor = prediction.configuration.micro_batch * 4096 * 2048 * 2
    return (first_stage_bytes(prediction) - first_stage_bytes(beside)) / tensor


def with_memory(prediction, **facts):
    """Return the prediction of an engine with other facts of its memory."""
    scenario = prediction.scenario
    engine = scenario.strategy.engine
    engine = replace(engine, memory=replace(engine.memory, **facts))
    strategy = replace(scenario.strategy, engine=engine)
    return replace(prediction, scenario=replace(scenario, strategy=strategy))


@pytest.mark.parametrize(
    ("n_micro", "n_tensors"), [(8, 6 * OF_FORWARD_PASS), (9, 53), (16, 53), (3, OF_FORWARD_PASS)]
)
def test_a_stage_holds_a_full_queue_back_once_all_stages_have_a_micro_batch(n_micro, n_tensors):
    """Before, it holds those of the forward passes of its three layers but for the first two."""
    ahead = nanotron(16 * n_micro, 16, tensor=4, pipeline=8, data=1)
    none = with_memory(replace(ahead, runs_ahead=False), finished_passes=None)
    assert ahead.runs_ahead
    assert held_back_tensors(ahead, none) == n_tensors


@pytest.mark.parametrize(("n_stages", "n_tensors"), [(2, 0), (4, 2 * 11), (8, 6 * OF_FORWARD_PASS)])
def test_a_stage_behind_its_host_has_finished_two_of_the_forward_passes(n_stages, n_tensors):
    """The first stages have ten, five and three layers; a second backward pass adds nothing."""
    behind = nanotron(256, 4, tensor=16, pipeline=n_stages, data=1)
    none = with_memory(behind, finished_passes=None)
    assert not behind.runs_ahead
    assert held_back_tensors(behind, none) == pytest.approx(n_tensors)


@pytest.mark.parametrize("n_micro", [1, 8, 16])
def test_a_host_that_waits_for_messages_is_not_ahead(n_micro):
    ahead = nanotron(16 * n_micro, 16, tensor=4, pipeline=8, data=1)
    waits = with_memory(ahead, awaits_messages=True, finished_passes=None)
    assert ahead.runs_ahead
    assert held_back_tensors(waits, replace(waits, runs_ahead=False)) == 0.0


def test_a_host_without_stages_has_no_messages_to_wait_for():
    alone = nanotron(256, 1, tensor=4, data=1)
    waits = with_memory(alone, awaits_messages=True)
    held = predict(waits.scenario, waits.configuration)
    assert first_stage_bytes(held) == first_stage_bytes(alone)


def eight_billion(replicas, tensor):
    strategy = megatron_of(load_engine("nanotron"), n_virtual=(1,), distributed_optimizer=True)
    scenario = Scenario(
        NANOTRON_8B, Job(replicas * tensor, 256, 4096), load_machine("aws-p5-2024"), strategy
    )
    layout = Layout({"tensor": tensor, "data": replicas})
    return predict(scenario, Configuration(layout, micro_batch=1, recompute="none"))


@pytest.mark.parametrize(
    ("replicas", "n_stages", "measured_gib"),
    [(1, 2, 51.9), (2, 2, 48.2), (4, 2, 46.5), (1, 4, 46.6), (2, 4, 45.1), (1, 8, 47.0)],
)
def test_the_hosts_of_eight_tensor_ranks_issue_large_micro_batches_ahead(
    replicas, n_stages, measured_gib
):
    """The host's time is fitted to the steps of 1B alone; without a full queue 36 GiB are held."""
    sizes = {"tensor": 8, "data": replicas, "pipeline": n_stages}
    strategy = megatron_of(
        load_engine("nanotron"), n_virtual=(1,), distributed_optimizer=replicas > 1
    )
    job = Job(math.prod(sizes.values()), 256, 4096)
    scenario = Scenario(NANOTRON_8B, job, load_machine("aws-p5-2024"), strategy)
    held = predict(scenario, Configuration(Layout(sizes), micro_batch=8, recompute="none"))
    assert held.runs_ahead
    assert first_stage_bytes(held) / GIB == pytest.approx(measured_gib, rel=0.06)


def test_a_host_waits_longer_for_a_tensor_group_that_spans_nodes():
    """The wait of each of its ranks is longer, and that of a group on one node is as it was."""
    ratios = []
    for tensor in (8, 16):
        spanning = nanotron(256, 1, tensor=tensor, pipeline=4, data=1)
        strategy = spanning.scenario.strategy
        strategy = replace(strategy, engine=replace(strategy.engine, spanning_wait_seconds=None))
        alike = predict(replace(spanning.scenario, strategy=strategy), spanning.configuration)
        ratios.append(spanning.step_seconds / alike.step_seconds)
    engine = load_engine("nanotron")
    assert ratios[0] == 1.0
    assert 1.1 < ratios[1] < engine.spanning_wait_seconds.value / engine.stage_wait_seconds.value


@pytest.mark.parametrize(
    ("replicas", "tensor", "measured_gib"),
    [(2, 8, 19.2), (4, 8, 17.5), (8, 8, 16.8), (4, 4, 33.1), (8, 4, 31.7), (4, 16, 9.6)],
)
def test_copies_of_gathered_weights_come_beside_a_full_queue(replicas, tensor, measured_gib):
    """The larger of both alone would be 5 to 14 % less than was measured."""
    held_gib = first_stage_bytes(eight_billion(replicas, tensor)) / GIB
    assert held_gib == pytest.approx(measured_gib, rel=0.035)


def test_a_queue_takes_what_a_workspace_has_left_of_a_block_of_logits():
    """53 tensors of 16 MiB fit in the block of 1 GiB of two tensor ranks."""
    held = nanotron(256, sharded=True, tensor=2, data=8).memory_terms_bytes["held_back"]
    copies = 2 * PARAMETERS / 2
    # The moments of proj, 1 MiB each, are in the pool of small tensors.
    states = 8 * (PARAMETERS - 16 * 2048**2) / 2 / 8
    assert held == pytest.approx(4 * LOGITS / 2 + copies - states, rel=0.01)


def test_the_gradient_of_the_embedding_stands_beside_its_bucket_in_a_stage():
    """All gradients are in buckets, too, which the gains of 20 norms round up by 2 MiB each."""
    stored = 10 * (4 * 2048**2 + 3 * 2048 * 8192) + 131072 * 2048
    terms = nanotron(256, data=8, pipeline=2).memory_terms_bytes
    assert terms["gradients"] == pytest.approx(
        6 * stored + 2 * 131072 * 2048 + 20 * 2**21, rel=1e-3
    )


def test_a_host_that_waits_without_stages_on_several_nodes_is_not_ahead():
    for n_gpus, is_ahead in ((16, False), (8, True)):
        usual = nanotron(256, 16, tensor=8, data=n_gpus // 8)
        strategy = usual.scenario.strategy
        strategy = replace(strategy, engine=replace(strategy.engine, waits_without_stages=True))
        waits = predict(replace(usual.scenario, strategy=strategy), usual.configuration)
        assert waits.runs_ahead is is_ahead
        assert (waits.step_seconds > 1.1 * usual.step_seconds) is not is_ahead
        held = usual.memory_terms_bytes["held_back"] * is_ahead
        assert waits.memory_terms_bytes["held_back"] == held


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "sharded", "measured_gib"),
    [
        ({"tensor": 8, "pipeline": 4, "data": 1}, 16, False, 24.8),
        ({"tensor": 8, "pipeline": 4, "data": 2}, 16, True, 24.3),
        ({"tensor": 16, "pipeline": 8, "data": 1}, 16, False, 21.6),
    ],
)
def test_the_host_of_the_longest_stage_counts_and_not_that_of_the_head(
    sizes, micro_batch, sharded, measured_gib
):
    """Kernels of the last stage take longer than its own host, but not than the first stage's."""
    held = nanotron(256, micro_batch, sharded, **sizes)
    assert not held.runs_ahead
    assert first_stage_bytes(held) / GIB == pytest.approx(measured_gib, rel=0.03)


def test_collectives_occupy_the_gpu_as_kernels_do(monkeypatch):
    """The kernels of two stages of 1B on 32 tensor ranks take half of the host's time."""
    ahead = nanotron(256, 128, tensor=32, pipeline=2, data=2)
    assert ahead.runs_ahead
    monkeypatch.setattr(evaluate, "_collective_seconds", lambda prices, part, rows: 0.0)
    assert not predict(ahead.scenario, ahead.configuration).runs_ahead
