"""Only Megatron-LM is told to recompute a part of the layers."""

import pytest

import axonn_tune
from axonn_tune.api import launch_search
from axonn_tune.errors import InputError

JOB = {"model": "llama3-70b", "gpus": 512, "machine": "dgx-h100", "global_batch": 512}


def test_megatron_gets_the_flags_of_its_block_method():
    files = axonn_tune.launch(
        **JOB, strategy="megatron", grid="tensor=4,pipeline=4,data=32", recompute="full:5"
    )
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 5"
    assert flags in "\n".join(files.values())


def test_other_frameworks_refuse_it():
    with pytest.raises(InputError, match=r"recompute is full:5; allowed .*: none, selective, full"):
        axonn_tune.launch(**JOB, grid="1x1x512x1", recompute="full:5")


@pytest.mark.parametrize(("strategy", "has_partial"), [("megatron", True), ("axonn", False)])
def test_what_launch_chooses_itself_can_be_launched(strategy, has_partial):
    assert launch_search(**JOB, strategy=strategy).partial_recompute == has_partial
