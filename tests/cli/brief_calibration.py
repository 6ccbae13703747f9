"""The ``axonn-tune`` command, but ``calibrate`` measures each thing for a moment only."""

import os
import sys
from dataclasses import replace

from axonn_tune.calibration.measure.timing import Sampling
from axonn_tune.calibration.selection import quick_extent
from axonn_tune.cli.main import cli, main

BRIEF = replace(
    quick_extent(on_gpu=False),
    # Samples need not be long enough for ranks to take turns.
    sampling=Sampling(sample_seconds=1e-4, n_samples=3, max_seconds=1e-3, n_turns=0),
    gemm_sizes=(16, 64),
    copy_bytes=(2**12, 2**16),
    kernel_tokens=(64,),
    n_kernel_steps=1,
    most_bytes=2**16,
    sustain_seconds=0.05,
)
# There are so many copies that a test can interrupt them.
ENDLESS = replace(BRIEF, copy_bytes=tuple(range(2**12, 2**20, 8)))

if __name__ == "__main__":
    cli.context_settings["obj"] = ENDLESS if "ENDLESS" in os.environ else BRIEF
    main(sys.argv[1:])
