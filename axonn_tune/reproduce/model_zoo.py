"""Measured steps of Megatron-MoE-ModelZoo, which trains a mixture of experts with Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from axonn_tune.reproduce.bridge import layout_search, with_graphs_of_parts
from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, numbers, with_fused_loss
from axonn_tune.spec.precision import FULL

_MODEL = "qwen3-235b-a22b"


def model_zoo(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; some have CUDA graphs for parts of a layer, which are not predicted."""
    model = loaders.model(_MODEL)
    # Like the engine's, the router runs in fp32; the loss is Transformer Engine's
    # (model_configs/benchmarking/Qwen3-235B-A22B.yaml).
    engine = with_fused_loss(loaders.engine("megatron-core"))
    machines = {name: loaders.machine(name) for name in {row["machine"] for row in rows}}
    source = "yanring/Megatron-MoE-ModelZoo (MIT)"
    for row in rows:
        machine = machines[row["machine"]]
        has_graphs = bool(row["graphs"])
        assumed = ("network", "software") if has_graphs else ("network",)
        # The operations that the host issues to pair layers are fitted to the one such step.
        is_fitted = row["overlaps"] == "yes" and not has_graphs
        paper = Paper("Megatron-MoE-ModelZoo", source, machine, "table", assumed, is_fitted)
        is_low = row["precision"] != FULL
        search = layout_search(
            row,
            model,
            machine,
            with_graphs_of_parts(engine) if has_graphs else engine,
            # sbatch_benchmarking.sh: --fp8-param-gather, --exp-avg-dtype and --exp-avg-sq-dtype.
            low_weights=is_low,
            moments="bf16" if is_low else "fp32",
            offload_modules=row["offloaded"].replace("+", ","),
            overlaps_tensor=row["overlaps_tensor"] == "yes",
        )
        published = numbers(row, "step_seconds")
        is_long = int(row["seq_len"]) > model.seq_len
        group = "long sequences" if is_long else machine.name
        place = f"{row['gpus']} of {row['machine']}"
        subject = f"{model.name} on {place}, {row['precision']}, {row['seq_len']} tokens"
        yield paper.run(group, subject, search, published)
