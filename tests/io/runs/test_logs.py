"""Logs of each program, of which tests/data/training_logs holds lines, become rows of a table."""

import json
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.runs import FORMATS, read_runs, table_row

LOGS = Path(__file__).parents[2] / "data" / "training_logs"
# What a reader of the log sees in it, in the order of its columns, for each log.
ROWS = {
    "megatron": {
        "model": "llama2-7b",
        "gpus": "8",
        "layout": "data=2,pipeline=4",
        "global_batch": "128",
        "micro_batch": "1",
        "seq_len": "4096",
        "engine": "megatron-core",
        "dtype": "bf16",
        "recompute": "none",
        "virtual_stages": "1",
        "step_seconds": "25.8319",
        "n_steps": "8",
        "memory_gib": "30.36",
    },
    "nemo": {
        "gpus": "2",
        "layout": "data=2",
        "global_batch": "1",
        "engine": "megatron-core",
        "step_seconds": "0.0317",
        "n_steps": "3",
    },
    "torchtitan": {
        "model": "6-layers-of-256",
        "gpus": "8",
        "layout": "shard=8",
        "global_batch": "64",
        "micro_batch": "8",
        "seq_len": "2048",
        "engine": "torchtitan-2024-eager",
        "recompute": "selective",
        "step_seconds": "0.046344",
        "n_steps": "2",
        "memory_gib": "1.34",
    },
    "nanotron": {
        "model": "2-layers-of-16",
        "gpus": "8",
        "layout": "tensor=2,data=2,pipeline=2",
        "global_batch": "20",
        "micro_batch": "2",
        "seq_len": "32",
        "engine": "nanotron",
        "dtype": "bf16",
        "recompute": "none",
        "step_seconds": "0.0413",
        "n_steps": "2",
        "memory_gib": "0.5094",
    },
    "deepspeed": {
        "gpus": "2",
        "layout": "shard=2",
        "global_batch": "8",
        "micro_batch": "2",
        "engine": "deepspeed",
        "dtype": "bf16",
        "n_steps": "4",
    },
    "litgpt": {
        "gpus": "4",
        "layout": "shard=4",
        "global_batch": "16",
        "micro_batch": "2",
        "seq_len": "512",
        "engine": "fsdp2",
        "dtype": "bf16",
        "step_seconds": "0.25828",
        "n_steps": "1",
    },
    "llm-foundry": {
        "model": "12-layers-of-768",
        "gpus": "1",
        "layout": "shard=1",
        "global_batch": "2",
        "micro_batch": "2",
        "seq_len": "2048",
        "engine": "llm-foundry",
        "n_steps": "2",
        "memory_gib": "3.785",
    },
}


def row_of(path, given=None, warm_up=None, log_format=None):
    (run,) = read_runs(path, log_format)
    return table_row(run, path.name, given or {}, warm_up).cells


@pytest.fixture
def log(tmp_path):
    """Write a text as a log and return its path."""

    def write(text, name="run.log"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("log_format", ROWS)
def test_a_log_is_recognised_and_says_its_row(log_format):
    expected = ROWS[log_format]
    given = {} if "model" in expected else {"model": "tiny"}
    row = row_of(LOGS / f"{log_format}.log", given)
    assert {name: row.get(name) for name in expected} == expected
    assert row["status"] == "ok" and row["source"] == f"{log_format}.log"
    assert row == row_of(LOGS / f"{log_format}.log", given, log_format=log_format)


@pytest.mark.parametrize("log_format", ROWS)
def test_colors_prefixes_and_repeated_lines_of_other_ranks_change_nothing(log_format, log):
    given = {"model": "tiny"}
    text = (LOGS / f"{log_format}.log").read_text()
    lines = [f"\x1b[32m{line}\x1b[0m" for line in text.splitlines()]
    if log_format not in ("llm-foundry", "litgpt"):  # Metrics on many lines have no prefix.
        ranks = (0,) if log_format == "nanotron" else (0, 1)  # One rank prints configurations.
        lines = [f"[default{rank}]:{line}" for line in lines for rank in ranks]
    changed = row_of(log("\n".join(lines), f"{log_format}.log"), given)
    assert changed == row_of(LOGS / f"{log_format}.log", given)


@pytest.mark.parametrize("log_format", ROWS)
def test_a_cut_log_is_read_or_refused_in_one_line(log_format, log):
    text = (LOGS / f"{log_format}.log").read_text()
    for end in range(0, len(text), max(len(text) // 40, 1)):
        path = log(text[:end])
        with suppress(FileError):
            assert float(row_of(path, {"model": "tiny"}, warm_up=0)["step_seconds"]) > 0


@pytest.mark.parametrize("log_format", ROWS)
def test_times_that_are_no_numbers_are_no_steps(log_format, log):
    text = (LOGS / f"{log_format}.log").read_text()
    marks = ("(ms): ", "in s: ", "tps: ", "iteration_ms: ", "CurrSamplesPerSec=", "time: ")
    for mark in (*marks, "samples_per_sec: "):
        text = text.replace(mark, f"{mark}nan ")
    with pytest.raises(FileError, match="times 0 steps"):
        row_of(log(text), {"model": "tiny"}, log_format=log_format)


def test_the_sum_of_the_micro_steps_is_a_step_of_litgpt():
    (run,) = read_runs(LOGS / "litgpt.log")
    assert run.step_seconds == pytest.approx([0.28156, 0.33575, 0.25828])


def test_steps_of_which_litgpt_logs_the_last_micro_step_only_have_no_time(log):
    lines = (LOGS / "litgpt.log").read_text().splitlines()
    last_ones = [line for line in lines if not line.startswith("Epoch") or "(step)" in line]
    with pytest.raises(FileError, match="times 4 of 7 micro-steps, from which no step follows"):
        read_runs(log("\n".join(last_ones)))


def test_a_step_of_torchtitan_is_as_long_as_between_its_time_stamps():
    (run,) = read_runs(LOGS / "torchtitan.log")
    assert run.step_seconds[1:] == pytest.approx([0.055, 0.046, 0.047], abs=1e-3)


def test_a_step_of_deepspeed_is_the_global_batch_over_its_rate():
    (run,) = read_runs(LOGS / "deepspeed.log")
    assert run.step_seconds[0] == pytest.approx(8 / 265.4114759024282)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_stage_of_deepspeed_is_a_strategy(log, stage):
    text, n_changes = re.subn(
        r"(zero_optimization_stage \.* )3", rf"\g<1>{stage}", (LOGS / "deepspeed.log").read_text()
    )
    assert n_changes == 1
    row = row_of(log(text), {"model": "tiny", "seq_len": "16"})
    assert (row["strategy"], row["layout"]) == (f"zero{stage}", "data=2")


def test_the_degrees_of_torchtitan_are_axes(log):
    text = (LOGS / "torchtitan.log").read_text()
    old = "Building 1-D device mesh with ['dp_shard'], [8]"
    degrees = "pp=1, dp_replicate=2, dp_shard=2, cp=1, tp=2, ep=1"
    new = f"Building device mesh with parallelism: {degrees}"
    row = row_of(log(text.replace(old, new) + "\nCompiling each block with torch.compile"))
    assert row["layout"] == "replica=2,shard=2,tensor=2" and row["engine"] == "torchtitan-2025"


@pytest.mark.parametrize(
    ("schedule", "micro_batch", "n_virtual"),
    [
        ("", "4", None),
        ("Using pipeline schedule 1F1B with 8 microbatches and 2 stages.", "1", "1"),
        ("Using pipeline schedule Interleaved1F1B with 4 microbatches and 4 stages.", "2", "2"),
    ],
)
def test_a_pipeline_of_torchtitan_cuts_the_local_batch(log, schedule, micro_batch, n_virtual):
    text = (LOGS / "torchtitan.log").read_text()
    old = "Building 1-D device mesh with ['dp_shard'], [8]"
    degrees = "pp=2, dp_replicate=1, dp_shard=4, cp=1, tp=1, ep=1"
    new = f"Building device mesh with parallelism: {degrees}\n{schedule}"
    row = row_of(log(text.replace(old, new)))
    assert "pipeline=2" in row["layout"].split(",")
    assert (row["micro_batch"], row.get("virtual_stages")) == (micro_batch, n_virtual)


def of_2026(tokens_per_rank, tokens_per_step, context=2048):
    """Return the log of torchtitan with the lines of August 2026, which count tokens."""
    text = (LOGS / "torchtitan.log").read_text()
    old = re.search(r"local batch size 8, .*sequence length 2048", text)
    new = (
        f"{tokens_per_rank} tokens per DP rank, {tokens_per_step} tokens per train step, "
        f"gradient accumulation steps 1, maximum context length {context}"
    )
    return text.replace(old[0], new).replace("Applied selective", "Applied SelectiveAC")


def test_the_tokens_of_torchtitan_are_sequences(log):
    assert row_of(log(of_2026(8 * 2048, 64 * 2048), "torchtitan.log")) == row_of(
        LOGS / "torchtitan.log"
    )


def test_tokens_that_fill_no_whole_sequences_are_no_batch(log):
    (run,) = read_runs(log(of_2026(8 * 2048, 64 * 2048, context=3000)))
    assert not {"global_batch", "micro_batch"} & set(run.facts)
    assert run.step_seconds[1:] == pytest.approx([0.055, 0.046, 0.047], abs=1e-3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Applied full activation checkpointing to the model", "full"),
        ("Applied FullAC activation checkpointing to the model", "full"),
        ("Selected 0.5 budget option", None),
        ("", "none"),
    ],
)
def test_the_recomputation_of_torchtitan_is_read_in_old_and_new_words(log, line, said):
    text = (LOGS / "torchtitan.log").read_text()
    changed = text.replace("Applied selective activation checkpointing to the model", line)
    assert row_of(log(changed)).get("recompute") == said


def test_the_batch_that_grows_counts_at_its_last_size(log):
    text = (LOGS / "megatron.log").read_text()
    early, late = text.replace("size:   128", "size:    64"), text.replace("/    5000", "/   5000")
    late = "\n".join(line for line in late.splitlines() if "iteration" in line)
    for number in range(1, 11):
        late = late.replace(f"iteration {number:8d}", f"iteration {number + 50:8d}")
    (run,) = read_runs(log(early + late))
    assert run.facts["global_batch"] == "128" and len(run.step_seconds) == 10


@pytest.mark.parametrize(
    ("changed", "column", "said"),
    [
        ({"recompute_granularity": "full"}, "recompute", "full"),
        ({"recompute_granularity": "selective"}, "recompute", "selective"),
        (
            {"recompute_granularity": "selective", "recompute_modules": "['moe_act', 'layernorm']"},
            "recompute",
            "selective:moe_act,layernorm",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": "None"},
            "recompute",
            "selective",
        ),
        ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, "precision", "fp8-current"),
        ({"fp8": "e4m3"}, "precision", "fp8-delayed"),
        ({"transformer_impl": "local"}, "engine", "megatron-2022"),
        ({"tensor_model_parallel_size": "2"}, "layout", "tensor=2,pipeline=4"),
        ({"expert_model_parallel_size": "2"}, "layout", "data=2,pipeline=4,expert=2"),
        ({"virtual_pipeline_model_parallel_size": "2"}, "virtual_stages", "2"),
        ({"params_dtype": "torch.float16"}, "dtype", "fp16"),
    ],
)
def test_arguments_of_megatron_are_facts(log, changed, column, said):
    lines = (LOGS / "megatron.log").read_text().splitlines()
    kept = [line for line in lines if not any(f"  {name} ." in line for name in changed)]
    added = [f"  {name} ".ljust(50, ".") + f" {value}" for name, value in changed.items()]
    assert row_of(log("\n".join([*added, *kept])))[column] == said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, {}),
        ({"use_distributed_optimizer": "False"}, {"distributed_optimizer": "no"}),
        ({"use_distributed_optimizer": "True"}, {"distributed_optimizer": "yes"}),
        ({"use_distributed_optimizer": "False", "deepspeed": "True"}, {}),
        ({"tensor_model_parallel_size": "2"}, {"sequence_parallel": "no"}),
        (
            {"tensor_model_parallel_size": "2", "sequence_parallel": "True"},
            {"sequence_parallel": "yes"},
        ),
        ({"num_experts": "8", "expert_tensor_parallel_size": "2"}, {"split_experts": "yes"}),
        ({"num_experts": "8", "expert_tensor_parallel_size": "1"}, {}),
        ({"expert_tensor_parallel_size": "2"}, {}),
        ({"hidden_dropout": "0.1", "attention_dropout": "0.1"}, {"dropout": "yes"}),
        ({"hidden_dropout": "0.0", "attention_dropout": "0.0"}, {}),
    ],
)
def test_switches_of_megatron_are_facts_where_they_matter(log, changed, said):
    lines = (LOGS / "megatron.log").read_text().splitlines()
    kept = [line for line in lines if not any(f"  {name} ." in line for name in changed)]
    added = [f"  {name} ".ljust(50, ".") + f" {value}" for name, value in changed.items()]
    row = row_of(log("\n".join([*added, *kept])), {"model": "llama2-7b"})
    switches = ("sequence_parallel", "distributed_optimizer", "split_experts", "dropout")
    assert {name: row[name] for name in switches if name in row} == said


@pytest.mark.parametrize(
    ("changed", "layout"),
    [
        ({"pipeline_model_parallel_size": "1"}, "shard=8"),
        ({"pipeline_model_parallel_size": "1", "context_parallel_size": "2"}, None),
        (
            {"pipeline_model_parallel_size": "1", "data_parallel_sharding_strategy": "no_shard"},
            None,
        ),
    ],
)
def test_megatron_fsdp_shards_over_all_ranks_or_asks_for_the_layout(log, changed, layout):
    changed = {
        "use_megatron_fsdp": "True",
        "use_distributed_optimizer": "True",
        "data_parallel_sharding_strategy": "optim_grads_params",
        **changed,
    }
    (run,) = read_runs(log(megatron_log_with(changed)))
    assert run.facts["engine"] == "megatron-fsdp" and run.facts.get("layout") == layout
    assert not {"distributed_optimizer", "virtual_stages"} & set(run.facts)


@pytest.mark.parametrize(("context", "layout"), [("1", "shard=8"), ("2", None)])
def test_torchs_fsdp_in_megatron_is_fsdp_and_not_data_parallelism(log, context, layout):
    changed = {
        "use_torch_fsdp2": "True",
        "data_parallel_sharding_strategy": "no_shard",
        "pipeline_model_parallel_size": "1",
        "context_parallel_size": context,
    }
    (run,) = read_runs(log(megatron_log_with(changed)))
    assert run.facts["engine"] == "fsdp2" and run.facts.get("layout") == layout
    assert not {"distributed_optimizer", "virtual_stages"} & set(run.facts)


def megatron_log_with(arguments):
    """Return the text of Megatron-LM's log with some other arguments."""
    lines = (LOGS / "megatron.log").read_text().splitlines()
    kept = [line for line in lines if not any(f"  {name} ." in line for name in arguments)]
    added = [f"  {name} ".ljust(50, ".") + f" {value}" for name, value in arguments.items()]
    return "\n".join([*added, *kept])


@pytest.mark.parametrize(
    ("old", "new", "is_known"),
    [
        ("LlamaConfig(", "Qwen2Config(", True),
        ("LlamaConfig(", "Qwen2Config(attention_bias=True, ", True),
        ("vocab_size=", "moe_config=MoEConfig(num_experts=8), vocab_size=", False),
    ],
)
def test_the_model_of_nanotron_is_a_llama_or_a_dense_qwen(log, old, new, is_known):
    text = (LOGS / "nanotron.log").read_text()
    assert old in text
    (plain,), (run,) = read_runs(LOGS / "nanotron.log"), read_runs(log(text.replace(old, new)))
    sizes = {**plain.sizes, "qkv_bias": "attention_bias=True" in new}
    assert run.sizes == (sizes if is_known else {})


# The line before the first step, and the batch of a step, as trainer.py at 2411b022 writes them.
NANOTRON_START = (
    "mbs: 2 | grad_accum: 5 | cp: 1 | sequence_length: 32 | global_batch_size: 20 | "
    "train_steps: 1000 | start_iteration_step: 0 | consumed_tokens_total: 0"
)
NANOTRON_TOKENS = (
    "TokensArgs(sequence_length=32, micro_batch_size=2, batch_accumulation_per_replica=5)"
)


@pytest.mark.parametrize("start", [NANOTRON_START, NANOTRON_TOKENS])
def test_the_batch_of_nanotrons_steps_is_in_tokens_and_not_read(log, start):
    text = (LOGS / "nanotron.log").read_text()
    text, n_steps = re.subn(
        r"(?<=gpu: )(.*)global_batch_size: 20", r"\1global_batch_size: 640", text
    )
    text, n_starts = re.subn(r"\[Start training\].*", start, text)
    assert (n_starts, n_steps > 1) == (1, True)
    (run,) = read_runs(log(text))
    assert (run.facts["global_batch"], run.facts["micro_batch"]) == ("20", "2")


def test_the_groups_of_nemo_are_axes(log):
    groups = "All tensor model parallel group ranks: [[0, 1], [2, 3], [4, 5], [6, 7]]"
    pipeline = "All pipeline model parallel group ranks: [[0, 4], [1, 5], [2, 6], [3, 7]]"
    steps = [
        f"global_step: {n} | reduced_train_loss: 1 | train_step_timing in s: 9.{n}"
        for n in range(4)
    ]
    row = row_of(log("\n".join([groups, pipeline, *steps])), {"model": "tiny", "global_batch": "8"})
    assert row["layout"] == "tensor=2,data=2,pipeline=2" and row["gpus"] == "8"


def test_the_memory_of_nemo_2_and_of_megatron_bridge_is_read(log):
    nemo = (LOGS / "nemo.log").read_text()
    with_memory = nemo.replace(" | val_loss", " | max_memory_reserved: 21474836480 | val_loss")
    assert row_of(log(with_memory), {"model": "tiny"})["memory_gib"] == "20"
    megatron = (LOGS / "megatron.log").read_text()
    bridge = re.sub(
        r"\[Rank 4\][^\n]*",
        "[Rank 0] (after 2 iterations) memory (GB) | mem-max-allocated-gigabytes: 30.1 | "
        "mem-max-reserved-gigabytes: 32.212",
        megatron,
    )
    (run,) = read_runs(log(bridge))
    assert run.memory_bytes == pytest.approx(32.212e9)


def test_what_nemo_1_calls_otherwise_is_read(log):
    config = "\n".join(
        [
            "    activations_checkpoint_granularity: full",
            "    activations_checkpoint_method: block",
            "    activations_checkpoint_num_layers: 4",
            "    encoder_seq_length: 2048",
            "    micro_batch_size: 2",
        ]
    )
    given = {"model": "tiny"}
    row = row_of(log(f"{config}\n{(LOGS / 'nemo.log').read_text()}"), given)
    facts = {"recompute": "full:4", "seq_len": "2048", "micro_batch": "2"}
    assert facts.items() <= row.items()
    assert not set(facts) & set(row_of(LOGS / "nemo.log", given))


def test_iterations_without_arguments_claim_nothing_but_the_batch(log):
    lines = (LOGS / "megatron.log").read_text().splitlines()
    (run,) = read_runs(log("\n".join(line for line in lines if "iteration" in line)))
    assert run.facts == {"engine": "megatron-core", "global_batch": "128"}


def test_the_progress_bar_of_nemo_is_read_between_its_carriage_returns(log):
    bar = "Epoch 0: 1%|, reduced_train_loss=3.09, global_step={}.0, train_step_timing in s={}]"
    text = "\r".join(bar.format(n, 40 + n) for n in range(4))
    (run,) = read_runs(log(text))
    assert run.step_seconds == (40.0, 41.0, 42.0, 43.0)


def test_what_the_user_gives_counts_more_than_the_log():
    row = row_of(LOGS / "megatron.log", {"engine": "megatron-2022", "machine": "dgx-a100"})
    assert row["engine"] == "megatron-2022" and row["machine"] == "dgx-a100"


def test_what_is_missing_is_named_with_its_option(log):
    lines = (LOGS / "megatron.log").read_text().splitlines()
    path = log("\n".join(line for line in lines if "iteration" in line))
    with pytest.raises(FileError, match=r"run\.log does not say its model, gpus, layout; give"):
        row_of(path)


@pytest.mark.parametrize(("n_steps", "n_timed"), [(3, 1), (10, 8), (20, 18), (100, 90)])
def test_two_steps_or_a_tenth_are_warm_up(log, n_steps, n_timed):
    step = "step: {}  memory:  1.34GiB(0.96%)  tps: {}"
    head = (LOGS / "torchtitan.log").read_text().split("step:  1")[0]
    slow = n_steps - n_timed
    lines = [step.format(n, 100 if n <= slow else 1000) for n in range(1, n_steps + 1)]
    row = row_of(log(head + "\n".join(lines)))
    assert row["n_steps"] == str(n_timed) and row["spread_fraction"] == "0"


def test_one_slow_step_in_five_does_not_move_the_spread(log):
    head = (LOGS / "torchtitan.log").read_text().split("step:  1")[0]
    rates = [1000, 1010, 990, 1005, 100] * 4
    lines = [f"step: {n}  memory:  1GiB(1%)  tps: {rate}" for n, rate in enumerate(rates)]
    assert float(row_of(log(head + "\n".join(lines)))["spread_fraction"]) < 0.02


def test_a_run_without_steps_that_ran_out_of_memory_is_a_row(log):
    lines = (LOGS / "megatron.log").read_text().splitlines()
    text = "\n".join(line for line in lines if "iteration" not in line)
    row = row_of(log(text + "\ntorch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate"))
    assert row["status"] == "oom" and row["layout"] == "data=2,pipeline=4"


@pytest.mark.parametrize(
    ("log_format", "old", "new"),
    [
        ("torchtitan", "ffn_dim_multiplier=None", "ffn_dim_multiplier=1e400"),
        ("nanotron", "tp=2", "tp=2.5"),
        ("llm-foundry", "microbatch_size: 2", "microbatch_size: 1e400"),
        (
            "megatron",
            "hidden_size ..................................... 4096",
            "hidden_size .. 4097",
        ),
        ("deepspeed", "train_batch_size ............. 8", f"train_batch_size .. {'9' * 5000}"),
    ],
)
def test_impossible_numbers_are_one_line(log, log_format, old, new):
    text = (LOGS / f"{log_format}.log").read_text()
    assert old in text
    with pytest.raises(FileError, match=r"^.*run\.log: .*(not possible|a multiple of)"):
        row_of(log(text.replace(old, new)))


@pytest.mark.parametrize(
    "text", ["epoch 1 loss 3\n", '{"loss": 3}\n', 'is "median_step_seconds"\n']
)
def test_a_log_of_nothing_known_is_refused(log, text):
    with pytest.raises(
        FileError, match="not a log of a known format; give --log-format: run, launch, megatron"
    ):
        row_of(log(text))


def test_a_format_of_nothing_known_is_refused():
    with pytest.raises(FileError, match="no log is of the format 'megatrn'; did you mean"):
        row_of(LOGS / "megatron.log", log_format="megatrn")


def test_a_log_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "run.log"
    path.write_bytes((LOGS / "megatron.log").read_text().encode("utf-16"))
    with pytest.raises(FileError, match=r"run\.log, line 1: not UTF-8 text"):
        row_of(path)


def test_settings_of_a_launched_program_are_its_facts(log):
    settings = {
        "model": {"name": "my-tiny", "n_layers": 2, "hidden_size": 64, "n_heads": 4}
        | {"vocab_size": 1000},
        "engine": "axonn",
        "layout": {"x": 2, "y": 1, "z": 4, "data": 1},
        "global_batch": 8,
        "micro_batch": 1,
        "seq_len": 128,
        "dtype": "bf16",
    }
    steps = [f"step {n}: loss 5.1234, 0.{n}00 s" for n in range(1, 6)]
    row = row_of(log("\n".join([f"settings: {json.dumps(settings)}", *steps])))
    assert row["layout"] == "x=2,z=4" and row["gpus"] == "8" and row["engine"] == "axonn"
    assert row["model"] == "2-layers-of-64" and row["step_seconds"] == "0.4"


def test_every_format_but_those_of_this_tool_has_lines_of_a_real_log():
    assert set(FORMATS) - set(ROWS) == {"run", "launch", "csv"}


@pytest.mark.parametrize("start", ["iteration 1/ 1 |", "step: 1 ", "iter 1 step 1 |", "x ..... "])
def test_a_line_without_end_is_read_in_time(log, start):
    path = log("[titan] " + start * 20_000)
    (run,) = read_runs(path)
    assert run.step_seconds == ()


@pytest.mark.parametrize("log_format", [None, *FORMATS])
@pytest.mark.parametrize(
    "line",
    [
        "1" * 40_000,
        "[titan] Building device mesh with parallelism: " + "a" * 40_000,
        "[titan] Building llama3 8B with Arguments(" + "a" * 40_000 + ")",
    ],
)
def test_a_long_line_is_read_once(log_format, line, tmp_path):
    """40,000 digits took 90 s of processor time, when each of them began a match of its own."""
    path = tmp_path / "log"
    path.write_text(line)
    start = time.process_time()
    with suppress(FileError):
        read_runs(path, log_format)
    assert time.process_time() - start < 1.5
