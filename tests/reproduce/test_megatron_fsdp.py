"""Megatron-FSDP as NVIDIA measured it on H100 to GB300; nothing is fitted to it."""

from statistics import mean

import pytest
from reproduced import LOADERS, words_of_page

from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.megatron_fsdp import megatron_fsdp
from axonn_tune.reproduce.results import predict_runs, relative_error

PAGE = words_of_page("validation.md")
ROWS = load_published("megatron_fsdp")


@pytest.fixture(scope="module")
def predicted():
    """Return all rows, each with its run and its prediction."""
    runs = list(megatron_fsdp(ROWS, LOADERS))
    return list(zip(ROWS, runs, predict_runs(runs), strict=True))


def test_steps_are_met_as_the_page_says(predicted):
    errors = [relative_error(run, "step_seconds", p) for _, run, p in predicted]
    assert len(errors) == 15
    assert mean(map(abs, errors)) < 0.07
    assert min(errors) > -0.06
    assert max(errors) < 0.131
    assert "within 13 % (6.9 % in the mean)" in PAGE


def test_the_step_is_the_batch_over_the_tokens_of_a_second():
    for row in ROWS:
        tokens = int(row["global_batch"]) * int(row["seq_len"])
        rate = int(row["tokens_per_s_per_gpu"]) * int(row["gpus"])
        assert float(row["step_seconds"]) == pytest.approx(tokens / rate, rel=1e-4)


def test_no_step_that_ran_is_called_out_of_memory(predicted):
    assert all(p.fits for *_, p in predicted)
    # Two sequences of 70B at a time would not fit without the host's memory.
    offloading = [p for row, _, p in predicted if row["offloaded_layers"] != "0"]
    assert len(offloading) == 11
    for p in offloading:
        machine = p.scenario.machine
        moved = p.host_memory_bytes / machine.ranks_per_node
        assert p.memory_bytes + moved > machine.gpu.memory_bytes.value


def test_options_of_recipes_are_those_of_the_engine(predicted):
    for row, _, p in predicted:
        program = p.scenario.strategy.engine.zero
        assert program.keeps_transposed == (row["machine"] == "dgx-h100")
        assert program.scales_gradients == (row["release"] != "25.07")
        assert p.scenario.job.offload_modules == (
            "" if row["offloaded_layers"] == "0" else f"layers:{row['offloaded_layers']}"
        )
