"""The program of vTrain's measured steps: what its table, and the code it names, say of it."""

import importlib.resources
from dataclasses import replace
from statistics import fmean

import pytest
from reproduced import LOADERS, compared

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine
from axonn_tune.reproduce.megatron import vtrain
from axonn_tune.reproduce.results import predict_runs

NOTE = importlib.resources.files("axonn_tune.reproduce") / "notes" / "several-nodes.md"
GROUPS = [("39.1", "4"), ("39.1", "8"), ("175", "4"), ("175", "8")]


def fits(row, shards_states=False):
    """Return whether the layout of a row is predicted to fit into a GPU."""
    (run,) = vtrain([row], LOADERS)
    scenario = run.search.scenario
    strategy = replace(scenario.strategy, distributed_optimizer=shards_states)
    search = replace(run.search, scenario=replace(scenario, strategy=strategy))
    (prediction,) = predict_runs([replace(run, search=search)])
    return prediction.fits


@pytest.mark.parametrize(("billions", "tensor"), GROUPS)
def test_layouts_stop_where_whole_optimizer_states_fill_the_gpu(billions, tensor):
    """The layout with the fewest stages fits, and would not with half as many.

    With the states sharded over replicas it would, so that the runs had them whole.
    """
    rows = [
        row
        for row in load_published("vtrain_a100_multi")
        if (row["parameters_b"], row["tensor"]) == (billions, tensor)
    ]
    row = min(rows, key=lambda row: (int(row["pipeline"]), int(row["micro_batch"])))
    stages, replicas = int(row["pipeline"]), int(row["data"])
    halved = {**row, "pipeline": str(stages // 2), "data": str(2 * replicas)}
    assert fits(row)
    assert not fits(halved)
    assert fits(halved, shards_states=True)


@pytest.fixture(scope="module")
def runs():
    """All measured steps."""
    return list(vtrain(load_published("vtrain_a100_multi"), LOADERS))


def mean_error(runs, **changes):
    """Return the mean error of the runs in percent, with another machine or strategy."""
    changed = [
        replace(
            run,
            search=replace(run.search, scenario=replace(run.search.scenario, **changes)),
        )
        for run in runs
    ]
    return 100.0 * fmean(abs(c.error_fraction) for c in compared(changed))


@pytest.mark.slow
def test_other_assumptions_miss_the_steps_by_more(runs):
    """NCCL with PXN, and a program that sums no gradients beside products."""
    note = " ".join(NOTE.read_text().split())
    with_pxn = mean_error(runs, machine=LOADERS.machine("a100-800g"))
    assert f"With PXN the mean error of all steps would be {with_pxn:.1f} % instead of" in note
    strategy = replace(runs[0].search.scenario.strategy, engine=load_engine("megatron-2021"))
    of_2021 = mean_error(runs, strategy=strategy)
    assert f"the mean error would be {of_2021:.1f} %" in note
