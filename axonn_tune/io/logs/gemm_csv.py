"""Read timed matrix products from a table: m, n, k and a time or a rate."""

from __future__ import annotations

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.logs.table import TIME_UNITS, Table, count_in, number_in
from axonn_tune.spec.points import GemmPoint

# Names that a column of rates may have.
_TFLOPS = ("tflops", "tflop/s", "tflops/s", "tflop_s")
_DTYPE_COLUMNS = ("dtype", "gemm_dtype")
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}


def is_gemm_table(table: Table) -> bool:
    """Return whether a table names the columns m, n and k."""
    return table.has_columns(("m",), ("n",), ("k",))


def gemm_points(table: Table) -> tuple[GemmPoint, ...]:
    """Return the products (m x k) times (k x n), in row-major order, of a table.

    The mode (NN, NT or TN) stands in a column `mode`, or in `transa` and `transb`; it is NN if
    there is no such column. The column `dtype` may be missing, too: bf16 is assumed. Other
    columns are ignored.

    Raises
    ------
    FileError
        The table has no column of times or rates, or a value is not allowed in its column.
    """
    time_columns = [name for name in table.columns if name in TIME_UNITS or name in _TFLOPS]
    if not time_columns:
        raise FileError(f"{table.path}: no column of times; allowed: seconds, ms, us or tflops")
    time_column = time_columns[0]
    points = []
    for number, row in table.rows:
        try:
            m, n, k = (count_in(row, name) for name in "mnk")
            value = number_in(row, time_column)
            if time_column in _TFLOPS:
                seconds = 2e-12 * m * n * k / value
            else:
                seconds = TIME_UNITS[time_column] * value
            points.append(GemmPoint(m, n, k, _mode(row), _dtype(row), seconds))
        except (ValueError, InputError) as error:
            raise FileError(f"{table.path}, line {number}: {error}") from None
    return tuple(points)


def _mode(row: dict[str, str]) -> str:
    if "mode" in row:
        return row["mode"].upper()
    letters = (row.get(name, "N").upper() for name in ("transa", "transb"))
    return "".join({"0": "N", "1": "T", "FALSE": "N", "TRUE": "T"}.get(c, c) for c in letters)


def _dtype(row: dict[str, str]) -> str:
    dtype = next((row[name].lower() for name in _DTYPE_COLUMNS if name in row), "bf16")
    return _DTYPES.get(dtype, dtype)
