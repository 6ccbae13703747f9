"""Ask the operating system for driver versions, environment variables and process start times."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_VERSION_FILES = {
    "NVIDIA driver": "/proc/driver/nvidia/version",
    "amdgpu driver": "/sys/module/amdgpu/version",
    "Linux": "/proc/sys/kernel/osrelease",
}
_RELEVANT_PREFIXES = (
    # Collective libraries, networks and their plugins read these.
    "NCCL_",
    "RCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "FI_",
    "MPICH_",
    "UCX_",
    # GPU runtimes read these.
    "CUDA_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "ROCM_",
    "GPU_",
    # Thread pools read these.
    "OMP_",
    "MKL_",
)


def drivers() -> dict[str, str]:
    """Return the versions of the kernel and of the GPU drivers that are installed, by name."""
    versions = {}
    for name, path in _VERSION_FILES.items():
        try:
            versions[name] = Path(path).read_text().splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return versions


def relevant_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables on which a measurement may depend."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_RELEVANT_PREFIXES)
    }


def process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since boot, or "" if there is no process.

    The time distinguishes the process from a later one with the same number. Source: proc(5),
    field 22 of /proc/[pid]/stat.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process of Linux exists and has not ended.

    A process that has ended has the state Z until its parent asks how. Source: proc(5), field 3.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
