"""Rows of a CSV file that state the same facts are the steps of one run."""

import pytest

from axonn_tune.errors import AxonnTuneError
from axonn_tune.io.runs import read_runs, table_row


@pytest.fixture
def csv_file(tmp_path):
    def write(text):
        path = tmp_path / "steps.csv"
        path.write_text(text)
        return path

    return write


def test_rows_with_the_same_facts_are_the_steps_of_one_run(csv_file):
    path = csv_file(
        "tp,dp,pp,mbs,gbs,step,step_time_ms,peak_memory_gib\n"
        "2,4,1,1,32,1,900,10\n2,4,1,1,32,2,500,12\n4,2,1,1,32,1,700,9\n2,4,1,1,32,3,510,11\n"
    )
    first, second = read_runs(path)
    assert first.step_seconds == pytest.approx((0.9, 0.5, 0.51))
    assert first.facts == {"layout": "tensor=2,data=4", "micro_batch": "1", "global_batch": "32"}
    assert first.memory_bytes == 12 * 2**30
    assert second.facts["layout"] == "tensor=4,data=2" and len(second.step_seconds) == 1
    row = table_row(first, "steps.csv", {"model": "tiny", "gpus": "8"}, warm_up=1).cells
    assert row["step_seconds"] == "0.505"


def test_the_user_names_columns(csv_file):
    path = csv_file("ranks,t (ms)\n8,500\n")
    (run,) = read_runs(path, columns={"gpus": "ranks", "step_seconds": "t (ms)"})
    assert run.facts == {"gpus": "8"} and run.step_seconds == (0.5,)


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("a,b\n1,2\n", {}, "no column of step times"),
        ("tp,step_time\n2,nan\n", {}, "row 1: the step time is 'nan'"),
        ("tp,step_time\n2,\n", {}, "row 1: the step time is ''"),
        ("tp,step_time\ntwo,1\n", {}, "row 1: tensor is 'two'"),
        ("tp,step_time\n2,1\n", {"gpus": "ranks"}, "no column 'ranks'; it has tp, step_time"),
        ("tp,step_time\n2,1\n", {"speed": "tp"}, "allowed before =: model"),
        ('tp,step_time\n"2\x00",1', {}, "steps.csv"),
    ],
)
def test_what_is_wrong_is_named(csv_file, text, columns, said):
    with pytest.raises(AxonnTuneError, match=said.replace("(", r"\(")):
        read_runs(csv_file(text), columns=columns)
