"""What `launch` writes for torchtitan: a configuration in Python, or the flags of release 0.2.2.

The ConfigManager of torchtitan itself (0.2.2, 0.3.0 and b5bcd76c) has read what is written for 70
layouts. It is not installed here: the configuration is read with stand-ins that have its fields.
"""

import json
import sys
from dataclasses import dataclass, make_dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
from programs import FOLDER

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.io.presets import list_engines, list_models, load_model
from axonn_tune.job_scripts import torchtitan_flags
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.job_scripts.torchtitan import settings
from axonn_tune.job_scripts.torchtitan_flags import flags
from axonn_tune.job_scripts.torchtitan_models import FLAVORS
from axonn_tune.search.one_layout import best_of_layout


def prediction_of(model, layout, gpus=64, engine="torchtitan", **options):
    given = {"global_batch": 256, "micro_batch": 1, "recompute": "full", **options}
    search = build_search(model, gpus, "dgx-h100", strategy="zero3", engine=engine, **given)
    return best_of_layout(search, layout)


def values_of(prediction):
    pairs = [line.split() for line in flags(prediction)]
    return {pair[0].lstrip("-"): pair[1] if len(pair) > 1 else True for pair in pairs}


OLDER = "torchtitan-2025"
# Fields of the sections of torchtitan, of which 0.3.0 counts a batch in sequences and b5bcd76c in
# tokens (torchtitan/config/configs.py of both).
TRAINING = ("steps", "mixed_precision_param", "enable_cpu_offload", "disable_cuda_graphs")
PARALLELISM = (
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
)
OF_BATCHES = {
    "0.3.0": (
        ("seq_len", "local_batch_size", "global_batch_size"),
        "pipeline_parallel_microbatch_size",
    ),
    "b5bcd76c": (
        (
            "max_context_length",
            "num_tokens_per_microbatch_per_dp_rank",
            "num_tokens_per_train_step",
        ),
        "num_pp_microbatches",
    ),
}


def section(name, fields):
    """A section, which refuses other fields and whose fields are None unless they are given."""
    return make_dataclass(name, [(field, object, None) for field in fields], kw_only=True)


@dataclass
class Recipe:
    """What a recipe of Llama 3 405B returns: 8 bits, a part that is compiled, and profiles."""

    profiler: SimpleNamespace
    optimizer: str = "adamw"
    model_spec: str = "405B in 8 bits"


def read_by_torchtitan(monkeypatch, tmp_path, release, prediction):
    """The configuration that the written program returns to a torchtitan."""
    of_training, of_pipeline = OF_BATCHES[release]
    files = launch_files(prediction)
    flavor = json.loads(files["settings.json"])
    models = f"torchtitan.models.{flavor['module']}"
    config = {
        "CompileConfig": section("Compile", ("enable", "enable_async_tensor_parallel")),
        "ParallelismConfig": section("Parallelism", (*PARALLELISM, of_pipeline)),
        "TrainingConfig": section("Training", (*TRAINING, *of_training)),
    }
    policies = {
        name: SimpleNamespace(Config=section(name, ())) for name in ("FullAC", "SelectiveAC")
    }
    recipe = Recipe(SimpleNamespace(enable_profiling=True))
    for name, members in {
        "torchtitan": {},
        "torchtitan.config": config,
        "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": policies,
        "torchtitan.trainer": {"Trainer": SimpleNamespace(Config=Recipe)},
        "torchtitan.models": {},
        models: {"model_registry": lambda name: f"{name} in 16 bits"},
        f"{models}.config_registry": {flavor["recipe"]: lambda: recipe},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "torchtitan_job.py"
    names = {"__file__": str(program), "__name__": "torchtitan_job"}
    exec(compile(program.read_text(), program, "exec"), names)
    return names["job"]()


def given(part):
    """The fields of a section that were given."""
    return {name: value for name, value in vars(part).items() if value is not None}


def test_torchtitan_is_told_the_layout_and_the_step(monkeypatch, tmp_path):
    prediction = prediction_of("qwen3-30b-a3b", "shard=32,replica=2,ep=8", micro_batch=2)
    config = read_by_torchtitan(monkeypatch, tmp_path, "b5bcd76c", prediction)
    assert config.model_spec == "30B-A3B in 16 bits"
    assert given(config.training) == {
        "steps": 20,
        "mixed_precision_param": "bfloat16",
        "enable_cpu_offload": False,
        # Its usual exchange between experts waits for the host, which no graph holds.
        "disable_cuda_graphs": True,
        "max_context_length": 4096,
        "num_tokens_per_microbatch_per_dp_rank": 2 * 4096,
        "num_tokens_per_train_step": 256 * 4096,
    }
    assert given(config.parallelism) == {
        "data_parallel_shard_degree": 32,
        "data_parallel_replicate_degree": 2,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 8,
        "num_pp_microbatches": 1,
    }
    assert given(config.compile) == {"enable": True, "enable_async_tensor_parallel": False}
    assert type(config.activation_checkpoint).__name__ == "FullAC"
    assert config.optimizer == "adamw" and not config.profiler.enable_profiling


@pytest.mark.parametrize(
    ("release", "training", "pipeline"),
    [
        (
            "0.3.0",
            {"seq_len": 8192, "local_batch_size": 56, "global_batch_size": 224},
            {"pipeline_parallel_microbatch_size": 2},
        ),
        (
            "b5bcd76c",
            {
                "max_context_length": 8192,
                "num_tokens_per_microbatch_per_dp_rank": 2 * 8192,
                "num_tokens_per_train_step": 224 * 8192,
            },
            {"num_pp_microbatches": 28},
        ),
    ],
)
def test_all_micro_batches_go_through_a_pipeline_at_once(
    monkeypatch, tmp_path, release, training, pipeline
):
    layout = "tensor=8,shard=2,replica=2,pipeline=7"
    prediction = prediction_of(
        "llama3-405b", layout, 224, global_batch=224, micro_batch=2, virtual_stages=3
    )
    config = read_by_torchtitan(monkeypatch, tmp_path, release, prediction)
    assert given(config.training).items() >= training.items()
    assert config.training.disable_cuda_graphs
    assert given(config.parallelism).items() >= pipeline.items()
    assert config.model_spec == "405B in 16 bits"


@pytest.mark.parametrize(
    ("recompute", "policy"), [("none", None), ("selective", "SelectiveAC"), ("full", "FullAC")]
)
def test_a_policy_of_recomputation_is_a_class(monkeypatch, tmp_path, recompute, policy):
    prediction = prediction_of("llama3-8b", "tensor=4,shard=16", recompute=recompute)
    config = read_by_torchtitan(monkeypatch, tmp_path, "0.3.0", prediction)
    chosen = config.activation_checkpoint
    assert (chosen and type(chosen).__name__) == policy


@pytest.mark.parametrize(
    ("layout", "options", "is_graph"),
    [
        ("tensor=2,shard=32", {}, True),
        ("shard=16,pipeline=4", {"virtual_stages": 1}, False),
        ("shard=64", {"offload": "optimizer"}, False),
    ],
)
def test_a_graph_is_asked_for_where_nothing_waits_for_the_host(layout, options, is_graph):
    training = settings(prediction_of("llama3-8b", layout, **options))["training"]
    assert training["disable_cuda_graphs"] != is_graph
    assert training["enable_cpu_offload"] == ("offload" in options)


def test_the_script_names_the_configuration_that_stands_next_to_it():
    files = launch_files(prediction_of("llama3-8b", "shard=64"))
    script = files["launch.sbatch"].replace("\\\n  ", "")
    assert "python -m torchtitan.train --module torchtitan_job --config job" in script
    assert "torchtitan 0.3.0, or its main branch" in script and "--model." not in script
    assert files["torchtitan_job.py"] == (FOLDER / "torchtitan_job.py").read_text()
    mine = launch_files(prediction_of("llama3-8b", "shard=64"), train="mine.py")["launch.sbatch"]
    assert "python mine.py" in mine and "--module torchtitan_job" in mine


def test_engines_of_2024_and_2025_get_the_flags_of_their_release():
    older = {name for name in list_engines() if name.startswith("torchtitan-20")}
    assert older == set(torchtitan_flags.ENGINES)
    files = launch_files(prediction_of("llama3-8b", "shard=64", engine="torchtitan-2025"))
    assert "--model.flavor 8B" in files["launch.sbatch"] and len(files) == 2
    assert "finds torchtitan 0.2.2." in files["launch.sbatch"]
    # Another engine for this strategy is run by today's torchtitan.
    files = launch_files(prediction_of("llama3-8b", "shard=64", engine="fsdp2"), "torchtitan")
    assert "--config job" in files["launch.sbatch"]


def test_a_model_is_known_by_its_sizes():
    assert set(FLAVORS) <= set(list_models())
    assert all(flavor.equals(load_model(preset)) for preset, flavor in FLAVORS.items())
    llama = load_model("llama3-8b")
    renamed = replace(llama, name="Meta-Llama-3-8B")
    assert settings(prediction_of(renamed, "shard=64"))["flavor"] == "8B"
    for change in ({"n_layers": 30}, {"vocab_size": 64000}, {"n_heads": 64, "head_dim": 64}):
        with pytest.raises(InputError, match=r"model is 'llama3-8b'.*models with the sizes of"):
            settings(prediction_of(replace(llama, **change), "shard=64"))
    with pytest.raises(InputError, match="model is 'llama3-8b'"):
        flags(prediction_of(replace(llama, window=4096), "shard=64", engine="torchtitan-2025"))


def test_llama_4_is_in_the_older_release_only():
    with pytest.raises(InputError, match=r"with torchtitan since .*: models with the sizes of"):
        settings(prediction_of("llama4-scout", "shard=64,ep=8"))
    values = values_of(prediction_of("llama4-scout", "shard=64,ep=8", engine="torchtitan-2025"))
    assert values["model.flavor"] == "17bx16e"


def test_flags_say_the_layout_and_the_step():
    values = values_of(prediction_of("qwen3-30b-a3b", "shard=32,replica=2,ep=8", engine=OLDER))
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
        "parallelism.context_parallel_degree": "1",
        "parallelism.expert_parallel_degree": "8",
        "parallelism.expert_tensor_parallel_degree": "1",
        "activation_checkpoint.mode": "full",
        "compile.enable": True,
    }


def test_dense_layers_may_be_split_and_every_second_product_formed_again():
    options = {"recompute": "selective", "engine": OLDER}
    values = values_of(prediction_of("llama3-8b", "tensor=4,shard=16", **options))
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
    layout = ("llama3-405b", f"tensor=8,shard=2,replica=2,pipeline={n_stages}", 32 * n_stages)
    options = {"global_batch": 56 * 4, "virtual_stages": n_virtual}
    values = values_of(prediction_of(*layout, engine=OLDER, **options))
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
    # Later torchtitan cuts in the same way.
    del of_stages["microbatch_size"]
    later = settings(prediction_of(*layout, **options))["parallelism"]
    cut = {name.rpartition("pipeline_parallel_")[2]: str(later[name]) for name in later}
    assert cut.items() >= of_stages.items()


@pytest.mark.parametrize("read", [flags, settings])
@pytest.mark.parametrize(
    ("model", "options", "culprit"),
    [
        ("olmoe-1b-7b", {}, "model is 'olmoe-1b-7b'; allowed with torchtitan .*: .* of deepseek"),
        ("llama3-8b", {"recompute": "full:16"}, "recompute is 'full:16'"),
        ("llama3-8b", {"dtype": "fp16"}, "dtype is 'fp16'"),
        ("llama3-8b", {"reduces_once": True}, "reduces gradients in every micro-step"),
    ],
)
def test_what_torchtitan_does_not_run_is_refused(read, model, options, culprit):
    with pytest.raises(InputError, match=culprit):
        read(prediction_of(model, "shard=64", engine="fsdp2", **options))


@pytest.mark.parametrize(
    ("read", "refuses", "engine", "kind"),
    [(flags, settings, OLDER, "ring"), (settings, flags, "torchtitan", "all_gather")],
)
def test_sequences_are_shared_as_the_release_does(read, refuses, engine, kind):
    options = {"seq_len": 8192, "context_kind": kind, "engine": engine}
    shared = prediction_of("llama3-8b", "tensor=2,context=4,shard=8", **options)
    assert "context_parallel_degree" in str(read(shared))
    with pytest.raises(InputError, match=f"context_kind is '{kind}'"):
        refuses(shared)
    assert refuses(prediction_of("llama3-8b", "context=1,shard=64", **options))


def test_deepseek_v3_shares_no_sequences_in_the_older_release():
    options = {"seq_len": 8192, "context_kind": "ring", "engine": OLDER}
    with pytest.raises(InputError, match=r"context=4; allowed with torchtitan 0\.2\.2's deepseek"):
        flags(prediction_of("deepseek-v3", "context=4,shard=16,ep=8", **options))
    assert flags(prediction_of("deepseek-v3", "context=1,shard=64,ep=8", **options))
    options.update(context_kind="all_gather", engine="torchtitan")
    assert settings(prediction_of("deepseek-v3", "context=4,shard=16,ep=8", **options))


def test_the_longest_sequence_of_a_model_is_kept_to():
    assert settings(prediction_of("qwen3-30b-a3b", "shard=64,ep=8", seq_len=40960))
    longer = prediction_of("qwen3-30b-a3b", "shard=64,ep=8", seq_len=49152)
    with pytest.raises(InputError, match=r"--seq-len 49152; allowed .* 30B-A3B: at most 40960"):
        settings(longer)


def test_messages_beside_products_need_the_compiler():
    options = {"overlaps_tensor": True}
    compiled = prediction_of("llama3-8b", "tensor=2,shard=32", engine=OLDER, **options)
    assert values_of(compiled)["parallelism.enable_async_tensor_parallel"] is True
    later = prediction_of("llama3-8b", "tensor=2,shard=32", **options)
    assert settings(later)["compile"] == {"enable": True, "enable_async_tensor_parallel": True}
    alone = prediction_of("llama3-8b", "tensor=1,shard=64", **options)
    assert not settings(alone)["compile"]["enable_async_tensor_parallel"]
    eager = {"engine": "torchtitan-2024-eager", **options}
    with pytest.raises(InputError, match="--overlaps-tensor: torchtitan's compiler does it"):
        flags(prediction_of("llama3-8b", "tensor=2,shard=32", **eager))


def test_the_program_for_fsdp2_splits_no_sequences():
    options = {"engine": "fsdp2", "context_kind": "ring"}
    prediction = prediction_of("llama3-8b", "context=2,shard=32", **options)
    with pytest.raises(InputError, match="splits no sequences, and context=2"):
        launch_files(prediction, "fsdp2")
    assert launch_files(prediction, "fsdp2", "mine.py")
