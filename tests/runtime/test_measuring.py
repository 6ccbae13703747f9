"""Ranks measure together, agree on what comes next, and go on where they were interrupted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runtime.ranks import on_ranks

from axonn_tune.calibration import selection
from axonn_tune.calibration.measure import links, network, run
from axonn_tune.calibration.measure.shapes import GemmShape
from axonn_tune.calibration.measure.timing import Sampling
from axonn_tune.calibration.request import Request
from axonn_tune.errors import AxonnTuneError
from axonn_tune.io.journal import Journal
from axonn_tune.runtime.ranks.place import Place
from axonn_tune.spec.plan import KINDS

# A thorough calibration that takes a few seconds.
BRIEF = replace(
    selection.thorough_extent(on_gpu=False),
    # Samples need not be long enough for ranks to take turns.
    sampling=Sampling(sample_seconds=1e-4, n_samples=3, max_seconds=1e-3, n_turns=0),
    gemm_sizes=(16, 64),
    copy_bytes=(2**12, 2**16),
    kernel_tokens=(64,),
    n_kernel_steps=1,
    message_growth=16,
    most_bytes=2**16,
    sustain_seconds=0.05,
)
PARTS = ("gemm", "memory", "links")
EXTRA = GemmShape(24, 40, 56, "TN", "fp32")


def calibrate(rank, n_ranks, path, resume=False, **request):
    request = Request(
        parts=request.pop("parts", PARTS),
        dtypes=("fp32",),
        extent=BRIEF,
        store=Journal(path),
        resume=resume,
        models=(selection.GPT_LIKE,),
        gemm_shapes=(EXTRA,),
        quiet=True,
        **request,
    )
    ranks = run.meet(request, Place(rank, n_ranks, rank, n_ranks), torch.device("cpu"))
    return run.measure_parts(ranks)


def everything_is_measured(rank, n_ranks, path):
    found = calibrate(rank, n_ranks, path)
    assert found.n_ranks == found.n_per_node == n_ranks and len(found.hosts) == 1
    shapes = {(p.m, p.n, p.k, p.mode) for p in found.gemm_points}
    assert len(shapes) == len(found.gemm_points) == 8 * 3 + 1 and (24, 40, 56, "TN") in shapes
    assert {p.kernel for p in found.memory_points} >= {"copy", "add", "optimizer", "layer_norm"}
    assert {(p.backward, p.fused) for p in found.attention_points} == {
        (backward, fused) for backward in (False, True) for fused in (False, True)
    }
    assert {p.kind for p in found.link_points} == set(KINDS)
    axes = {(p.stride, p.size) for p in found.link_points if p.is_of_whole_axis}
    assert axes == {(1, 2), (1, 4), (2, 2)}
    assert len(found.slowdowns) == network.N_ROUNDS_THOROUGH
    assert [speed.rank for speed in found.speeds] == list(range(n_ranks))
    assert any("rate changed" in note for note in found.notes)


@pytest.mark.slow
def test_everything_is_measured(tmp_path):
    on_ranks(4, everything_is_measured, 4, str(tmp_path / "journal"))


def what_is_known_is_not_measured_again(rank, n_ranks, path):
    first = calibrate(rank, n_ranks, path)
    torch.distributed.barrier()
    lines = Path(path).read_text().splitlines()
    cut = len(lines) // 2
    torch.distributed.barrier()  # all have read it
    if rank == 0:
        Path(path).write_text("\n".join(lines[:cut]) + '\n{"key": "cut sho')
    again = calibrate(rank, n_ranks, path, resume=True)
    torch.distributed.barrier()
    now = Path(path).read_text().splitlines()
    assert now[:cut] == lines[:cut]
    assert [json.loads(line)["key"] for line in now[1:]] == [
        json.loads(line)["key"] for line in lines[1:]
    ]
    assert first.gemm_points == again.gemm_points
    assert again.seconds > 0.05  # with what was measured before
    assert [replace(p, seconds=1.0, spread_fraction=0.0) for p in first.link_points] == [
        replace(p, seconds=1.0, spread_fraction=0.0) for p in again.link_points
    ]


@pytest.mark.slow
def test_what_is_known_is_not_measured_again(tmp_path):
    on_ranks(2, what_is_known_is_not_measured_again, 2, str(tmp_path / "journal"))


def pairs_send_in_batches(rank, n_ranks):
    """Torch warns of sends over NCCL that are not issued so."""
    batches = []
    issue = links.dist.batch_isend_irecv
    links.dist.batch_isend_irecv = lambda works: batches.append(works) or issue(works)
    sampling = Sampling(sample_seconds=0.0, n_samples=1, max_seconds=0.0)
    rate = links.pair_rate((0, 2), 2**12, torch.device("cpu"), sampling)
    assert rate > 0.0
    issued = [work.op for works in batches for work in works]
    wanted = {0: [torch.distributed.isend, torch.distributed.irecv], 1: []}
    assert issued[:2] == wanted.get(rank, wanted[0][::-1])


def test_pairs_send_in_batches():
    on_ranks(3, pairs_send_in_batches, 3)


def test_messages_of_pairs_of_gpus_take_longer_than_the_host_needs():
    """Else all links look alike: a host issues a send in 20 to 50 us."""
    nvlink_bytes_per_s = 450e9  # of an H100 in one direction (NVIDIA's data sheet)
    assert network.PAIR_BYTES["cuda"] / nvlink_bytes_per_s > 50e-6


def lacks_all_to_all(rank, n_ranks, path):
    start = links._collective

    def lacking(kind, nbytes, mesh):
        if kind == "all_to_all":
            raise RuntimeError("Backend gloo does not support all_to_all")
        return start(kind, nbytes, mesh)

    links._collective = lacking
    found = calibrate(rank, n_ranks, path, parts=("links",))
    assert {p.kind for p in found.link_points} == set(KINDS) - {"all_to_all"}
    assert found.notes == ("all_to_all was not measured: gloo does not have it",)
    assert not found.gemm_points and not found.memory_points


def test_a_collective_that_the_backend_lacks_is_left_out_and_noted(tmp_path):
    on_ranks(2, lacks_all_to_all, 2, str(tmp_path / "journal"))


def levels_as_told(rank, n_ranks, path):
    assert calibrate(rank, n_ranks, path, parts=("links",), units=(2,)).units == (2,)


@pytest.mark.slow
def test_levels_as_told(tmp_path):
    on_ranks(4, levels_as_told, 4, str(tmp_path / "journal"))


def journal_of_others(rank, n_ranks, path):
    """Keep the journal of a calibration that another device began, and try to go on with it."""
    begin = Journal.begin
    Journal.begin = lambda self, owner: begin(self, owner | {"device": "NVIDIA H200"})
    calibrate(rank, n_ranks, path, parts=("links",))
    with pytest.raises(AxonnTuneError, match="begun with device 'NVIDIA H200'"):
        calibrate(rank, n_ranks, path, parts=("links",), resume=True)


def test_the_journal_of_another_machine_is_refused(tmp_path):
    on_ranks(1, journal_of_others, 1, str(tmp_path / "journal"))
