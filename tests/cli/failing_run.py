"""Train on 2 ranks as ``axonn-tune run`` does, but let rank 1 fail at the third step.

Run: python failing_run.py raise|kill|hang
"""

import os
import signal
import sys
import time
from functools import partial

from axonn_tune.errors import AxonnTuneError
from axonn_tune.io.presets import load_model
from axonn_tune.runtime.ranks.launch import launch
from axonn_tune.runtime.request import RunRequest
from axonn_tune.runtime.run import build_trainer, execute
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import grid_layout


class FailingTrainer:
    def __init__(self, trainer, how):
        self._trainer, self._how = trainer, how

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def step(self, index):
        if index == 2 and os.environ["RANK"] == "1":
            if self._how == "raise":
                raise ValueError("the disk is on fire")
            if self._how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)
        return self._trainer.step(index)


def failing_trainer(how, request, device):
    return FailingTrainer(build_trainer(request, device), how)


def main():
    request = RunRequest(
        model=load_model("tiny"),
        job=Job(n_gpus=2, global_batch=2, seq_len=16, dtype="fp32"),
        configuration=Configuration(grid_layout(1, 1, 1, 2)),
        n_steps=5,
        timeout_seconds=4.0,
        quiet=True,
    )
    factory = partial(failing_trainer, sys.argv[1])
    try:
        launch(partial(execute, factory=factory), request, 2, "cpu")
    except AxonnTuneError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
