"""Read the logs of other benchmarks as measured points of a profile; `read_logs` is the entry.

`read` recognises a file and hands it to `nccl_tests` (which also reads rccl-tests), `osu` or
`gemm_csv`. The first two return a `CollectiveLog`, whose timings `read` turns into points.
"""

from axonn_tune.io.logs.read import ImportedPoints, read_logs

__all__ = ["ImportedPoints", "read_logs"]
