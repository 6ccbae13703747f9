"""What the parser of a framework has refused is written as it accepts it, or refused in one line.

Each case was written by `launch`, and read by the parser of the framework itself: Megatron-LM at
core_v0.19.0 and d98e8a64, torchtitan 0.2.2, DeepSpeed 0.19.
"""

import json

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.errors import InputError
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_candidates


def written(model, n_gpus, layout, framework=None, train=None, machine="dgx-h100", **options):
    given = {"micro_batch": 1, "recompute": "none", "global_batch": 512, **options}
    chosen = best_of_layout(build_search(model, n_gpus, machine, **given), layout)
    return launch_files(chosen, framework, train)


def script_of(*given, **options):
    text = written(*given, strategy="megatron", **options)["launch.sbatch"]
    return " ".join(text.replace("\\\n", " ").split())


@pytest.mark.parametrize(("modules", "is_set"), [("core_attn,attn_proj", True), ("", False)])
def test_megatron_offloads_inputs_alone_with_a_variable(modules, is_set):
    """Offloading modules with Transformer Engine 2.10 is asserted to have NVTE_CPU_OFFLOAD_V1."""
    script = script_of("llama3-8b", 16, "tensor=2,data=8", offload_modules=modules)
    assert ("export NVTE_CPU_OFFLOAD_V1=1" in script) == is_set


def test_experts_overlap_in_a_pipeline_with_virtual_stages_only():
    options = {"strategy": "megatron", "overlaps_experts": True}
    with pytest.raises(InputError, match="overlap in a pipeline without virtual stages; allowed"):
        written("qwen3-30b-a3b", 64, "pipeline=4,data=16,expert=16", virtual_stages=1, **options)
    for layout, n_virtual in (("pipeline=4,data=16,expert=16", 2), ("data=64,expert=64", 1)):
        files = written("qwen3-30b-a3b", 64, layout, virtual_stages=n_virtual, **options)
        for flag in ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute"):
            assert flag in files["launch.sbatch"]
        assert "Install Transformer Engine 2.8 or newer" in files["launch.sbatch"]
    with pytest.raises(InputError, match="between ranks with other experts only"):
        written("qwen3-30b-a3b", 64, "data=64,expert=1", **options)
    plain = written("qwen3-30b-a3b", 64, "data=64,expert=64", strategy="megatron")
    assert "Transformer Engine" not in plain["launch.sbatch"]


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"mtp_modules": 2}, "with --mtp-modules 2; allowed: 0, 1, or --no-overlaps-experts"),
        ({"dtype": "fp32"}, "in fp32; allowed: --dtype bf16 or fp16, or --no-overlaps-experts"),
    ],
)
def test_experts_overlap_in_16_bits_and_with_one_module_at_most(options, culprit):
    given = ("qwen3-30b-a3b", 64, "data=64,expert=64")
    with pytest.raises(InputError, match=f"does not overlap {culprit}"):
        written(*given, strategy="megatron", overlaps_experts=True, **options)
    assert written(*given, strategy="megatron", overlaps_experts=False, **options)
    assert written(*given, strategy="megatron", overlaps_experts=True, mtp_modules=1)


def test_a_pipeline_with_overlapped_experts_is_suggested_with_virtual_stages_only():
    options = {"strategy": "megatron", "overlaps_experts": True, "fix": {"pipeline": 2}}
    options |= {"micro_batch": 1, "recompute": "none", "global_batch": 512, "include_oom": True}
    ranking = rank_candidates(build_search("qwen3-30b-a3b", 64, "dgx-h100", **options))
    assert set(ranking.table.n_virtual) == {2, 4}
    options["virtual_stages"] = 1
    alone = rank_candidates(build_search("qwen3-30b-a3b", 64, "dgx-h100", **options))
    assert set(alone.table.n_virtual) == {1}


def test_what_is_recomputed_as_a_whole_is_not_offloaded_in_part():
    given = ("qwen3-30b-a3b", 64, "data=64,expert=64")
    options = {"offload_modules": "expert_fc1,moe_act"}
    with pytest.raises(InputError, match="allowed: without expert_fc1, moe_act, or without --rec"):
        script_of(*given, recompute="selective:moe", **options)
    script = script_of(*given, recompute="selective:layernorm", **options)
    assert "--offload-modules expert_fc1 moe_act" in script


def test_experts_with_biases_are_not_split():
    options = {"strategy": "megatron", "split_experts": True}
    with pytest.raises(InputError, match="experts with biases split over tensor"):
        written("gpt-oss-120b", 64, "tensor=2,data=32,expert=32", **options)
    files = written("mixtral-8x7b", 64, "tensor=2,data=32,expert=8", **options)
    assert "--expert-tensor-parallel-size 2" in files["launch.sbatch"]
    assert written("gpt-oss-120b", 64, "tensor=1,data=64,expert=32", **options)


@pytest.mark.parametrize(("model", "is_single"), [("llama4-scout", True), ("mixtral-8x7b", False)])
def test_a_single_expert_is_weighed_among_all(model, is_single):
    script = script_of(model, 64, "tensor=4,data=16,expert=8")
    assert ("--moe-router-pre-softmax" in script) == is_single


@pytest.mark.parametrize(("layout", "n"), [("tensor=2,data=8", "1"), ("tensor=1,data=16", "32")])
def test_a_graph_of_a_step_is_asked_for_with_the_connections_that_are_asserted(layout, n):
    script = script_of("llama3-8b", 16, layout, engine="megatron-core-graphs")
    graph = "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad"
    assert graph in script and f"CUDA_DEVICE_MAX_CONNECTIONS={n} " in script
    assert "cuda-graph" not in script_of("llama3-8b", 16, layout)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        (
            {"offload_modules": "core_attn,attn_proj"},
            "offloads no modules in a CUDA graph of a whole step",
        ),
        ({"dropout": True, "recompute": "selective"}, "again in a CUDA graph, and recompute is se"),
        ({"dropout": True, "recompute": "selective:mlp"}, "allowed: none, full, or --engine meg"),
    ],
)
def test_a_graph_of_a_step_takes_only_what_it_can_hold(options, culprit):
    given = ("llama3-8b", 16, "tensor=2,data=8")
    with pytest.raises(InputError, match=culprit):
        script_of(*given, engine="megatron-core-graphs", **options)
    assert script_of(*given, **options)
    full = {"dropout": True, "recompute": "full"}
    assert "--cuda-graph-impl" in script_of(*given, engine="megatron-core-graphs", **full)


@pytest.mark.parametrize(
    ("dtype", "engine", "flag"),
    [
        ("fp16", "megatron-core", "--accumulate-allreduce-grads-in-fp32"),
        ("bf16", "nemo", "--grad-reduce-in-bf16"),
        ("bf16", "megatron-core", ""),
        ("fp16", "megatron-2021", ""),
        ("bf16", "megatron-2021", ""),
    ],
)
def test_gradients_have_the_type_that_was_predicted(dtype, engine, flag):
    """Megatron-LM sums gradients in fp32 with --bf16, and in fp16 with --fp16."""
    script = script_of("20b", 16, "tensor=2,data=8", dtype=dtype, engine=engine)
    flags = {"--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"}
    assert flags & set(script.split()) == ({flag} if flag else set())


def test_gpt_oss_has_its_own_gate_and_positions():
    script = script_of("gpt-oss-20b", 16, "data=16,expert=16")
    assert "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0" in script
    assert "--position-embedding-type yarn --rotary-scaling-factor 32" in script
    assert "--swiglu" not in script and "--position-embedding-type rope" not in script


@pytest.mark.parametrize("model", ["20b", "gpt-oss-20b"])
def test_several_tokens_are_predicted_with_rope_only(model):
    with pytest.raises(InputError, match=f"several tokens with rope or .* and gpt-.*{model[-3:]}"):
        script_of(model, 16, "data=16", mtp_modules=1)
    assert "--mtp-num-layers 1" in script_of("llama3-8b", 16, "data=16", mtp_modules=1)


def test_weights_in_8_bits_are_updated_on_the_host_after_delayed_scaling_only():
    options = {"offload": "optimizer", "low_weights": True}
    with pytest.raises(InputError, match="with --precision fp8-delayed only; allowed: --no-low-w"):
        script_of("llama3-8b", 16, "tensor=2,data=8", precision="fp8-current", **options)
    script = script_of("llama3-8b", 16, "tensor=2,data=8", precision="fp8-delayed", **options)
    assert "--optimizer-cpu-offload" in script and "--fp8-param-gather" in script


@pytest.mark.parametrize(
    ("model", "layout", "engine", "options", "culprit"),
    [
        ("llama3-70b", "tensor=4,shard=16", "torchtitan", {}, "layout with tensor=1"),
        ("llama3-70b", "shard=16,pipeline=4", "torchtitan", {}, "layout with pipeline=1"),
        ("llama3-8b", "context=4,shard=16", "fsdp2", {"context_kind": "ring"}, "with context=1"),
        ("qwen3-30b-a3b", "shard=64,ep=8", "torchtitan", {}, "layout with expert=1"),
        ("llama3-8b", "shard=64", "fsdp2", {"reduces_once": True}, "leave out --reduces-once"),
    ],
)
def test_megatron_fsdp_gets_no_layout_of_another_engine(model, layout, engine, options, culprit):
    given = {"strategy": "zero3", "engine": engine, **options}
    with pytest.raises(InputError, match=culprit):
        written(model, 64, layout, "megatron-fsdp", **given)


@pytest.mark.parametrize("framework", ["fsdp2", "deepspeed"])
def test_programs_without_stages_refuse_them(framework):
    given = ("llama3-70b", 64, "shard=16,pipeline=4", framework)
    options = {"strategy": "zero3", "engine": "torchtitan"}
    with pytest.raises(InputError, match=r"puts no layers into stages, .* with pipeline=1"):
        written(*given, **options)
    assert "mine.py" in written(*given, train="mine.py", **options)["launch.sbatch"]


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"dropout": True}, "torchtitan's models have no dropout"),
        ({"attention": "unfused"}, "attention is 'unfused'"),
        (
            {"engine": "megatron-fsdp", "offload_modules": "layers:5"},
            "--offload-modules layers:5: torchtitan has no options for it",
        ),
    ],
)
def test_torchtitan_gets_nothing_that_it_has_no_flag_for(options, culprit):
    given = {"strategy": "zero3", "engine": "torchtitan", **options}
    with pytest.raises(InputError, match=culprit):
        written("llama3-8b", 64, "shard=64", "torchtitan", **given)


def test_deepspeed_reads_how_many_ranks_share_a_sequence():
    options = {"strategy": "zero3", "engine": "deepspeed", "context_kind": "ulysses"}
    files = written("llama3-8b", 64, "context=4,shard=16", train="mine.py", **options)
    document = json.loads(files["ds_config.json"])
    assert (document["sequence_parallel_size"], document["data_parallel_size"]) == (4, 16)
    n_at_once = document["train_micro_batch_size_per_gpu"] * document["data_parallel_size"]
    assert document["train_batch_size"] == n_at_once * document["gradient_accumulation_steps"]
    whole = json.loads(written("llama3-8b", 64, "shard=64", **options)["ds_config.json"])
    assert "sequence_parallel_size" not in whole
