"""The program of vTrain's measured steps: what its table, and the code it names, say of it."""

from dataclasses import replace

import pytest
from reproduced import LOADERS

from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.megatron import vtrain
from axonn_tune.reproduce.results import predict_runs

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
