"""A process's place among the ranks of a job, as launchers tell it."""

import os
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from processes import torchrun_environments

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from axonn_tune.errors import InputError
from axonn_tune.runtime.ranks import series, session
from axonn_tune.runtime.ranks.launch import launch
from axonn_tune.runtime.ranks.place import (
    Place,
    first_host,
    place_in_job,
    require_meeting_place,
    slurm_rendezvous,
)
from axonn_tune.runtime.run import device_name

SLURM = {
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "localhost,nid[001201-001204]",
}


def test_torchruns_variables():
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert place_in_job({**SLURM, **variables, "RANK": "6"}) == Place(6, 8, 1, 4)
    assert place_in_job({"RANK": "0", "WORLD_SIZE": "1"}) == Place(0, 1, 0, 1)


def test_sruns_variables():
    assert place_in_job(SLURM) == Place(5, 8, 1, 4)


def test_a_shell_inside_an_allocation_is_no_rank():
    """Slurm sets SLURM_PROCID in a batch script too, but a step's number under srun only."""
    assert place_in_job({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    assert place_in_job({}) is None


@pytest.mark.parametrize("name", ["", "AMD Radeon Graphics"])
def test_a_gpu_without_a_name_has_that_of_its_chip(name, monkeypatch):
    properties = mock.Mock(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    gpu = torch.device("cuda", 0)
    assert device_name(gpu) == "AMD gfx90a"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI250X")
    assert device_name(gpu) == "AMD Instinct MI250X"


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(InputError, match="WORLD_SIZE is 'many'"):
        place_in_job({"RANK": "0", "WORLD_SIZE": "many"})
    with pytest.raises(InputError, match="SLURM_STEP_NUM_TASKS is ''"):
        place_in_job({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("nid[001201-001204,001300]", "nid001201"),
        ("nid[007,009],login1", "nid007"),
        ("frontier00123", "frontier00123"),
        ("a1,b2", "a1"),
        ("n[1-2]-ib", "n1-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_no_host_is_an_error_that_says_what_to_set():
    with pytest.raises(InputError, match="MASTER_ADDR"):
        first_host("")


def test_rendezvous_is_the_same_on_all_ranks_and_differs_between_steps():
    here = slurm_rendezvous(SLURM)
    assert here["MASTER_ADDR"] == "localhost"
    assert 49152 <= int(here["MASTER_PORT"]) < 65536
    assert slurm_rendezvous({**SLURM, "SLURM_PROCID": "0"}) == here
    assert slurm_rendezvous({**SLURM, "SLURM_STEP_ID": "4"}) != here
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    assert slurm_rendezvous({**SLURM, **given}) == given


@pytest.mark.timeout(60)
@pytest.mark.parametrize("address", ["no-such-node.invalid", "", "a b", "x" * 300])
def test_an_address_that_nobody_knows_is_named(address):
    """Torch would look for it for ever."""
    with pytest.raises(InputError, match=re.escape(f"MASTER_ADDR is '{address[:80]}'")):
        require_meeting_place({"MASTER_ADDR": address, "MASTER_PORT": "29500"})


@pytest.mark.parametrize("port", ["", "many", "0", "-1", "65536", "²"])
def test_a_port_that_is_none_is_named(port):
    with pytest.raises(InputError, match=re.escape(f"MASTER_PORT is '{port}'; allowed: 1 to 655")):
        require_meeting_place({"MASTER_ADDR": "localhost", "MASTER_PORT": port})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cannot_look_up_where_they_meet_end_at_once(monkeypatch, rank):
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "no.such.invalid", "MASTER_PORT": 29500}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(InputError, match=r"MASTER_ADDR is 'no\.such"):
        launch(series.execute_series, None, 2, "cpu")


def test_a_rank_that_has_joined_waits_for_all_in_each_round():
    store = dist.HashStore()
    first, second = Place(0, 2, 0, 2), Place(1, 2, 1, 2)
    for _ in range(2):
        waiting = threading.Thread(
            target=session._await_others, args=(store, second, "joined"), daemon=True
        )
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        session._await_others(store, first, "joined")
        waiting.join(10)
        assert not waiting.is_alive()


def test_what_a_program_needs_to_start_does_not_count_against_the_timeout(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, torchrun_environments(2)[0][name])
    with ThreadPoolExecutor(1) as early:
        store = early.submit(session.meeting_point, Place(0, 2, 0, 2), 0.3)
        time.sleep(1.0)
        session.meeting_point(Place(1, 2, 1, 2), 0.3)
        with pytest.raises(RuntimeError):
            store.result().wait(["an event that never comes"])


@pytest.mark.parametrize("on_nccl", [True, False])
def test_a_rank_that_fails_leaves_a_group_whose_collectives_may_hang(monkeypatch, on_nccl):
    """Else torch would warn, when the process ends, that the group is still there."""
    left = []
    monkeypatch.setattr(session, "_join", lambda *arguments: None)
    monkeypatch.setattr(session, "must_be_watched", lambda device: on_nccl)
    monkeypatch.setattr(session, "run_as_batch", lambda: None)
    monkeypatch.setattr(session, "Watch", mock.MagicMock())
    monkeypatch.setattr(session, "_abandon", lambda: left.append("group"))
    monkeypatch.setattr(session, "meeting_point", lambda *arguments: dist.HashStore())
    with (
        pytest.raises(session.RankError, match="rank 0 failed: ValueError: too hot"),
        session.joined(Place(0, 2, 0, 2), torch.device("cpu"), 5.0),
    ):
        raise ValueError("too hot")
    assert left == (["group"] if on_nccl else [])


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has this way of scheduling")
def test_threads_that_a_rank_starts_are_scheduled_as_batch_work():
    found = []

    def rank():
        session.run_as_batch()
        started = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        started.start()
        started.join()

    thread = threading.Thread(target=rank)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH]


def test_a_gpu_that_a_kernel_has_broken_does_not_end_the_other_runs(monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    series._free_memory(torch.device("cuda"))
