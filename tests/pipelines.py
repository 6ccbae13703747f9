"""Pipelines that are played from the first pass to the last, without extrapolation."""

import numpy as np

from axonn_tune.simulate import pipeline


def whole_seconds(n_stages, n_virtual, n_micro, seconds, transfer, schedule="1f1b", beside=None):
    """The time of every candidate's pipeline, of which no round is extrapolated."""
    per_flow = n_micro // 2 if schedule == "dualpipe" else n_micro
    order = pipeline._schedule(pipeline._Shape(schedule, n_stages, n_virtual, ()), per_flow)
    beside = np.zeros_like(transfer) if beside is None else beside
    durations = pipeline._durations(seconds, transfer, beside, seconds)
    whole, _, _ = pipeline._played(order, durations, beside)
    return whole
