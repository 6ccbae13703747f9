"""Results survive whatever ends the work that finds them."""

import os
import resource

import pytest

from axonn_tune.errors import FileError
from axonn_tune.io.journal import MOST_ATTEMPTS, Journal, MeasurementJournal

ANEW = "delete it and leave --resume out to begin anew"
OWNER = {"device": "CPU", "nodes": ["a", "a"]}


@pytest.fixture
def journal(tmp_path):
    journal = Journal(str(tmp_path / "profile.yaml.partial"))
    journal.begin(OWNER)
    return journal


def test_results_are_kept_in_order(journal):
    journal.add("gemm 8x8x8", {"seconds": 1.5e-6})
    journal.add("pair 0, 1", 2.5e10)
    assert list(journal.read(OWNER).items()) == [
        ("gemm 8x8x8", {"seconds": 1.5e-6}),
        ("pair 0, 1", 2.5e10),
    ]
    journal.remove()
    assert not journal.exists()


def test_a_line_that_was_cut_short_is_measured_again(journal):
    journal.add("first", 1)
    with open(journal.path, "a") as file:
        file.write('{"key": "second", "resu')
    assert journal.read(OWNER) == {"first": 1}
    journal.add("third", 3)
    assert journal.read(OWNER) == {"first": 1, "third": 3}


def test_a_malformed_line_in_the_middle_is_named(journal):
    with open(journal.path, "a") as file:
        file.write("no JSON\n")
    journal.add("more", 1)
    with pytest.raises(FileError, match=f"line 2: malformed; {ANEW}"):
        journal.read(OWNER)


def test_the_journal_of_another_machine_is_refused(journal):
    with pytest.raises(
        FileError, match=rf"begun with nodes \['a', 'a'\]; here it is \['b'\]; {ANEW}"
    ):
        journal.read({**OWNER, "nodes": ["b"]})


def test_an_interrupted_calibration_is_not_overwritten(journal):
    with pytest.raises(FileError, match="--resume"):
        journal.begin(OWNER)


def test_what_is_no_journal_is_refused(tmp_path):
    path = tmp_path / "x.partial"
    with pytest.raises(FileError, match="nothing to resume"):
        Journal(str(path)).read(OWNER)
    for text in ("", "name: frontier\n", "[1]\n"):
        path.write_text(text)
        with pytest.raises(FileError, match=f"not the journal of .*; {ANEW}"):
            Journal(str(path)).read(OWNER)


def test_a_full_disk_is_reported_and_loses_nothing(journal):
    journal.add("first", 1)
    size = os.path.getsize(journal.path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        with pytest.raises(FileError, match="cannot be written"):
            journal.add("second", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert journal.read(OWNER) == {"first": 1}


def test_a_run_begins_and_ends_well_or_fails(journal):
    runs = MeasurementJournal(journal)
    for key in ("2x1x1x1", "1x2x1x1"):
        runs.begin(key)
    runs.keep_failure("2x1x1x1", "out of memory")
    assert runs.ended() == {"2x1x1x1": "out of memory"}
    assert runs.under_way() == ["1x2x1x1"]


def test_a_run_that_ends_the_job_again_and_again_counts_as_failed(journal):
    runs = MeasurementJournal(journal)
    for _ in range(MOST_ATTEMPTS):
        assert runs.ended() == {}
        runs.begin("2x1x1x1")
    assert runs.ended() == {"2x1x1x1": f"the job ended {MOST_ATTEMPTS} times while it ran"}


@pytest.mark.parametrize("output", ["/dev/null", "/dev/stdout", "/tmp"])
def test_a_journal_needs_a_file_beside_which_it_stands(output):
    with pytest.raises(
        FileError, match=f"{output} is not an ordinary file; allowed: one, beside which"
    ):
        Journal.beside(output)


def test_half_a_line_is_taken_back_when_the_disk_is_full(journal):
    size = os.path.getsize(journal.path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        with pytest.raises(FileError, match="cannot be written"):
            journal.add("first", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.path.getsize(journal.path) == size
    journal.add("second", 2)
    journal.add("third", 3)
    assert journal.read(OWNER) == {"second": 2, "third": 3}


@pytest.mark.parametrize(
    "head",
    ['{"owner": 5}', '{"owner": null}', "[" * 100_000, "9" * 5_000, '{"owner": {"a": NaN}}', "{}"],
    ids=lambda head: head[:20],
)
def test_a_damaged_head_is_no_journal(tmp_path, head):
    path = tmp_path / "x.partial"
    path.write_text(head + "\n")
    with pytest.raises(FileError, match="not the journal"):
        Journal(str(path)).read(OWNER)


@pytest.mark.parametrize(
    "entry",
    ["5", "null", '{"attempts": "x"}', '{"measurement": 5}', '{"measurement": {"grid": 5}}'],
)
def test_a_damaged_entry_is_named(journal, entry):
    with open(journal.path, "a") as file:
        file.write(f'{{"key": "1x2x1x1", "result": {entry}}}\n')
    with pytest.raises(FileError, match=r"profile\.yaml\.partial, '1x2x1x1': "):
        MeasurementJournal(journal).ended()


@pytest.mark.parametrize(
    "line", ['{"key": [1], "result": 1}', '{"key": 1, "result": 1}', "[" * 9999]
)
def test_a_damaged_line_is_named(journal, line):
    with open(journal.path, "a") as file:
        file.write(f"{line}\n")
    journal.add("more", 1)
    with pytest.raises(FileError, match="line 2: malformed"):
        journal.read(OWNER)
