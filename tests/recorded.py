"""A recorded run by hand, for tests of what is made of it."""

from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.measurement import Measurement, Operation, Step

LAST_STEP = (
    Operation("forward.qkv.gemm", "compute", "gemm", 0.0, 100.0, 0.0, 0.25),
    Operation("forward.qkv.all_reduce", "x", "all_reduce", 64.0, 0.0, 0.25, 1.25),
    Operation("forward.qkv.gemm", "compute", "gemm", 0.0, 100.0, 1.25, 1.5),
    Operation("unknown", "compute", "memory_bound", 8.0, 0.0, 1.5, 1.5),
)


def step(seconds, gemm_seconds):
    operations = {"forward.qkv.gemm": gemm_seconds, "forward.qkv.all_reduce": 1.0, "unknown": 0.0}
    return Step(seconds, 6.0, 1.0, operations, {"forward.qkv.all_reduce": 1.0, "host": 0.1})


MEASUREMENT = Measurement(
    layout=grid_layout(2, 1, 1, 1),
    order="xyzd",
    micro_batch=1,
    recompute="none",
    steps=(step(90.0, 9.0), step(80.0, 9.0), step(2.0, 0.3), step(4.0, 0.5), step(3.0, 0.4)),
    last_step=LAST_STEP,
    peak_memory_bytes=2.0**30,
    memory_is_of_process=True,
    gemm_modes={"forward.qkv.gemm": "NT"},
    device_name="CPU, 2 cores",
    backend="gloo",
    software={"torch": "2.13.0"},
)
