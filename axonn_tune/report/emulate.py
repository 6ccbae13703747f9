"""What ``emulate --list`` shows: clusters that can be emulated."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.report.table import Column, table_of
from axonn_tune.spec.cluster import Cluster
from axonn_tune.units import format_quantity


def clusters_table(clusters: Sequence[Cluster]) -> str:
    """Return a table with one row per cluster."""
    columns: tuple[Column[Cluster], ...] = (
        ("cluster", lambda cluster: cluster.name),
        ("ranks", lambda cluster: cluster.n_ranks),
        ("per node", lambda cluster: cluster.ranks_per_node),
        ("links, innermost first", _links_text),
        ("description", lambda cluster: cluster.description),
    )
    return table_of(clusters, columns)


def _links_text(cluster: Cluster) -> str:
    return ", ".join(
        f"{level.name} {format_quantity(level.bandwidth_bytes_per_s, '_bytes_per_s')}"
        for level in cluster.levels
    )
