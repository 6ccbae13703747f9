"""Read timed matrix products from a table with a header: m, n, k and a time or a rate."""

from __future__ import annotations

import csv

from axonn_tune.errors import FileError, InputError
from axonn_tune.spec.points import GemmPoint

# Names that a column of times or rates may have, and what turns it into seconds.
_SECONDS = {"seconds": 1.0, "time_s": 1.0, "s": 1.0}
_SECONDS |= {"ms": 1e-3, "time_ms": 1e-3, "us": 1e-6, "time_us": 1e-6, "usec": 1e-6}
_TFLOPS = ("tflops", "tflop/s", "tflops/s", "tflop_s")
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}


def is_gemm_csv(text: str) -> bool:
    """Whether the first line that is no comment names the columns m, n and k."""
    header = _header(text)
    return {"m", "n", "k"} <= set(header)


def _lines(text: str) -> list[tuple[int, str]]:
    numbered = enumerate(text.splitlines(), 1)
    return [(i, line) for i, line in numbered if line.strip() and not line.startswith("#")]


def _cells(line: str) -> list[str]:
    separator = ";" if ";" in line else ","
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator))]


def _header(text: str) -> list[str]:
    lines = _lines(text)
    return [name.lower() for name in _cells(lines[0][1])] if lines else []


def parse_gemm_csv(text: str, path: str) -> tuple[GemmPoint, ...]:
    """Row-major products; a column `mode` (NN, NT, TN), or `transa` and `transb`; `dtype`.

    Without these NN and bf16. Other columns are ignored.

    Raises
    ------
    FileError
        A column is missing, or a value is not what its column holds.
    """
    header = _header(text)
    times = [name for name in header if name in _SECONDS or name in _TFLOPS]
    if not times:
        raise FileError(f"{path}: no column of times; allowed: seconds, ms, us or tflops")
    points = []
    for number, line in _lines(text)[1:]:
        row = dict(zip(header, _cells(line), strict=False))
        try:
            m, n, k = (int(row[name]) for name in "mnk")
            value = float(row[times[0]])
            rate = times[0] in _TFLOPS
            seconds = 2e-12 * m * n * k / value if rate else _SECONDS[times[0]] * value
            points.append(GemmPoint(m, n, k, _mode(row), _dtype(row), seconds))
        except (KeyError, ValueError, ZeroDivisionError, InputError) as error:
            raise FileError(f"{path}, line {number}: {error}") from None
    return tuple(points)


def _mode(row: dict[str, str]) -> str:
    if "mode" in row:
        return row["mode"].upper()
    letters = (row.get(name, "N").upper() for name in ("transa", "transb"))
    return "".join({"0": "N", "1": "T", "FALSE": "N", "TRUE": "T"}.get(c, c) for c in letters)


def _dtype(row: dict[str, str]) -> str:
    dtype = row.get("dtype", "bf16").lower()
    return _DTYPES.get(dtype, dtype)
