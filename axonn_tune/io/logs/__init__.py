"""Read the logs of other benchmarks as measured points of a profile; `read_logs` is the entry.

`read` recognises a file. Logs go to `nccl_tests` (which also reads rccl-tests) or `osu`; tables
are parsed by `table` and go to `gemm_csv` or `collective_csv`. All but `gemm_csv` return a
`CollectiveLog`, whose timings `read` turns into points.
"""

from axonn_tune.io.logs.read import ImportedPoints, LogOptions, read_logs

__all__ = ["ImportedPoints", "LogOptions", "read_logs"]
