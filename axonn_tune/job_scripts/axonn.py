"""AxoNN: the arguments of ``ax.init`` and of ``optimize_communication``."""

from __future__ import annotations

from axonn_tune.job_scripts.facts import facts
from axonn_tune.spec.layout import LETTERS, PAPER_ORDER
from axonn_tune.step.prediction import Prediction

NAME = "axonn_init.py"

_TEMPLATE = '''"""AxoNN, {model} on {gpus} GPUs: `initialise`, then train in `overlapped(model)`."""

from axonn import axonn as ax
from axonn.intra_layer import optimize_communication

MICRO_BATCH = {micro_batch}  # sequences that one rank processes at once
MICRO_STEPS = {micro_steps}  # of gradient accumulation, for {global_batch} sequences in a step
RECOMPUTE = "{recompute}"


def initialise():
    """G_x is AxoNN's column group, G_y its row group, G_z its depth group."""
    ax.init(
        G_inter={inter},
        G_data={data},
        G_intra_r={rows},
        G_intra_c={columns},
        G_intra_d={depth},
        gpus_per_node={per_node},
    )


def overlapped(model):
    """The overlaps that the prediction assumed."""
    return optimize_communication(
        overlap_all_reduce={oar},
        overlap_reduce_scatter={ors},
        overlap_all_gather={oag},
        model_object_for_overlapping_allgathers=model,
    )
'''


def files(prediction: Prediction) -> dict[str, str]:
    """Return the module to import; its calls follow AxoNN's axonn/axonn.py and intra_layer/."""
    layout = prediction.layout
    scenario = prediction.scenario
    overlap = scenario.job.overlap
    text = _TEMPLATE.format(
        **facts(prediction),
        inter=layout.n_stages,
        data=layout.size("data"),
        rows=layout.size("y"),
        columns=layout.size("x"),
        depth=layout.size("z"),
        per_node=scenario.machine.ranks_per_node,
        oar=overlap.oar,
        ors=overlap.ors,
        oag=overlap.oag,
    )
    return {NAME: text}


def rank_lines(prediction: Prediction) -> list[str]:
    """Return shell lines that compute AxoNN's rank of each process, if its order is another one.

    AxoNN numbers X first, then Y, Z, data. The place of a process in the order of the prediction
    gives its coordinates, and these give its rank.
    """
    order = prediction.configuration.order
    if order == PAPER_ORDER:
        return []
    sizes = {letter: prediction.layout.size(axis) for axis, letter in LETTERS.items()}
    lines = [f"# The prediction has rank order {order}; AxoNN numbers xyzd."]
    lines.append("place=$SLURM_PROCID")
    for axis in order:
        lines.append(f"{axis}=$((place % {sizes[axis]})); place=$((place / {sizes[axis]}))")
    lines.append(f"export RANK=$((x + {sizes['x']} * (y + {sizes['y']} * (z + {sizes['z']} * d))))")
    return lines
