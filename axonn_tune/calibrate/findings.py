"""What a calibration has found, before anything is fitted to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.spec.calibration import RankSpeed
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint


@dataclass(frozen=True)
class Findings:
    """What was measured, as raw as it is.

    memory_bytes: of one rank; idle_bytes: what it holds without training. n_per_node: ranks of
    a node. hosts: the name of each node. units: ranks of the units whose boundaries slow links
    down, innermost first. slowdowns: of a product beside an all-reduce, and of this beside
    products, by round. gap_seconds: host time between two kernels of a step.
    """

    device_name: str
    on_gpu: bool
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
