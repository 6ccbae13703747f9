"""What this machine says of itself: drivers, processes, variables that change measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_DRIVERS = {
    "NVIDIA driver": "/proc/driver/nvidia/version",
    "amdgpu driver": "/sys/module/amdgpu/version",
    "Linux": "/proc/sys/kernel/osrelease",
}
# Of collective libraries, networks and their plugins, GPU runtimes, and threads.
_PREFIXES = (
    *("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "FI_", "MPICH_", "UCX_"),
    *("CUDA_", "HIP_", "ROCR_", "HSA_", "ROCM_", "GPU_", "OMP_", "MKL_"),
)


def drivers() -> dict[str, str]:
    """Versions by name, of those that are here."""
    found = {}
    for name, path in _DRIVERS.items():
        try:
            found[name] = Path(path).read_text().splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return found


def relevant_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that a measurement may depend on."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(_PREFIXES)}


def process_start(pid: int) -> str:
    """When a process started, in ticks since the system did; empty if there is none.

    Tells it from a later one of the same number. Source: proc(5), field 22 of stat.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
