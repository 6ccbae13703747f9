"""The ``axonn-tune`` command, but one rank fails in ``validate`` on one layout.

The environment says which rank (FAILING_RANK), on which layout (FAILING_GRID) and how (FAIL).
"""

import os
import signal
import sys
import time

from axonn_tune.cli.main import cli, main
from axonn_tune.runtime.run import build_trainer


def failing_trainer(request, device):
    is_here = os.environ["RANK"] == os.environ["FAILING_RANK"]
    if is_here and str(request.configuration.layout) == os.environ["FAILING_GRID"]:
        if os.environ["FAIL"] == "raise":
            raise MemoryError("no more pages")
        if os.environ["FAIL"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return build_trainer(request, device)


if __name__ == "__main__":  # ranks that it starts import this file
    cli.context_settings["obj"] = failing_trainer
    main(sys.argv[1:])
