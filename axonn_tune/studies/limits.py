"""What a training run must not exceed: a deadline, and a budget of node-hours or GPU-hours."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_between, require_positive
from axonn_tune.spec.scenario import Scenario
from axonn_tune.units import HOUR_SECONDS

MOST_HOURS = 1e12  # those of ten million GPUs in ten years


@dataclass(frozen=True)
class Limits:
    """The limits of a run; None where there is none.

    deadline_seconds
        Time by which the run has to end.
    node_hours, gpu_hours
        The budget, in one of the two units.
    """

    deadline_seconds: float | None = None
    node_hours: float | None = None
    gpu_hours: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                require_positive("plan", field.name, value)
                if field.name != "deadline_seconds":
                    require_between("plan", field.name, value, 0.0, MOST_HOURS)
        if self.node_hours is not None and self.gpu_hours is not None:
            raise InputError("give either --node-hours or --gpu-hours, not both")

    @property
    def are_given(self) -> bool:
        """Whether there is any limit."""
        return self.deadline_seconds is not None or self.has_budget

    @property
    def has_budget(self) -> bool:
        """Whether there is a budget."""
        return self.node_hours is not None or self.gpu_hours is not None

    def budget_gpu_hours(self, ranks_per_node: int) -> float:
        """Return the budget in hours of a GPU of nodes that are used whole; infinite for none."""
        if self.node_hours is not None:
            return self.node_hours * ranks_per_node
        return math.inf if self.gpu_hours is None else self.gpu_hours

    def budget_seconds(self, scenario: Scenario) -> float:
        """Return how long the budget lasts on the nodes of a scenario; infinite for none."""
        if self.node_hours is not None:
            return self.node_hours / scenario.n_nodes * HOUR_SECONDS
        if self.gpu_hours is not None:
            return self.gpu_hours / scenario.job.n_gpus * HOUR_SECONDS
        return math.inf

    def seconds(self, scenario: Scenario) -> float:
        """Return the longest time that a run of a scenario may take; infinite for no limit."""
        deadline = math.inf if self.deadline_seconds is None else self.deadline_seconds
        return min(deadline, self.budget_seconds(scenario))
