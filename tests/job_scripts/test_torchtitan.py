"""What `launch` writes for torchtitan."""

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import list_models
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.job_scripts.torchtitan import MODELS, flags
from axonn_tune.search.one_layout import best_of_layout


def prediction_of(model, layout, gpus=64, engine="torchtitan", **options):
    given = {"global_batch": 256, "micro_batch": 1, "recompute": "full", **options}
    search = build_search(model, gpus, "dgx-h100", strategy="zero3", engine=engine, **given)
    return best_of_layout(search, layout)


def values_of(prediction):
    pairs = [line.split() for line in flags(prediction)]
    return {pair[0].lstrip("-"): pair[1] if len(pair) > 1 else True for pair in pairs}


def test_flags_say_the_layout_and_the_step():
    values = values_of(prediction_of("qwen3-30b-a3b", "shard=32,replica=2,ep=8"))
    assert values == {
        "model.name": "qwen3",
        "model.flavor": "30B-A3B",
        "training.steps": "20",
        "training.seq_len": "4096",
        "training.local_batch_size": "1",
        "training.global_batch_size": "256",
        "training.mixed_precision_param": "bfloat16",
        "parallelism.data_parallel_shard_degree": "32",
        "parallelism.data_parallel_replicate_degree": "2",
        "parallelism.tensor_parallel_degree": "1",
        "parallelism.expert_parallel_degree": "8",
        "parallelism.expert_tensor_parallel_degree": "1",
        "activation_checkpoint.mode": "full",
        "compile.enable": True,
    }


def test_dense_layers_may_be_split_and_every_second_product_formed_again():
    values = values_of(prediction_of("llama3-8b", "tensor=4,shard=16", recompute="selective"))
    assert values["parallelism.tensor_parallel_degree"] == "4"
    assert values["activation_checkpoint.selective_ac_option"] == "op"
    assert "parallelism.expert_tensor_parallel_degree" not in values
    eager = prediction_of("llama3-8b", "shard=64", engine="torchtitan-2024-eager")
    assert "compile.enable" not in values_of(eager)


@pytest.mark.parametrize(
    ("n_virtual", "schedule", "layers", "fewer_at_ends"),
    [(1, "1F1B", "16", "1"), (2, "Interleaved1F1B", "8", "1"), (3, "Interleaved1F1B", "6", "0")],
)
def test_stages_have_the_layers_that_were_predicted(n_virtual, schedule, layers, fewer_at_ends):
    n_stages = 7 if n_virtual == 3 else 8
    prediction = prediction_of(
        "llama3-405b",
        f"tensor=8,shard=2,replica=2,pipeline={n_stages}",
        gpus=32 * n_stages,
        global_batch=56 * 4,
        virtual_stages=n_virtual,
    )
    values = values_of(prediction)
    of_stages = {
        name.rpartition("pipeline_parallel_")[2]: value
        for name, value in values.items()
        if "pipeline" in name
    }
    assert of_stages == {
        "degree": str(n_stages),
        "schedule": schedule,
        "microbatch_size": "1",
        "layers_per_stage": layers,
        "first_stage_less_layers": fewer_at_ends,
        "last_stage_less_layers": fewer_at_ends,
    }
    # All micro-batches of a step go through the pipeline at once.
    assert values["training.local_batch_size"] == "56"


def test_the_job_script_starts_its_program():
    prediction = prediction_of("llama3-8b", "shard=64")
    script = launch_files(prediction, "torchtitan")["launch.sbatch"]
    assert "python -m torchtitan.train" in script and "--model.flavor 8B" in script
    assert "python mine.py" in launch_files(prediction, "torchtitan", "mine.py")["launch.sbatch"]


def test_every_model_is_a_preset():
    assert set(MODELS) <= set(list_models())


@pytest.mark.parametrize(
    ("model", "options", "culprit"),
    [
        (
            "olmoe-1b-7b",
            {},
            "model is 'olmoe-1b-7b'; allowed with --framework torchtitan: deepseek",
        ),
        ("llama3-8b", {"recompute": "full:16"}, "recompute is 'full:16'"),
        ("llama3-8b", {"dtype": "fp16"}, "dtype is 'fp16'"),
        ("llama3-8b", {"reduces_once": True}, "reduces gradients in every micro-step"),
    ],
)
def test_what_torchtitan_does_not_run_is_refused(model, options, culprit):
    with pytest.raises(InputError, match=culprit):
        flags(prediction_of(model, "shard=64", engine="fsdp2", **options))


def test_shared_sequences_and_asynchronous_messages_have_flags():
    options = {"context_kind": "all_gather", "overlaps_tensor": True, "seq_len": 8192}
    values = values_of(prediction_of("llama3-8b", "tensor=2,context=4,shard=8", **options))
    assert values["parallelism.context_parallel_degree"] == "4"
    assert values["parallelism.enable_async_tensor_parallel"] is True
    plain = values_of(prediction_of("llama3-8b", "tensor=1,context=1,shard=64", **options))
    assert not {"context_parallel_degree", "enable_async_tensor_parallel"} & {
        name.rpartition(".")[2] for name in plain
    }


def test_the_program_for_fsdp2_splits_no_sequences():
    options = {"engine": "fsdp2", "context_kind": "ring"}
    prediction = prediction_of("llama3-8b", "context=2,shard=32", **options)
    with pytest.raises(InputError, match="splits no sequences, and context=2"):
        launch_files(prediction, "fsdp2")
    assert launch_files(prediction, "fsdp2", "mine.py")
