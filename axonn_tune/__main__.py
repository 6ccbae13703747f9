"""Runs the command line as ``python -m axonn_tune``."""

from axonn_tune.cli.start import run

if __name__ == "__main__":
    run()
