"""Judge the steps of hops inside a node by rings that leave it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from axonn_tune.calibration.expected import expected, groups_of
from axonn_tune.calibration.fit.steps import GATHERS
from axonn_tune.spec.machine import Machine


def with_hops_that_hold(machine: Machine) -> Machine:
    """Return the machine without steps of hops if that predicts rings between nodes better.

    Data that travel around a ring take the time of each hop. Where all ranks wait in each step for
    the slowest hop, the faster ones cost nothing. Steps of hops stay if no such ring was timed.
    """
    inner, *outer = machine.links
    if inner.hop_steps is None:
        return machine
    plain = replace(machine, links=(replace(inner, hop_steps=None), *outer))
    return machine if _error(machine) <= _error(plain) else plain


def _error(machine: Machine) -> float:
    """Return the mean error of the predicted rings that leave a node, as a logarithm.

    It is 0 if no such ring was timed.
    """
    rings = [
        ring
        for kind, stride, size in groups_of(machine.link_points)
        if kind in GATHERS and stride == 1 and size > machine.links[1].unit_ranks
        for ring in expected(machine, kind, stride, size, ())
    ]
    if not rings:
        return 0.0
    ratios = [ring.seconds / ring.measured_seconds for ring in rings if ring.measured_seconds]
    return float(np.abs(np.log(ratios)).mean())
