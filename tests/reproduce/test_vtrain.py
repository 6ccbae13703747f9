"""The program of vTrain's measured steps: what its table, and the code it names, say of it."""

import importlib.resources
from dataclasses import replace

import numpy as np
import pytest
from reproduced import LOADERS, compared

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine
from axonn_tune.reproduce.megatron import vtrain
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.strategies.megatron.megatron3d import megatron_of

NOTE = importlib.resources.files("axonn_tune.reproduce") / "notes" / "several-nodes.md"
GROUPS = [("18.4", "4"), ("39.1", "4"), ("39.1", "8"), ("175", "4"), ("175", "8")]


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


@pytest.fixture(scope="module")
def note():
    """What the page says of the steps, in one line."""
    return " ".join(NOTE.read_text().split())


def errors(runs, **changes):
    """Return the errors of the runs in percent, with another machine or strategy."""
    changed = [
        replace(
            run,
            search=replace(run.search, scenario=replace(run.search.scenario, **changes)),
        )
        for run in runs
    ]
    return np.array([100.0 * c.error_fraction for c in compared(changed)])


def mean_error(runs, **changes):
    """Return the mean size of the errors of the runs, as the page rounds it."""
    return f"{np.abs(errors(runs, **changes)).mean():.1f} %"


def with_switch(**changes):
    """Return the strategy of the runs with one fact of its engine changed."""
    engine = load_engine("megatron-2021-09")
    engine = replace(engine, megatron=replace(engine.megatron, **changes))
    return megatron_of(engine, n_virtual=(1,))


@pytest.mark.slow
def test_with_pxn_the_steps_are_missed_by_more(runs, note):
    with_pxn = mean_error(runs, machine=LOADERS.machine("a100-800g"))
    assert f"With PXN the mean error of all steps would be {with_pxn} instead of" in note


@pytest.mark.slow
def test_with_trees_the_steps_over_two_nodes_are_predicted_too_fast(note):
    rows = [row for row in load_published("vtrain_a100_multi") if row["tensor"] == "16"]
    runs = list(vtrain(rows, LOADERS))
    machine = runs[0].search.scenario.machine
    outer = replace(machine.links[-1], tree_limits=None)
    found = sorted(-errors(runs, machine=replace(machine, links=(*machine.links[:-1], outer))))
    said = f"with trees they would be predicted {found[0]:.0f} and {found[1]:.0f} % too short"
    assert said in note


@pytest.mark.slow
def test_what_is_said_of_other_programs_is_so(runs, note):
    whole = mean_error(runs, strategy=with_switch(scatters_transfers=False))
    assert f"tensors without DeepSpeed; then the mean error would be {whole}" in note
    alone = mean_error(runs, strategy=with_switch(overlaps_gradient_sums=False))
    assert f"Otherwise the mean error would be {alone}" in note


@pytest.mark.slow
def test_sums_that_run_alone_make_steps_on_eight_tensor_ranks_too_long(runs, note):
    rows = load_published("vtrain_a100_multi")
    on_eight = [run for run, row in zip(runs, rows, strict=True) if row["tensor"] == "8"]
    alone = errors(on_eight, strategy=with_switch(overlaps_gradient_sums=False))
    slow = alone < -14.0
    assert len(alone) == 22 and slow.sum() == 1
    said = f"steps on eight tensor ranks would be {alone[~slow].mean():.1f} % too long in the mean"
    assert said in note
    assert abs(errors(on_eight)[~slow].mean()) < 1.0
