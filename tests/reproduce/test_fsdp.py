"""Published runs of FSDP: models and batches are those that the sources count."""

from math import prod
from statistics import mean

import pytest

from axonn_tune.io.package_data import load_published
from axonn_tune.io.presets import load_engine, load_machine, load_model
from axonn_tune.reproduce.fsdp import fms_fsdp, llm_foundry, mpt, torchtitan
from axonn_tune.reproduce.results import compare_published
from axonn_tune.reproduce.runs import Loaders

LOADERS = Loaders(load_model, load_machine, load_engine)


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


@pytest.mark.parametrize(("reader", "table"), [(torchtitan, "torchtitan"), (fms_fsdp, "fms_fsdp")])
def test_ranks_and_sequences_add_up(reader, table):
    rows = load_published(table)
    for row, run in zip(rows, reader(rows, LOADERS), strict=True):
        search = run.search
        job = search.scenario.job
        assert job.n_gpus == int(row["gpus"])
        if table == "torchtitan":
            n_shards = int(row["shard"])
            assert ("GPU" in run.assumed) == (row["gpu"] == "H100")
            assert n_shards * int(row["tensor"]) * int(row["context"]) == job.n_gpus
            assert search.scenario.model.seq_len == int(row["seq_len"])
            assert n_shards * int(row["micro_batch"]) == job.global_batch
        if len(search.constraints.axes) > 1:
            assert prod(search.constraints.axes.values()) == job.n_gpus


def test_torchtitan_is_met_in_time_and_memory():
    """Nothing of its engines was fitted to these runs."""
    runs = list(torchtitan(load_published("torchtitan"), LOADERS))
    compared = compare_published(runs)
    errors = {
        metric: {c.subject: c.error_fraction for c in compared if c.metric == metric}
        for metric in ("tokens_per_second_per_gpu", "memory_gib")
    }
    rates = errors["tokens_per_second_per_gpu"]
    assert [len(each) for each in errors.values()] == [20, 14]
    assert mean(map(abs, errors["memory_gib"].values())) < 0.04
    # Why more than two ranks that share a sequence are slower than predicted is not known.
    slow = [rates.pop(f"llama3-8b, FSDP {n} x CP {8 // n}, {256 // n}K, 8 bits") for n in (2, 1)]
    assert slow == pytest.approx([0.42, 0.49], abs=0.01)
    assert mean(map(abs, rates.values())) < 0.06
    beside = [rates.pop(run) for run in list(rates) if ", async" in run]
    assert len(beside) == 3 and min(beside) > 0.04 and max(beside) < 0.16
    assert max(map(abs, [*rates.values(), *errors["memory_gib"].values()])) < 0.11


def test_parts_of_longer_sequences_take_no_more_memory():
    """The loss takes most, so that the buffers of a ring do not count; 83.9 to 84.5 GiB ran."""
    compared = compare_published(list(torchtitan(load_published("torchtitan"), LOADERS)))
    long = [c for c in compared if "K, 8 bits" in c.subject and c.metric == "memory_gib"]
    assert len(long) == 4
    assert max(c.predicted for c in long) == pytest.approx(min(c.predicted for c in long))
    assert max(c.published for c in long) < 1.01 * min(c.published for c in long)
