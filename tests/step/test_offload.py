"""Optimizer states in the host's memory: what leaves the GPU, and what the end of a step costs."""

from dataclasses import replace

import pytest
from build import layout_of
from worlds import machine_of, with_host

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine, OffloadProgram
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import predict
from axonn_tune.step.timeline import step_timeline
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.parameters import stage_parameters
from axonn_tune.strategies.zero.zero import zero3

MODEL = Model("m", n_layers=6, hidden_size=256, n_heads=8, vocab_size=512, seq_len=128)
SERIAL = Job(8, 32, 128, overlap=Overlap(False, False, False))
MACHINE = with_host(machine_of())
# Rates of `machine_of` and `with_host`: of the GPU's memory, and a kernel's launch; of the link to
# the host; and what the host's cores move for each of the four ranks of a node.
GPU_BYTES_PER_S, LAUNCH_SECONDS = 0.8 * 1.5e12, 5e-6
LINK_BYTES_PER_S = 25e9
CORES_BYTES_PER_S = 0.5 * 200e9 / 4
# So much of everything that the host takes no time.
INSTANT_HOST = {"link": 1e24, "bandwidth": 1e24}

STRATEGIES = {
    # Without the time in which the host issues an operation, which bounds steps of this size.
    "megatron": Megatron3D(engine=replace(load_engine("megatron-core"), issue_seconds=None)),
    "deepspeed": zero3(load_engine("deepspeed")),
    "fsdp2": zero3(load_engine("fsdp2")),
    # No released AxoNN offloads; the strategy knows how, for an engine that does.
    "axonn": Axonn4D(sharded_optimizer=True, engine=Engine(offload=OffloadProgram())),
}
LAYOUTS = {
    "megatron": {"tensor": 2, "data": 4},
    "deepspeed": {"shard": 8},
    "fsdp2": {"shard": 8},
    "axonn": {"z": 2, "data": 4},
}
MOVED = {
    "megatron": {"optimizer_states"},
    "deepspeed": {"optimizer_states", "gradients"},
    "fsdp2": {"optimizer_states", "gradients", "weights"},
    "axonn": {"optimizer_states"},
}
EVERY = pytest.mark.parametrize("name", STRATEGIES)


def predicted(name, offload="optimizer", machine=MACHINE, job=SERIAL, micro_batch=2, sizes=None):
    strategy = STRATEGIES[name]
    scenario = Scenario(MODEL, replace(job, offload=offload), machine, strategy)
    layout = layout_of(strategy, **(sizes or LAYOUTS[name]))
    return predict(scenario, Configuration(layout, micro_batch=micro_batch))


def seconds_of(prediction, *names):
    """The time of all calls of some operations in a step."""
    costs = explain(prediction, with_sensitivities=False).operations
    return sum(cost.total_seconds for cost in costs if cost.name in names)


@EVERY
def test_the_gpu_loses_the_bytes_that_are_offloaded(name):
    kept, offloaded = predicted(name, "none"), predicted(name)
    before, after = kept.memory_terms_bytes, offloaded.memory_terms_bytes
    assert after.keys() == before.keys()
    assert {term for term in after if before[term] and not after[term]} == MOVED[name]
    fragmentation = MACHINE.memory_reserve.fragmentation_fraction.value
    moved_bytes = sum(before[term] for term in MOVED[name])
    saved_bytes = kept.memory_bytes - offloaded.memory_bytes
    assert saved_bytes == pytest.approx((1.0 + fragmentation) * moved_bytes)
    assert kept.host_memory_bytes == 0.0


@pytest.mark.parametrize(("dtype", "of_deepspeed"), [("bf16", 18.0), ("fp32", 20.0)])
def test_the_host_holds_weights_moments_and_gradients_in_fp32(dtype, of_deepspeed):
    """DeepSpeed also holds its sums of gradients, in the job's type."""
    job = replace(SERIAL, dtype=dtype)
    parameters = predicted("fsdp2", job=job).host_memory_bytes / 16.0 * 8 / 4
    assert parameters == pytest.approx(MODEL.parameters)
    of_node = MODEL.parameters / 8 * 4
    assert predicted("deepspeed", job=job).host_memory_bytes == pytest.approx(
        of_deepspeed * of_node
    )
    whole = predicted("megatron", job=job, sizes={"data": 8})
    assert whole.host_memory_bytes == pytest.approx(16.0 * of_node)


def test_a_job_on_part_of_a_node_takes_and_shares_its_host_alone():
    one = predicted("fsdp2", job=replace(SERIAL, n_gpus=1), sizes={"shard": 1})
    assert one.host_memory_bytes == pytest.approx(16.0 * MODEL.parameters)
    adam = 28.0 * MODEL.parameters / (0.5 * 200e9)
    assert seconds_of(one, "optimizer.step") == pytest.approx(adam)


def gpu_kernel_seconds(nbytes):
    return nbytes / GPU_BYTES_PER_S + LAUNCH_SECONDS


def test_megatron_s_step_grows_by_copies_and_the_host_s_adam():
    """Gradients in fp32 leave, Adam moves 30 bytes of each parameter, bf16 weights come back.

    On the GPU it moves 28 bytes, and a kernel copies the weights from fp32.
    """
    sizes = {"data": 8}
    owned = MODEL.parameters / 8
    cleared_bytes = 4.0 * MODEL.parameters
    on_gpu = gpu_kernel_seconds(28.0 * owned + cleared_bytes) + gpu_kernel_seconds(6.0 * owned)
    on_host = 4.0 * owned / LINK_BYTES_PER_S + 30.0 * owned / CORES_BYTES_PER_S
    on_host += gpu_kernel_seconds(cleared_bytes) + 2.0 * owned / LINK_BYTES_PER_S
    kept, offloaded = predicted("megatron", "none", sizes=sizes), predicted("megatron", sizes=sizes)
    assert offloaded.step_seconds - kept.step_seconds == pytest.approx(on_host - on_gpu, rel=1e-6)


# What each engine's GPU does no longer, besides the update of the weights.
NOT_ON_GPU = {
    "megatron": ("weights.main",),
    "deepspeed": ("gradient.clip",),
    "fsdp2": (
        *("gradient.norm", "gradient.clip"),
        *("gradient.block.accumulate", "gradient.root.accumulate"),
    ),
    "axonn": (),
}


@EVERY
def test_an_infinitely_fast_host_takes_the_gpu_s_optimizer_away(name):
    kept = predicted(name, "none")
    offloaded = predicted(name, machine=with_host(machine_of(), **INSTANT_HOST))
    gone = seconds_of(kept, "optimizer.step", *NOT_ON_GPU[name])
    cleared = seconds_of(offloaded, "gradient.clear")
    saved = kept.step_seconds - offloaded.step_seconds
    assert saved == pytest.approx(gone - cleared, rel=1e-6) and gone > 0


@EVERY
@pytest.mark.parametrize("overlap", [Overlap(), Overlap(False, False, False)], ids=str)
@pytest.mark.parametrize("link", [1e8, 25e9])
def test_the_timeline_has_every_copy(name, overlap, link):
    machine = with_host(machine_of(slowdown=0.2), link)
    prediction = predicted(name, machine=machine, job=replace(SERIAL, overlap=overlap))
    timeline = step_timeline(prediction)
    assert timeline.seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    for direction in ("to_host", "from_host"):
        busy = sum(op.seconds for op in timeline.operations if op.stream == direction)
        nbytes = sum(op.nbytes for op in timeline.operations if op.stream == direction)
        assert busy >= nbytes / link * (1 - 1e-9) > 0
        assert prediction.step_seconds >= busy * (1 - 1e-9)


def copied_bytes(prediction):
    """The bytes that a rank copies to the host and from it in a step."""
    operations = step_timeline(prediction).operations
    directions = ("to_host", "from_host")
    return [sum(op.nbytes for op in operations if op.stream == name) for name in directions]


@pytest.mark.parametrize("n_microsteps", [1, 4])
def test_fsdp2_copies_weights_for_every_gather_and_gradients_in_every_micro_step(n_microsteps):
    """The root is gathered once in a micro-step, a block for each of its two passes."""
    shard = MODEL.parameters / 8
    blocks = sum(stage_parameters(MODEL, range(MODEL.n_layers), False, False)) / 8
    to_host, from_host = copied_bytes(predicted("fsdp2", micro_batch=4 // n_microsteps))
    assert to_host == pytest.approx(4.0 * shard * n_microsteps)
    assert from_host == pytest.approx(4.0 * (shard + blocks) * n_microsteps)


@pytest.mark.parametrize("n_microsteps", [1, 4])
def test_deepspeed_copies_sums_of_gradients_and_at_last_in_fp32(n_microsteps):
    shard = MODEL.parameters / 8
    to_host, from_host = copied_bytes(predicted("deepspeed", micro_batch=4 // n_microsteps))
    assert to_host == pytest.approx((2.0 * n_microsteps + 4.0) * shard)
    assert from_host == pytest.approx((2.0 * (n_microsteps - 1) + 2.0) * shard)


def test_copies_hide_behind_the_backward_pass_where_the_engine_lets_them():
    """On a link that is just fast enough, no copy of DeepSpeed's gradients is exposed in a pass."""
    costs = explain(predicted("deepspeed", micro_batch=1)).operations
    exposed = {cost.name: cost.exposed_seconds for cost in costs if cost.axis == "to_host"}
    hidden = {cost.name: cost.hidden_seconds for cost in costs if cost.axis == "to_host"}
    assert set(exposed) == {"gradient.block.to_host", "gradient.root.to_host"}
    assert hidden["gradient.block.to_host"] > 0.5 * sum(hidden.values())


def test_the_host_s_memory_bounds_copies_that_all_gpus_of_a_node_make():
    starved = with_host(machine_of(), bandwidth=40e9)
    free = with_host(machine_of(), bandwidth=400e9)
    name = "gradient.to_host"
    slow, fast = (seconds_of(predicted("megatron", machine=m), name) for m in (starved, free))
    assert slow / fast == pytest.approx(LINK_BYTES_PER_S / (40e9 / 4))


def test_a_node_without_enough_memory_does_not_fit():
    needed = predicted("fsdp2").host_memory_bytes
    lean, ample = (with_host(machine_of(), memory=share * needed) for share in (0.99, 1.01))
    assert predicted("fsdp2", machine=ample).fits
    prediction = predicted("fsdp2", machine=lean)
    assert prediction.memory_bytes < prediction.memory_capacity_bytes
    assert not (prediction.fits or prediction.nearly_fits or prediction.fits_tightly)


def test_a_machine_without_a_host_is_refused_by_the_fields_that_it_lacks():
    fields = "host.link_bandwidth_bytes_per_s, host.memory_bytes, host.memory_bandwidth_bytes_per_s"
    with pytest.raises(InputError, match=f"machine 'test' has no facts for --offload.*{fields}"):
        predicted("megatron", machine=machine_of())


def test_an_engine_that_keeps_weights_on_the_host_keeps_gradients_there():
    with pytest.raises(InputError, match="gradients is false; allowed: true where weights is true"):
        OffloadProgram(weights=True)


def test_an_explanation_says_what_more_of_the_host_saves():
    """A tenth more of the link shortens copies, a tenth more of the memory shortens Adam."""
    prediction = predicted("megatron")
    saved = {each.resource: each.saved_seconds for each in explain(prediction).sensitivities}
    copies = seconds_of(prediction, "gradient.to_host", "weights.from_host")
    adam = seconds_of(prediction, "optimizer.step")
    lost = 1.0 - 1.0 / 1.1
    assert saved["host link bandwidth"] == pytest.approx(lost * copies, rel=1e-6)
    assert saved["host memory bandwidth"] == pytest.approx(lost * adam, rel=1e-6)
    kept = explain(predicted("megatron", "none")).sensitivities
    assert not [each for each in kept if each.resource.startswith("host ")]
