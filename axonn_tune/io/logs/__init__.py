"""Logs of other benchmarks as measured points: nccl-tests, rccl-tests, OSU, GEMM tables."""
