"""What the Python functions take and return beyond what their commands do."""

import math

import pytest

import axonn_tune
from axonn_tune.errors import InputError
from axonn_tune.spec.layout import grid_layout


@pytest.mark.parametrize(
    "grid",
    [
        (1, 2, 16, 2),
        [1, 2, 16, 2],
        "1x2x16x2",
        "y=2,z=16,data=2",
        {"y": 2, "z": 16, "data": 2},
        grid_layout(1, 2, 16, 2),
    ],
    ids=str,
)
def test_a_layout_can_be_given_in_every_form(grid):
    assert axonn_tune.predict("20b", 64, grid).layout == grid_layout(1, 2, 16, 2)


def test_a_grid_of_the_wrong_length_is_refused():
    with pytest.raises(InputError, match="grid '2x4' is not four sizes"):
        axonn_tune.predict("20b", 8, (2, 4))


def test_axes_that_only_some_strategies_have_stay_whole_numbers():
    rivals = axonn_tune.compare("5b", 16, strategies=["axonn", "megatron"], recompute="full")
    axes = [name for name in rivals if name.startswith("g_")]
    assert {"g_x", "g_tensor"} <= set(axes)
    assert all(str(rivals[name].dtype).lower() == "int64" for name in axes)
    of_axonn = rivals.set_index("strategy").loc["axonn"]
    assert of_axonn.isna()["g_tensor"] and of_axonn["layout"].count("x") == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: axonn_tune.plan("tiny", 8, tokens=0), "tokens is 0"),
        (lambda: axonn_tune.plan("tiny", 8, tokens=math.inf), "tokens is inf"),
        (lambda: axonn_tune.plan("tiny", 8, tokens=math.nan), "tokens is nan"),
        (lambda: axonn_tune.plan("tiny", 8, deadline_seconds=0), "deadline_seconds is 0"),
        (lambda: axonn_tune.whatif("tiny", 8, by=0), "by is 0"),
        (lambda: axonn_tune.whatif("tiny", 8, by=0.5), "by is 0.5"),
        (lambda: axonn_tune.scale("tiny", []), "gpus is empty"),
        (
            lambda: axonn_tune.suggest("tiny", 8, strategy="megatron", virtual_stages=0),
            "virtual_stages is 0",
        ),
    ],
)
def test_numbers_that_cannot_be_are_named(call, said):
    with pytest.raises(InputError, match=said):
        call()
