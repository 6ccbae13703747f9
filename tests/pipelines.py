"""Pipelines that are played from the first pass to the last, without extrapolation."""

import numpy as np

from axonn_tune.simulate import pipeline
from axonn_tune.simulate.durations import PassSeconds, table_of_durations
from axonn_tune.simulate.pipeline_schedule import pipeline_schedule


def whole_seconds(shape, n_micro, seconds, transfer, beside=None):
    """The time of every candidate's pipeline, of which no round is extrapolated."""
    schedule = pipeline_schedule(shape, shape.per_flow(n_micro))
    beside = np.zeros_like(transfer) if beside is None else beside
    durations = table_of_durations(PassSeconds.equal(seconds), transfer, beside)
    whole, _, _ = pipeline._played(schedule, durations, beside)
    return whole
