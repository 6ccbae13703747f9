"""axonn-tune: which parallel layout trains a model fastest on a machine, how fast, and why."""

__version__ = "0.1.0"
