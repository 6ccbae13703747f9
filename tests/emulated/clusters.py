"""Clusters of the shipped shapes whose links are faster, so that tests take less time."""

from dataclasses import replace

from axonn_tune.io.presets import load_cluster
from axonn_tune.io.yaml_files import save_yaml


def faster_cluster(name, factor, folder):
    """Write the spec of a shipped cluster with all rates times `factor`, and return its path."""
    cluster = load_cluster(name)
    levels = [
        replace(level, bandwidth_bytes_per_s=factor * level.bandwidth_bytes_per_s)
        for level in cluster.levels
    ]
    path = str(folder / f"{name}.yaml")
    save_yaml(path, replace(cluster, levels=tuple(levels)))
    return path
