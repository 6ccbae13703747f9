"""DeepSpeed's own reader takes the `ds_config.json` that `launch` writes as it was predicted."""

import json

import pytest

from axonn_tune.api.searching import build_search
from axonn_tune.job_scripts.script import launch_files
from axonn_tune.search.one_layout import best_of_layout

pytest.importorskip("deepspeed")

CASES = {
    "zero1": ("5b", 16, "data=16", {"dtype": "fp16"}),
    "zero2": ("5b", 16, "data=16", {"micro_batch": 2}),
    "zero3": ("20b", 64, "shard=64", {"engine": "deepspeed", "offload": "optimizer"}),
    "zeropp": ("20b", 64, "secondary=8,across=8", {}),
}


class Mesh:
    """The mesh that deepspeed.initialize forms of the two sizes of a configuration."""

    def __init__(self, n_replicas):
        self.n_replicas = n_replicas

    def get_group(self, mesh_dim):
        assert mesh_dim == "data_parallel"
        return self.n_replicas


def read(monkeypatch, files, n_ranks):
    """Return DeepSpeed's configuration on one of many ranks."""
    from deepspeed.runtime import config

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(
        config.dist, "get_world_size", lambda group=None: n_ranks if group is None else group
    )
    document = json.loads(files["ds_config.json"])
    sizes = [document.get(f"{kind}_parallel_size") for kind in ("sequence", "data")]
    return config.DeepSpeedConfig(document, mesh_device=Mesh(sizes[1]) if all(sizes) else None)


def prediction_of(strategy, model, n_ranks, layout, **options):
    given = {"micro_batch": 1, "recompute": "full", "global_batch": 4 * n_ranks, **options}
    return best_of_layout(build_search(model, n_ranks, strategy=strategy, **given), layout)


@pytest.mark.parametrize("strategy", CASES)
def test_batches_and_stages_are_read_as_predicted(monkeypatch, strategy):
    model, n_ranks, layout, options = CASES[strategy]
    prediction = prediction_of(strategy, model, n_ranks, layout, **options)
    given = read(monkeypatch, launch_files(prediction, "deepspeed"), n_ranks)
    job = prediction.scenario.job
    assert given.train_batch_size == job.global_batch
    assert given.train_micro_batch_size_per_gpu == prediction.configuration.micro_batch
    assert given.gradient_accumulation_steps == prediction.n_microsteps
    types = {"fp16": given.float16_config.enabled, "bf16": given.bfloat16_config.enabled}
    assert [name for name, is_on in types.items() if is_on] == [job.dtype]
    zero = given.zero_config
    assert int(zero.stage) == {"zero1": 1, "zero2": 2}.get(strategy, 3)
    assert (zero.offload_optimizer is not None) == job.offloads_optimizer
    assert zero.zero_hpz_partition_size == prediction.layout.sizes.get("secondary", 1)
    assert zero.zero_quantized_weights == zero.zero_quantized_gradients == (strategy == "zeropp")


def test_ranks_that_share_a_sequence_are_no_replicas(monkeypatch):
    options = {"engine": "deepspeed", "context_kind": "ulysses"}
    prediction = prediction_of("zero3", "llama3-8b", 64, "context=4,shard=16", **options)
    files = launch_files(prediction, "deepspeed", "mine.py")
    given = read(monkeypatch, files, 64)
    assert given.world_size == 16
    assert given.gradient_accumulation_steps == prediction.n_microsteps
