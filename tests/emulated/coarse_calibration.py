"""The ``axonn-tune`` command, but ``calibrate`` measures half as many messages and small products.

What a search needs is measured beside them, as always.
"""

import sys
from dataclasses import replace

from axonn_tune.calibration.selection import quick_extent
from axonn_tune.cli.main import cli, main

COARSE = replace(quick_extent(on_gpu=False), message_growth=16, gemm_sizes=(128, 512))

if __name__ == "__main__":
    cli.context_settings["obj"] = COARSE
    main(sys.argv[1:])
