"""What a calibration has measured, before anything is fitted to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.spec.calibration import RankSpeed
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint


@dataclass(frozen=True)
class MeasuredCluster:
    """The ranks of a calibration, and the times that they have measured.

    Parameters
    ----------
    memory_bytes : float
        Memory of one rank. [bytes]
    idle_bytes : float
        Memory that a rank holds without training. [bytes]
    n_per_node : int
        Number of ranks of a node.
    hosts : tuple of str
        Name of each node.
    units : tuple of int
        Number of ranks in the units whose boundaries slow links down, innermost first.
    level_names : tuple of str
        Names of the link levels, innermost first: one more than `units`.
    slowdowns : tuple of pairs
        Relative slowdown of a product during an all-reduce and of the all-reduce, by round.
    gap_seconds : float or None
        Time of the host between two kernels of a step; None where none were timed. [s]
    notes : tuple of str
        Remarks for the reader of the profile.
    seconds : float
        Time that all measurements took. [s]
    """

    device_name: str
    n_multiprocessors: int
    memory_bytes: float
    idle_bytes: float
    backend: str
    software: Mapping[str, str]
    n_ranks: int
    n_per_node: int
    hosts: tuple[str, ...]
    units: tuple[int, ...]
    level_names: tuple[str, ...]
    gemm_points: tuple[GemmPoint, ...]
    attention_points: tuple[AttentionPoint, ...]
    memory_points: tuple[MemoryPoint, ...]
    link_points: tuple[LinkPoint, ...]
    slowdowns: tuple[tuple[float, float], ...]
    gap_seconds: float | None
    speeds: tuple[RankSpeed, ...]
    notes: tuple[str, ...]
    seconds: float
