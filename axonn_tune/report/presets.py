"""Models, machines and clusters as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from axonn_tune.report.text import key_values, table
from axonn_tune.spec.cluster import Cluster
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.provenance import quantities
from axonn_tune.units import format_count, format_quantity, gib


def models_table(models: Sequence[Model]) -> str:
    """One line per model."""
    rows = [
        [
            model.name,
            format_count(model.parameters),
            model.n_layers,
            model.hidden_size,
            model.n_heads,
            model.n_kv_heads,
            model.ffn_hidden_size,
            model.vocab_size,
            model.seq_len,
        ]
        for model in models
    ]
    headers = ["model", "parameters", "layers", "hidden", "heads", "KV heads", "MLP", "vocabulary"]
    return table(rows, [*headers, "sequence"])


def model_text(model: Model) -> str:
    """All fields of a model and what follows from them."""
    pairs = [(item.name, str(getattr(model, item.name))) for item in fields(model)]
    flops = model.model_flops(1.0, model.seq_len)
    pairs += [
        ("parameters", f"{model.parameters:.0f} ({format_count(model.parameters)})"),
        ("padded_vocab_size", str(model.padded_vocab_size)),
        ("model FLOPs per token", f"{flops:.4g} at sequence length {model.seq_len}"),
    ]
    return key_values(pairs)


def machines_table(machines: Sequence[Machine]) -> str:
    """One line per machine."""
    rows = [
        [
            machine.name,
            machine.gpu.name,
            f"{gib(machine.gpu.memory_bytes.value):.0f}",
            f"{max(_half_precision_peaks(machine)) * 1e-12:.1f}",
            machine.ranks_per_node,
            ", ".join(
                f"{link.name} {format_quantity(link.bandwidth_bytes_per_s.value, '_bytes_per_s')}"
                for link in machine.links
            ),
        ]
        for machine in machines
    ]
    headers = ["machine", "GPU", "GiB", "16-bit TFLOP/s", "per node", "links, innermost first"]
    return table(rows, headers)


def _half_precision_peaks(machine: Machine) -> list[float]:
    known = machine.gpu.peak_flops_per_s
    return [known[dtype].value for dtype in ("bf16", "fp16") if dtype in known] or [0.0]


def machine_text(machine: Machine) -> str:
    """Every number of a profile with its origin and source."""
    n_points = len(machine.gemm.points)
    rows = [
        [name, format_quantity(q.value, name), q.origin, q.source]
        for name, q in quantities(machine)
    ]
    widths = ", ".join(
        f"{tile.rows}x{tile.columns} at {tile.speed_fraction:g}" for tile in machine.gemm.tiles
    )
    head = key_values(
        [
            ("machine", machine.name),
            ("description", machine.description),
            ("GPU", f"{machine.gpu.name}, {machine.gpu.n_multiprocessors} multiprocessors"),
            ("GPUs per node", str(machine.ranks_per_node)),
            ("GEMM tiles", widths),
            ("measured GEMM points", str(n_points)),
        ]
    )
    return f"{head}\n\n{table(rows, ['quantity', 'value', 'origin', 'source'])}"


def clusters_table(clusters: Sequence[Cluster]) -> str:
    """One line per cluster to emulate."""
    rows = [
        [
            cluster.name,
            cluster.n_ranks,
            cluster.ranks_per_node,
            ", ".join(
                f"{level.name} {format_quantity(level.bandwidth_bytes_per_s, '_bytes_per_s')}"
                for level in cluster.levels
            ),
            cluster.description,
        ]
        for cluster in clusters
    ]
    return table(rows, ["cluster", "ranks", "per node", "links, innermost first", "description"])
