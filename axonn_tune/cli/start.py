"""Start the command line; an interrupt is silent from the first import to the last line.

This is what the script `axonn-tune` calls, so it imports nothing before it has to.
"""

from __future__ import annotations

import signal
import sys


def run() -> None:
    """Run the command line, as `main` does, and end with its exit code."""
    is_listening = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_listening:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
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
    sys.exit(code)


if __name__ == "__main__":
    run()
