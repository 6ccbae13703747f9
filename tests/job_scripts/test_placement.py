"""Each rank has a GPU of its own, on every machine, in every order, however Slurm shows GPUs."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from job_scripts.placement import SIGHTS, places

from axonn_tune.io.presets import list_machines, load_machine, load_model
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import AXES, LETTERS, ORDERS, Layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.named import strategy_named

MODEL = load_model("tiny")


def by_local_rank(rank, local_rank, n_seen):
    """Megatron-LM, DeepSpeed and the program for FSDP2 do as torchrun's users do."""
    return local_rank


def by_rank(rank, local_rank, n_seen):
    """AxoNN 0.2.0 without gpus_per_node (communication.py, `communication_handle`)."""
    return rank % n_seen


FRAMEWORKS = {
    "axonn": ("axonn", by_rank, lambda n: {"x": 2, "y": 1, "z": 2, "data": n // 4}),
    "axonn-pipeline": (
        "axonn",
        by_rank,
        lambda n: {"x": 1, "y": 1, "z": 2, "pipeline": 2, "data": n // 4},
    ),
    "megatron": (
        "megatron",
        by_local_rank,
        lambda n: {"tensor": 2, "context": 1, "data": n // 2, "pipeline": 1},
    ),
    "zero3": ("fsdp2", by_local_rank, lambda n: {"shard": n // 2, "replica": 2}),
    "zero3-deepspeed": ("deepspeed", by_local_rank, lambda n: {"shard": n, "replica": 1}),
    "zeropp": ("deepspeed", by_local_rank, lambda n: {"secondary": 2, "across": n // 2}),
}


def one_of_each_kind(machines):
    """One of the machines whose nodes, vendor and options of Slurm are alike.

    A script depends on nothing else of a machine.
    """
    kinds = {}
    for machine in machines:
        vendor = machine.gpu.name.split()[0]
        kinds.setdefault((machine.ranks_per_node, repr(machine.job_script), vendor), machine)
    return {machine.name: machine for machine in kinds.values()}


DGX, PERLMUTTER = load_machine("dgx-h100"), load_machine("perlmutter")
MACHINES = one_of_each_kind([DGX, PERLMUTTER, *map(load_machine, list_machines())])


def of_three(machine):
    """The machine with three GPUs in each node."""
    links = tuple(
        replace(link, unit_ranks=3) if link.unit_ranks == machine.ranks_per_node else link
        for link in machine.links
    )
    return replace(
        machine, name="three", ranks_per_node=3, links=links, ring_bandwidths=(), link_points=()
    )


# A node of three, of which the last is not full, and a job that is smaller than a node.
CUSTOM = {
    "three": (of_three(PERLMUTTER), 4),
    "small": (replace(DGX, name="small"), 4),
    "uneven": (replace(DGX, name="uneven"), 12),
}
CASES = {name: (machine, 2 * machine.ranks_per_node) for name, machine in MACHINES.items()} | CUSTOM


@functools.cache
def prediction_of(machine, framework):
    machine, n_gpus = CASES[machine]
    strategy = strategy_named(framework.removesuffix("-deepspeed"))
    layout = Layout(FRAMEWORKS[framework][2](n_gpus))
    dtype = next(iter(machine.gpu.peak_flops_per_s))
    job = Job(n_gpus, 8 * n_gpus, MODEL.seq_len, dtype=dtype)
    return predict(Scenario(MODEL, job, machine, strategy), Configuration(layout))


def table(machine, framework, order="xyzd", sight="all", variables=("CUDA_VISIBLE_DEVICES",)):
    prediction = prediction_of(machine, framework)
    configuration = replace(prediction.configuration, order=order)
    name, takes, _ = FRAMEWORKS[framework]
    files = launch_files(replace(prediction, configuration=configuration), name)
    return places(files, sight, variables, takes)


def assert_one_to_one(machine, found):
    machine, n_gpus = CASES[machine]
    assert sorted(place.rank for place in found) == list(range(n_gpus))
    assert len({(place.node, place.gpu) for place in found}) == n_gpus
    assert all(0 <= place.gpu < machine.ranks_per_node for place in found)
    # Ranks fill one node after the other in the order of Slurm's numbers.
    assert [place.node for place in found] == [i // machine.ranks_per_node for i in range(n_gpus)]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_rank_has_a_gpu_of_its_own(framework, sight):
    for machine in CASES:
        variable = "ROCR" if "frontier" in machine else "CUDA"
        found = table(machine, framework, sight=sight, variables=(f"{variable}_VISIBLE_DEVICES",))
        assert_one_to_one(machine, found)


@pytest.mark.parametrize("order", ORDERS)
def test_each_rank_has_a_gpu_of_its_own_in_every_order(order):
    """The rank that AxoNN gives to a place has the coordinates that the order gives to it."""
    for machine in CASES:
        found = table(machine, "axonn", order)
        assert_one_to_one(machine, found)
        sizes = prediction_of(machine, "axonn").layout.sizes
        by_letter = {letter: sizes[axis] for axis, letter in LETTERS.items()}
        slowest_first = order[::-1]
        numbers = np.arange(len(found)).reshape([by_letter[letter] for letter in slowest_first])
        slowest_of_axonn = [LETTERS[axis] for axis in reversed(AXES)]
        axes = [slowest_first.index(letter) for letter in slowest_of_axonn]
        place_of_rank = numbers.transpose(axes).ravel().tolist()
        assert [found[place].rank for place in place_of_rank] == list(range(len(found)))


def test_several_variables_may_name_the_gpus():
    """Without automatic detection, Slurm sets the variables of all vendors."""
    variables = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
    assert_one_to_one("frontier", table("frontier", "axonn", variables=variables))


def test_the_simulator_finds_ranks_that_share_a_gpu():
    """AxoNN's own choice, were all GPUs visible, puts two ranks on one in most orders."""
    prediction = prediction_of("perlmutter", "axonn")
    configuration = replace(prediction.configuration, order="dzyx")
    files = launch_files(replace(prediction, configuration=configuration))
    head, _, tail = files["rank.sh"].partition("variable=")
    files["rank.sh"] = head + "export LOCAL_RANK=$SLURM_LOCALID\n" + tail[tail.index("\nexec") :]
    found = places(files, "all", ("CUDA_VISIBLE_DEVICES",), by_rank)
    with pytest.raises(AssertionError):
        assert_one_to_one("perlmutter", found)
