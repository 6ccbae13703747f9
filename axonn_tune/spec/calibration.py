"""The record of where, when and with what a profile was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from axonn_tune.spec.checks import require_count, require_positive

# Parts of a machine that a calibration measures.
PARTS = ("gemm", "memory", "links")


@dataclass(frozen=True)
class RankSpeed:
    """The speed at which one rank multiplied matrices, relative to the median rank."""

    rank: int
    host: str
    speed_fraction: float

    def __post_init__(self) -> None:
        require_positive(f"rank {self.rank}", "speed_fraction", self.speed_fraction)


@dataclass(frozen=True)
class Calibration:
    """The provenance of a calibrated profile.

    date
        Day and time in UTC, ISO 8601.
    command_line
        Command that made the profile.
    device_name
        Name of the GPU.
    backend
        Name of the communication backend.
    n_ranks
        Number of ranks that took part.
    hosts
        Name of each node.
    seconds
        Duration of the calibration.
    software
        Versions by name (torch, nccl, driver ...).
    environment
        Environment variables that change what was measured.
    speeds, notes
        Speed of each rank, and sentences that say what was left out and why.
    """

    date: str
    command_line: str
    device_name: str
    backend: str
    n_ranks: int
    hosts: tuple[str, ...]
    seconds: float
    software: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    speeds: tuple[RankSpeed, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_count("calibration", "n_ranks", self.n_ranks)
