"""Every framework is told to recompute a part of the layers."""

import json

import pytest

import axonn_tune

JOB = {"model": "llama3-70b", "gpus": 512, "machine": "dgx-h100", "global_batch": 512}


def test_megatron_gets_the_flags_of_its_block_method():
    files = axonn_tune.launch(
        **JOB, strategy="megatron", grid="tensor=4,pipeline=4,data=32", recompute="full:5"
    )
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 5"
    assert flags in "\n".join(files.values())


@pytest.mark.parametrize(("strategy", "grid"), [("axonn", "1x1x512x1"), ("zero3", "shard=512")])
def test_programs_read_it_in_their_settings(strategy, grid):
    files = axonn_tune.launch(**JOB, strategy=strategy, grid=grid, recompute="full:5")
    assert json.loads(files["settings.json"])["recompute"] == "full:5"
