"""What the engines that run AxoNN's algorithm do in their own way, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec.names import BACKWARD, RECOMPUTE
from axonn_tune.strategies.shapes import FP32_BYTES

# Ways in which gradients are summed: in buckets of some bytes, all of them in one call, or with a
# call for each parameter.
BUCKETS, WHOLE, PARAMETERS = "buckets", "whole", "parameters"


@dataclass(frozen=True)
class AxonnEngine:
    """The facts of one implementation; the defaults are those of the bundled runtime.

    Attributes
    ----------
    name
        Name of the engine.
    late_gathers
        Beginnings of the names of weights that are gathered when they are used, and not ahead.
    reuses_recomputed_weights
        Whether the backward pass uses the weights that recomputation has gathered.
    overlaps_backward
        Whether the overlaps of the job hold for the backward pass, too.
    awaits_scatters_at_end
        Whether the scatters of a micro-step are awaited at its end only.
    gathered_element_bytes
        Bytes of an element of a weight that is gathered; None for those of the job's type. A weight
        of another type is converted after it was gathered.
    reduction
        How gradients are summed: in `BUCKETS`, `WHOLE`, or by `PARAMETERS`.
    """

    name: str
    late_gathers: tuple[str, ...] = ()
    reuses_recomputed_weights: bool = False
    overlaps_backward: bool = True
    awaits_scatters_at_end: bool = False
    gathered_element_bytes: float | None = None
    reduction: str = BUCKETS

    def gathers_late(self, name: str) -> bool:
        """Return whether the weight with this name is gathered only when it is used."""
        return name.startswith(self.late_gathers)


BUNDLED = AxonnEngine("bundled runtime")
# axonn, branch add-timers-gordon-bell, and Megatron-AxoNN, branch gordon-bell-perlmutter (885d2e7):
# `save_for_backward` keeps the weight that the recomputed forward pass has gathered; gathers ahead
# begin anew in each block that is formed again; Megatron's DDP sums one contiguous fp32 buffer.
SC24 = AxonnEngine(
    "AxoNN of SC24",
    late_gathers=(f"{RECOMPUTE}.qkv",),
    reuses_recomputed_weights=True,
    awaits_scatters_at_end=True,
    reduction=WHOLE,
)
# axonn 0.2.0 (PyPI) in one context of its overlaps: gathers ahead follow the layers through one
# forward pass (intra_layer/overlap_communication.py); each parameter's gradient is summed on its
# own (intra_layer/__init__.py, sync_gradients).
AXONN_0_2 = AxonnEngine(
    "AxoNN 0.2.0",
    late_gathers=(RECOMPUTE, BACKWARD),
    awaits_scatters_at_end=True,
    reduction=PARAMETERS,
)
# axonn-ai/nanoGPT (d4d3fa1), train.py: parameters in fp32 under autocast, and the overlaps around
# the forward pass only.
NANOGPT = AxonnEngine(
    "nanoGPT on AxoNN",
    overlaps_backward=False,
    gathered_element_bytes=FP32_BYTES,
    reduction=PARAMETERS,
)

ENGINES = {"bundled": BUNDLED, "axonn": AXONN_0_2, "axonn-sc24": SC24, "nanogpt": NANOGPT}
