"""Tables of timed matrix products become points."""

from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.errors import FileError
from axonn_tune.spec.points import GemmPoint

TABLE = Path(__file__).parents[2] / "data" / "gemm.csv"


def test_products_from_a_table(read_files):
    points = read_files(TABLE).gemm_points
    assert [replace(point, seconds=1.0) for point in points] == [
        GemmPoint(1024, 1024, 1024, "NT", "fp16", 1.0),
        GemmPoint(4096, 4096, 4096, "TN", "bf16", 1.0),
    ]
    assert [point.seconds for point in points] == pytest.approx([1e-5, 5.5e-4])


def test_products_that_beat_the_peak_are_warned_of(read):
    """A column in milliseconds that was named us is a thousand times too fast."""
    imported = read("m,n,k,us\n4096,4096,4096,0.6\n8192,8192,8192,5000\n")
    (warning,) = imported.warnings
    assert "1 of 2 products in bf16 are faster than the peak" in warning
    assert len(imported.gemm_points) == 2


def test_rates_become_seconds(read):
    (point,) = read("m,n,k,tflops\n1000,1000,1000,200\n").gemm_points
    assert (point.mode, point.dtype, point.seconds) == ("NN", "bf16", pytest.approx(1e-5))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("m,n,k\n1,2,3\n", "no column of times"),
        ("m,n,k,us\n1,2,many,4\n", "line 2: k is 'many'; allowed: a whole number above 0"),
        ("m,n,k,us,mode\n1,2,3,4,XX\n", "line 2: .*mode is 'XX'"),
        ("m,n,k,tflops\n1,2,3,0\n", "line 2: tflops is '0'; allowed: a number above 0"),
        ("m,n,k,us\n1,2\n", "line 2: the row is cut short: it has no cell in column 'k'"),
    ],
)
def test_bad_tables_are_named(read, text, complaint):
    with pytest.raises(FileError, match=rf"run\.log.*{complaint}"):
        read(text)
