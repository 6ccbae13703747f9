"""Read timed matrix products from a table with a header: m, n, k and a time or a rate."""

from __future__ import annotations

import csv

from axonn_tune.errors import FileError, InputError
from axonn_tune.spec.points import GemmPoint

# Names that a column of times may have, and the seconds in its unit.
_TIME_UNITS = {
    "seconds": 1.0,
    "time_s": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "time_ms": 1e-3,
    "us": 1e-6,
    "time_us": 1e-6,
    "usec": 1e-6,
}
# Names that a column of rates may have.
_TFLOPS = ("tflops", "tflop/s", "tflops/s", "tflop_s")
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}


def is_gemm_csv(text: str) -> bool:
    """Return whether the first line that is not a comment names the columns m, n and k."""
    return {"m", "n", "k"} <= set(_header(text))


def parse_gemm_csv(text: str, path: str) -> tuple[GemmPoint, ...]:
    """Return the products (m x k) times (k x n), in row-major order, of a table.

    The mode (NN, NT or TN) stands in a column `mode`, or in `transa` and `transb`; it is NN if
    there is no such column. The column `dtype` may be missing, too: bf16 is assumed. Other
    columns are ignored.

    Raises
    ------
    FileError
        The table has no column of times or rates, or a value is not allowed in its column.
    """
    header = _header(text)
    time_columns = [name for name in header if name in _TIME_UNITS or name in _TFLOPS]
    if not time_columns:
        raise FileError(f"{path}: no column of times; allowed: seconds, ms, us or tflops")
    time_column = time_columns[0]
    points = []
    for number, line in _numbered_rows(text)[1:]:
        row = dict(zip(header, _cells(line), strict=False))
        try:
            m, n, k = (int(row[name]) for name in "mnk")
            value = float(row[time_column])
            if time_column in _TFLOPS:
                seconds = 2e-12 * m * n * k / value
            else:
                seconds = _TIME_UNITS[time_column] * value
            points.append(GemmPoint(m, n, k, _mode(row), _dtype(row), seconds))
        except (KeyError, ValueError, ZeroDivisionError, InputError) as error:
            raise FileError(f"{path}, line {number}: {error}") from None
    return tuple(points)


def _numbered_rows(text: str) -> list[tuple[int, str]]:
    """Return the header and the rows with their line numbers, without blanks and comments."""
    numbered = enumerate(text.splitlines(), 1)
    return [(i, line) for i, line in numbered if line.strip() and not line.startswith("#")]


def _header(text: str) -> list[str]:
    rows = _numbered_rows(text)
    return [name.lower() for name in _cells(rows[0][1])] if rows else []


def _cells(line: str) -> list[str]:
    separator = ";" if ";" in line else ","
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator))]


def _mode(row: dict[str, str]) -> str:
    if "mode" in row:
        return row["mode"].upper()
    letters = (row.get(name, "N").upper() for name in ("transa", "transb"))
    return "".join({"0": "N", "1": "T", "FALSE": "N", "TRUE": "T"}.get(c, c) for c in letters)


def _dtype(row: dict[str, str]) -> str:
    dtype = row.get("dtype", "bf16").lower()
    return _DTYPES.get(dtype, dtype)
