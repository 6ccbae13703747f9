"""Track records: joining keeps every run, and the nearest runs that are enough are chosen."""

import math
from itertools import permutations

import pytest

from axonn_tune.io.presets import list_machines, load_machine
from axonn_tune.spec.track_record import LEAST_RUNS, TrackRecord, TrackRecords, joined


def record_of(ratios, strategy="s", engine="e", gpu="g", kind=""):
    """The record of runs with these ratios of predicted to published."""
    errors = [abs(ratio - 1) for ratio in ratios]
    return TrackRecord(
        strategy,
        engine,
        gpu,
        len(ratios),
        sum(error > 0.2 for error in errors),
        sum(errors) / len(errors),
        math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios)),
        kind,
    )


def test_a_joined_record_is_that_of_all_runs():
    parts = [record_of([1.1, 0.7]), record_of([1.5]), record_of([0.9, 1.0, 2.0], gpu="h")]
    whole = record_of([1.1, 0.7, 1.5, 0.9, 1.0, 2.0], gpu="")
    for ordered in permutations(parts):
        both = joined(ordered)
        assert vars(both) == pytest.approx(vars(whole))
    assert joined([]) is None


@pytest.mark.parametrize(
    ("wanted", "n_runs", "engine", "gpu"),
    [
        (("a", "x", "A100"), 3, "x", "A100"),
        (("a", "x", "H100"), 5, "x", ""),
        (("a", "x", "V100"), 5, "x", ""),
        (("a", "y", "V100"), 4, "", "V100"),
        (("a", "y", "H100"), 9, "", ""),
        (("a", "z", "B200"), 9, "", ""),
        (("b", "", "A100"), None, "", ""),
        (("c", "", "A100"), None, "", ""),
    ],
)
def test_the_nearest_runs_that_are_enough_count(wanted, n_runs, engine, gpu):
    records = TrackRecords(
        (
            record_of([1.0] * 3, "a", "x", "A100"),
            record_of([1.0] * 2, "a", "x", "V100"),
            record_of([1.0] * 2, "a", "y", "V100"),
            record_of([1.0] * 2, "a", "w", "H100"),
            record_of([1.0] * (LEAST_RUNS - 1), "b", "", "A100"),
        )
    )
    found = records.of(*wanted)
    if n_runs is None:
        assert found is None
    else:
        assert (found.n_runs, found.engine, found.gpu) == (n_runs, engine, gpu)


@pytest.mark.parametrize(
    ("kind", "n_runs", "shared"), [("", 4, ""), ("experts", 3, "experts"), ("low precision", 9, "")]
)
def test_runs_of_the_same_kind_count_before_nearer_ones(kind, n_runs, shared):
    records = TrackRecords(
        (
            record_of([1.0] * 4, gpu="A100"),
            record_of([1.0] * 3, gpu="B200", kind="experts"),
            record_of([1.0] * 2, gpu="A100", kind="low precision"),
        )
    )
    found = records.of("s", "e", "H100", kind)
    assert (found.n_runs, found.kind) == (n_runs, shared)


def test_what_was_never_compared_is_trusted_like_the_worst():
    records = TrackRecords((record_of([1.1] * 9, "a"), record_of([2.0, 0.5], "b")))
    assert records.largest_spread == pytest.approx(math.log(2.0))
    assert TrackRecords().largest_spread == 0.0


def test_families_of_gpus():
    families = {load_machine(name).gpu.family for name in list_machines()}
    of_nvidia = {"V100", "A100", "H100", "H200", "H800", "GH200", "B200", "B300", "GB200", "GB300"}
    assert families == of_nvidia | {"MI250X", "MI300X", "MI325X", "MI350X", "MI355X"}
