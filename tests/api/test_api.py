"""What the Python functions take and return beyond what their commands do."""

import math

import numpy as np
import pandas
import pytest

import axonn_tune
from axonn_tune.errors import InputError
from axonn_tune.spec.layout import Layout, grid_layout


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


def answers(tmp_path):
    """What the functions that return objects return, and presets, for one question."""
    table = tmp_path / "runs.csv"
    table.write_text(
        "model,gpus,layout,global_batch,engine,step_seconds\n"
        'llama3-8b,8,"tensor=2,data=4",64,megatron-core,9.1\n'
    )
    score = axonn_tune.score(table, machine="dgx-h100")
    explanation = axonn_tune.explain("tiny", 4, "1x1x2x2")
    return {
        "layout": grid_layout(1, 1, 2, 2),
        "model": axonn_tune.load_model("20b"),
        "machine": axonn_tune.load_machine("dgx-h100"),
        "prediction": axonn_tune.predict("5b", 4, "tensor=2,data=2", strategy="megatron"),
        "scenario": score.timed[0].prediction.scenario,
        "explanation": explanation,
        "score": score,
        "timed": score.timed[0],
        "judged": score.judged[0],
    }


def test_equal_answers_are_one_element_of_a_set(tmp_path):
    first, second = answers(tmp_path), answers(tmp_path)
    for name, answer in first.items():
        assert answer is not second[name] and len({answer, second[name]}) == 1, name
    others = {
        axonn_tune.predict("5b", 4, layout, strategy="megatron")
        for layout in ("tensor=4", "tensor=2,data=2", "data=2,tensor=2", "data=4")
    }
    assert len(others) == 3
    assert len({Layout({"tensor": 2, "data": 4}), Layout({"data": 4, "tensor": 2})}) == 1


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


def test_numbers_and_lists_of_tables_and_arrays_are_taken_as_plain_ones():
    (row,) = axonn_tune.suggest("20b", np.int64(64), top_n=np.int64(1)).to_dict("records")
    frame = pandas.DataFrame([row])
    again = axonn_tune.predict(
        "20b", 64, row["layout"], micro_batch=frame["micro_batch"][0], order=frame["order"][0]
    )
    assert again.step_seconds == pytest.approx(row["step_seconds"])
    gpus = np.array([8, 16])
    expected = axonn_tune.scale("tiny", [8, 16])
    for given in (gpus, pandas.Series(gpus)):
        assert axonn_tune.scale("tiny", given).equals(expected)
    fixed = axonn_tune.suggest("20b", 64, strategy="megatron", fix={"tensor": gpus[0]})
    assert set(fixed["g_tensor"]) == {8}
    names = pandas.Series(["axonn", "zero3"])
    assert set(axonn_tune.compare("tiny", 8, strategies=names)["strategy"]) == set(names)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: axonn_tune.launch("tiny", 8, sbatch="--account=x"),
            "launch: sbatch is '--account=x'; allowed: a list of texts",
        ),
        (
            lambda: axonn_tune.compare("tiny", 8, strategies="axonn"),
            "compare: strategies is 'axonn'; allowed: a list of texts",
        ),
        (
            lambda: axonn_tune.whatif("tiny", 8, None, "inter_node.bandwidth=2x"),
            "whatif: changes is 'inter_node.bandwidth=2x'; allowed: a list of texts",
        ),
        (lambda: axonn_tune.scale("tiny", 8), "gpus is 8; allowed: a list of whole numbers"),
        (
            lambda: axonn_tune.suggest("tiny", 8, dropout="no"),
            "suggest: dropout is 'no'; allowed: True or False",
        ),
        (
            lambda: axonn_tune.suggest("tiny", 8, recompute=["full"]),
            r"suggest: recompute is \['full'\]; allowed: a text",
        ),
        (lambda: axonn_tune.plan("tiny", 8, tokens="3e9"), "plan: tokens is '3e9'; allowed: a num"),
        (lambda: axonn_tune.predict("tiny", 8, None), "a layout is NoneType; allowed: a text"),
        (lambda: axonn_tune.suggest(None, 8), "the model is of the type NoneType; allowed: a name"),
        (
            lambda: axonn_tune.suggest("tiny", 8, 5),
            "the machine is of the type int; allowed: a name",
        ),
        (
            lambda: axonn_tune.score(pandas.DataFrame()),
            "the table is of the type DataFrame; allowed: a name or a path",
        ),
    ],
)
def test_values_of_another_kind_are_named(call, said):
    with pytest.raises(InputError, match=said):
        call()


def test_no_rows_are_refused_as_on_the_command_line():
    """An empty frame without columns came back, on which the next line of a notebook fails."""
    with pytest.raises(InputError, match="suggest: top_n is 0; allowed: a whole number, 1 to"):
        axonn_tune.suggest("tiny", 4, top_n=0)


def test_a_row_of_pandas_is_a_layout():
    """Its sizes were taken in their order, without their names."""
    row = pandas.Series({"z": 2, "data": 4})
    options = {"global_batch": 8, "machine": "perlmutter"}
    assert str(axonn_tune.predict("tiny", 8, grid=row, **options).layout) == "1x1x2x4"
    files = axonn_tune.launch("tiny", 8, grid=row, **options)
    assert "1x1x2x4" in files["launch.sbatch"]


def test_a_comparison_says_which_engines_cannot_do_the_job():
    frame = axonn_tune.compare(
        "llama3-8b", 8, "dgx-h100", engine="nanotron,megatron-core", precision="fp8"
    )
    assert list(frame["strategy"]) == ["megatron"]
    assert list(frame.attrs["left_out"].values()) == [["nanotron"]]
