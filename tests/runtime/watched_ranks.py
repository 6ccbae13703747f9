"""Two ranks whose host waits for ever, as it does for a GPU, and one of which may fail.

Run: python watched_ranks.py raise|both|hang|stop|join
"""

import contextlib
import os
import signal
import sys
import time
from unittest import mock

from axonn_tune.errors import AxonnTuneError
from axonn_tune.runtime.ranks import session, watch
from axonn_tune.runtime.ranks.launch import launch


def wait_in_vain(how, place):
    with (
        mock.patch.object(session, "must_be_watched", return_value=True),
        mock.patch.object(watch, "GRACE_SECONDS", 2.0),
        join_in_vain() if how == "join" else contextlib.nullcontext(),
    ):
        try:
            with session.joined(
                place, session.pick_device("cpu", place), 4.0, on_loss=tell
            ) as alive:
                alive()
                if how == "both" or (how == "raise" and place.rank == 1):
                    raise ValueError("the disk is on fire")
                if how == "stop" and place.rank == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)
        except session.RankError as error:
            tell(f"can meet again: {error.can_meet_again}")
            raise


def join_in_vain():
    """Let the forming of the group wait for ever, as NCCL does for a rank that has died."""
    return mock.patch.object(
        session.dist, "init_process_group", side_effect=lambda *_, **__: time.sleep(600)
    )


def tell(text):
    print(text, flush=True)


if __name__ == "__main__":
    try:
        launch(wait_in_vain, sys.argv[1], 2, "cpu")
    except AxonnTuneError as error:
        print(f"axonn-tune: {error}", file=sys.stderr)
        sys.exit(2)
