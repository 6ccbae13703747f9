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


def test_runs_that_differ_in_precision_or_attention_are_two(csv_file):
    path = csv_file(
        "tp,precision,attention,step_seconds\n2,bf16,flash,2.1\n2,fp8-current,flash,1.1\n"
        "2,bf16,unfused,3.1\n"
    )
    runs = read_runs(path, columns={"precision": "precision"})
    assert [run.facts["precision"] for run in runs] == ["bf16", "fp8-current", "bf16"]
    assert [run.step_seconds for run in runs] == [(2.1,), (1.1,), (3.1,)]


def test_a_run_that_ran_out_of_memory_has_no_time(csv_file):
    path = csv_file("tp,status,step_seconds\n2,oom,1\n4,OOM,\n8,ok,2\n")
    runs = read_runs(path)
    assert [run.step_seconds for run in runs] == [(), (), (2.0,)]
    given = {"model": "tiny", "gpus": "8", "global_batch": "8"}
    rows = [table_row(run, "steps.csv", given, warm_up=0).cells for run in runs]
    assert [row["status"] for row in rows] == ["oom", "oom", "ok"]


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
        ("tp,status,step_time\n2,lost,1\n", {}, "row 1: status is 'lost'; allowed: ok, oom"),
    ],
)
def test_what_is_wrong_is_named(csv_file, text, columns, said):
    with pytest.raises(AxonnTuneError, match=said.replace("(", r"\(")):
        read_runs(csv_file(text), columns=columns)
