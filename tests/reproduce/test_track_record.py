"""The track records in the package are those of a fresh reproduction."""

import math

import pytest

from axonn_tune.io.package_data import load_track_records
from axonn_tune.report.reproduce import reproduction_records, track_record_rows

TIMES = {"step_seconds", "pflops", "fraction_of_peak"}
RATES = {"tflops_per_gpu", "hardware_tflops_per_gpu", "tokens_per_second_per_gpu"}


@pytest.mark.slow
def test_the_file_is_up_to_date(reproduction):
    fresh = [{**row, "spread": float(row["spread"])} for row in track_record_rows(reproduction)]
    for row in fresh:
        row["mean_error_fraction"] = float(row["mean_error_fraction"])
    assert fresh == [vars(record) for record in load_track_records().records], (
        "run: axonn-tune reproduce --format track-records "
        "--output axonn_tune/reproduce/track_records.csv"
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["axonn", "zero3", "zeropp"])
def test_a_record_follows_from_the_rows_that_users_see(reproduction, strategy):
    """Runs to which a number was fitted are in the rows, and not in the record."""
    fitted = [("DeepSpeed ZeRO-3", "dgx-a100", "Narayanan"), ("AxoNN", "frontier-2024", "public")]
    ratios = [
        row["predicted"] / row["published"]
        for row in reproduction_records(reproduction)
        if row.get("strategy") == strategy
        and row["metric"] in TIMES | RATES
        and row["predicted"] is not None
        and (row["system"], row["machine"], row["source"].split()[0]) not in fitted
    ]
    records = [r for r in load_track_records().records if r.strategy == strategy]
    assert sum(r.n_runs for r in records) == len(ratios)
    assert sum(r.n_far for r in records) == sum(abs(ratio - 1) > 0.2 for ratio in ratios)
    squares = sum(r.n_runs * r.spread**2 for r in records)
    assert squares == pytest.approx(sum(math.log(ratio) ** 2 for ratio in ratios), rel=1e-2)
