"""Units: what is read, what is refused, and that printing reads back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.errors import InputError
from axonn_tune.units import (
    counted,
    format_count,
    format_quantity,
    format_seconds,
    gib,
    parse_count,
    parse_quantity,
    parse_size,
    suffix_of,
)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("25 GB/s", "bandwidth_bytes_per_s", 25e9),
        ("25GB/s", "bandwidth_bytes_per_s", 25e9),
        ("  1.555 TB/s ", "bandwidth_bytes_per_s", 1.555e12),
        ("1 GiB/s", "bandwidth_bytes_per_s", 2.0**30),
        ("40 GB", "memory_bytes", 40e9),
        ("40 GiB", "memory_bytes", 40 * 2.0**30),
        ("512 kB", "memory_bytes", 512e3),
        ("3 MB", "memory_bytes", 3e6),
        ("2 PB", "memory_bytes", 2e15),
        ("3 KiB", "memory_bytes", 3072.0),
        ("3 MiB", "memory_bytes", 3 * 2.0**20),
        ("3 TiB", "memory_bytes", 3 * 2.0**40),
        ("7 ns", "latency_seconds", 7e-9),
        ("1 h", "latency_seconds", 3600.0),
        ("7 B", "memory_bytes", 7.0),
        ("312 TFLOP/s", "peak_flops_per_s", 312e12),
        ("1.1 EFLOP/s", "peak_flops_per_s", 1.1e18),
        ("5 us", "latency_seconds", 5e-6),
        ("5 µs", "latency_seconds", 5e-6),
        ("1.5 ms", "latency_seconds", 1.5e-3),
        ("2 min", "latency_seconds", 120.0),
        ("85%", "memory_fraction", 0.85),
        ("2e11", "bandwidth_bytes_per_s", 2e11),
        (".5", "memory_fraction", 0.5),
        (2e11, "bandwidth_bytes_per_s", 2e11),
        (3, "k_overhead", 3.0),
    ],
)
def test_a_quantity_is_read_as_si(text: str | float, field: str, value: float) -> None:
    assert parse_quantity(text, field) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "field", "part"),
    [
        ("25 Gb/s", "bandwidth_bytes_per_s", "bits: divide by 8 and write GB"),
        ("200 Gbit/s", "bandwidth_bytes_per_s", "bits"),
        ("200 Gbps", "bandwidth_bytes_per_s", "bits"),
        ("25 GB", "bandwidth_bytes_per_s", "25 GB/s"),
        ("25 GB/s", "memory_bytes", "40 GB"),
        ("25 gb/s", "bandwidth_bytes_per_s", "unit 'gb/s'"),
        ("5 GB", "latency_seconds", "5 us"),
        ("fast", "latency_seconds", "not a number"),
        ("", "latency_seconds", "not a number"),
        ("1,5 s", "latency_seconds", "not a number"),
        ("5 us", "k_overhead", "unit 'us'"),
        ("-", "k_overhead", "not a number"),
    ],
)
def test_a_wrong_unit_is_refused_with_a_hint(text: str, field: str, part: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_quantity(text, field)
    assert str(caught.value).startswith(f"{field}: ")
    assert part in str(caught.value)


@pytest.mark.parametrize("value", [True, None, [1], {}])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(InputError, match="expected a number"):
        parse_quantity(value, "memory_bytes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "suffix"),
    [
        ("bandwidth_bytes_per_s", "_bytes_per_s"),
        ("memory_bytes", "_bytes"),
        ("peak_flops_per_s", "_flops_per_s"),
        ("step_seconds", "_seconds"),
        ("jitter_fraction", "_fraction"),
        ("n_layers", None),
    ],
)
def test_the_name_of_a_field_fixes_its_unit(field: str, suffix: str | None) -> None:
    assert suffix_of(field) == suffix


@given(
    st.floats(min_value=1e-9, max_value=1e17),
    st.sampled_from(["bandwidth_bytes_per_s", "memory_bytes", "peak_flops_per_s", "a_seconds"]),
)
def test_printing_reads_back(value: float, field: str) -> None:
    again = parse_quantity(format_quantity(value, field, digits=17), field)
    assert math.isclose(again, value, rel_tol=1e-14)


@pytest.mark.parametrize(
    ("value", "field", "text"),
    [
        (2.5e10, "bandwidth_bytes_per_s", "25 GB/s"),
        (312e12, "peak_flops_per_s", "312 TFLOP/s"),
        (999.0, "memory_bytes", "999 B"),
        (1e3, "memory_bytes", "1 kB"),
        (0.0123, "step_seconds", "12.3 ms"),
        (0.87, "sustained_fraction", "0.87"),
    ],
)
def test_a_quantity_is_printed_with_its_unit(value: float, field: str, text: str) -> None:
    assert format_quantity(value, field) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5, "2.5 s"), (3e-6, "3 us"), (4e-9, "4 ns"), (math.inf, "inf s")],
)
def test_seconds_are_printed_in_a_fitting_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_and_gib() -> None:
    assert format_count(8.0e10) == "80B"
    assert format_count(1.008e12) == "1.008T"
    assert format_count(12) == "12"
    assert gib(3 * 2.0**30) == 3.0


@pytest.mark.parametrize(
    ("text", "value"),
    [("2T", 2e12), ("300B", 300e9), (" 1.5k ", 1500.0), ("3e11", 3e11), (".5M", 5e5)],
)
def test_a_count_is_read(text: str, value: float) -> None:
    assert parse_count(text, "--tokens") == pytest.approx(value, rel=1e-15)


def test_sizes_are_read_as_whole_bytes() -> None:
    assert parse_size("64 MiB", "--message") == 64 * 2**20
    assert parse_size("1.5 kB", "--message") == 1500


def test_errors_of_counts_and_sizes_name_their_owner() -> None:
    with pytest.raises(InputError, match=r"^--tokens: 'many' is not a count"):
        parse_count("many", "--tokens")
    with pytest.raises(InputError, match=r"^--message: unit 'Mb' .*bits"):
        parse_size("64 Mb", "--message")


def test_one_thing_is_singular():
    assert [counted(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
