"""Start the command line; an interrupt is silent from the first import to the last line.

This is what the script `axonn-tune` calls, so it imports nothing before it has to.
"""

from __future__ import annotations

import gc
import signal
import sys

# New objects after which Python looks for cycles. Most objects of a command live until its end, so
# that Python's own 700 has it look through them dozens of times and free nothing.
OBJECTS_PER_COLLECTION = 100_000


def run() -> None:
    """Run the command line, as `main` does, and end with its exit code."""
    is_listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_listening:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.set_threshold(OBJECTS_PER_COLLECTION)
    from axonn_tune.cli.main import main

    if is_listening:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    finally:
        if is_listening:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The process ends: nothing is gained by looking for cycles among all of its objects.
        gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    run()
