"""NCCL without PXN: GPUs that are not beside a ring's NIC leave a node through its host."""

import numpy as np
import pytest
from reproduced import LOADERS, compared

from axonn_tune.cost.links import axis_links
from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.megatron import vtrain, weak_scaling

RUNS = {"megatron_sc21_table1": weak_scaling, "vtrain_a100_multi": vtrain}


def runs_of(table, **sizes):
    """Return the runs of the rows of a table with these sizes."""
    rows = [
        row
        for row in load_published(table)
        if all(row[column] == size for column, size in sizes.items())
    ]
    return list(RUNS[table](rows, LOADERS))


@pytest.mark.parametrize(("table", "machine"), [*zip(RUNS, ["dgx-a100", "a100-800g"], strict=True)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_rings_that_pass_through_the_host_are_slower(table, machine, kind):
    """Two tensor ranks send 16 of 24 GB/s for each NIC, and four send from socket to socket."""
    usual = LOADERS.machine(machine)
    (before, *_) = (run.search.scenario.machine for run in runs_of(table))
    stride = np.array([1, 2, 4, 8])
    size = np.full(4, 32)
    rates = [
        axis_links(each, stride, size).kinds[kind].bandwidth_bytes_per_s for each in (before, usual)
    ]
    np.testing.assert_allclose(rates[0][[0, 3]], rates[1][[0, 3]])
    assert rates[0][1] == pytest.approx(rates[1][1] * 16 / 24)
    assert rates[0][2] == pytest.approx(2 * 16e9 / 4)
    assert rates[0][2] < rates[0][1] / 3


def test_messages_to_one_other_rank_take_the_nic_beside_their_gpu():
    usual, (run, *_) = LOADERS.machine("dgx-a100"), runs_of("megatron_sc21_table1")
    before, now = (
        axis_links(each, np.array([4]), np.array([32])).kinds["send_recv"].bandwidth_bytes_per_s
        for each in (run.search.scenario.machine, usual)
    )
    assert before == now


@pytest.mark.parametrize(
    ("table", "sizes", "bar"),
    [
        ("megatron_sc21_table1", {"tensor": "4"}, 0.03),
        ("vtrain_a100_multi", {"tensor": "4", "parameters_b": "3.6"}, 0.05),
        ("vtrain_a100_multi", {"tensor": "4", "parameters_b": "18.4"}, 0.03),
    ],
)
def test_steps_with_four_tensor_ranks_are_met(table, sizes, bar):
    """With the bandwidth of other rings the last two are predicted 8 to 11 and 9 % too fast."""
    errors = [c.error_fraction for c in compared(runs_of(table, **sizes))]
    assert errors
    assert max(map(abs, errors)) < bar


def test_steps_of_39_billion_parameters_contradict_each_other():
    """More sequences in a micro-batch cannot help in one layout and harm in the others."""
    seconds = {
        (row["pipeline"], row["micro_batch"]): 1e-3 * float(row["step_milliseconds"])
        for row in load_published("vtrain_a100_multi")
        if row["parameters_b"] == "39.1" and row["tensor"] == "4"
    }
    longer = [seconds[stages, "6"] - seconds[stages, "3"] for stages in ("4", "8", "16")]
    assert longer == pytest.approx([2.3, -1.5, 5.0], abs=0.05)
