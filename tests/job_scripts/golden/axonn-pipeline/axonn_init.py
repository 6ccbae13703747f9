"""AxoNN, gpt-20b on 64 GPUs: `initialise`, then train in `overlapped(model)`."""

from axonn import axonn as ax
from axonn.intra_layer import optimize_communication

MICRO_BATCH = 1  # sequences that one rank processes at once
MICRO_STEPS = 512  # of gradient accumulation, for 8192 sequences in a step
RECOMPUTE = "full"


def initialise():
    """G_x is AxoNN's column group, G_y its row group, G_z its depth group."""
    ax.init(
        G_inter=4,
        G_data=2,
        G_intra_r=1,
        G_intra_c=1,
        G_intra_d=8,
        gpus_per_node=4,
    )


def overlapped(model):
    """The overlaps that the prediction assumed."""
    return optimize_communication(
        overlap_all_reduce=True,
        overlap_reduce_scatter=True,
        overlap_all_gather=True,
        model_object_for_overlapping_allgathers=model,
    )
