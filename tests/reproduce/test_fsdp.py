"""Published runs of FSDP: models and batches are those that the sources count."""

from math import prod

import pytest
from reproduced import LOADERS

from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.fsdp import fms_fsdp, llm_foundry, mpt


def test_models_have_the_parameters_that_llm_foundry_counted():
    rows = load_published("llm_foundry")
    assert len(rows) == 133
    for row in rows:
        model = mpt(row["model"], int(row["seq_len"]))
        assert model.parameters == int(row["parameters"]), (row["model"], row["seq_len"])


def test_throughput_and_step_of_llm_foundry_say_the_same():
    rows = load_published("llm_foundry")
    for row, run in zip(rows, llm_foundry(rows, LOADERS), strict=True):
        job = run.search.scenario.job
        assert job.tokens / run.published["step_seconds"] == pytest.approx(
            float(row["tokens_per_s"])
        )
        assert job.global_batch == int(row["gpus"]) * int(row["micro_batch"]) * int(
            row["micro_steps"]
        )


def test_rows_of_llm_foundry_have_the_torch_and_the_sums_of_their_date():
    """The large models on A100 and all rows on the small A100 are those of May 2023."""
    rows = load_published("llm_foundry")
    for row, run in zip(rows, llm_foundry(rows, LOADERS), strict=True):
        engine = run.search.scenario.strategy.engine
        is_of_may = row["gpu"] == "A100-40GB" or (row["gpu"], row["model"]) == ("A100-80GB", "70b")
        assert engine.recomputes_last_product == is_of_may
        assert engine.zero.reduced_element_bytes == (None if is_of_may else 4.0)


def test_a_network_is_assumed_only_where_it_is_used():
    for run in llm_foundry(load_published("llm_foundry"), LOADERS):
        assert (run.search.scenario.n_nodes > 1) == ("network" in run.assumed)


def test_the_small_a100_has_its_own_memory_in_nodes_of_eight():
    machines = {
        run.group.split(",")[0]: run.search.scenario.machine
        for run in llm_foundry(load_published("llm_foundry"), LOADERS)
    }
    small, large = machines["A100-40GB"], machines["A100-80GB"]
    assert 2 * small.gpu.memory_bytes.value == large.gpu.memory_bytes.value
    assert small.gpu.memory_bandwidth_bytes_per_s.value < (
        large.gpu.memory_bandwidth_bytes_per_s.value
    )
    assert small.ranks_per_node == large.ranks_per_node == 8
    assert small.links == large.links


def test_ranks_add_up():
    rows = load_published("fms_fsdp")
    for row, run in zip(rows, fms_fsdp(rows, LOADERS), strict=True):
        search = run.search
        assert search.scenario.job.n_gpus == int(row["gpus"])
        if len(search.constraints.axes) > 1:
            assert prod(search.constraints.axes.values()) == int(row["gpus"])
