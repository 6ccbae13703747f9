"""Every option of a search, a validation and a calibration, declared once.

`declaration` says what a declaration holds and makes parameters of it, `groups` declares the
options, and `commands` says which of them each command has.
"""

from __future__ import annotations

from axonn_tune.options.commands import CALIBRATION, REHEARSAL, RUN, SEARCH, VALIDATION
from axonn_tune.options.declaration import Declarations, Option, declared, defaults, with_options
from axonn_tune.options.groups import (
    USUAL_STRATEGY,
    CalibrationOptions,
    ComparisonOptions,
    ExecutionOptions,
    JobOptions,
    LayoutOptions,
    LoggedOptions,
    ProgressOptions,
    RankingOptions,
    SearchOptions,
    SubjectOptions,
    SwitchOptions,
    ValidationOptions,
)

__all__ = [
    "CALIBRATION",
    "REHEARSAL",
    "RUN",
    "SEARCH",
    "USUAL_STRATEGY",
    "VALIDATION",
    "CalibrationOptions",
    "ComparisonOptions",
    "Declarations",
    "ExecutionOptions",
    "JobOptions",
    "LayoutOptions",
    "LoggedOptions",
    "Option",
    "ProgressOptions",
    "RankingOptions",
    "SearchOptions",
    "SubjectOptions",
    "SwitchOptions",
    "ValidationOptions",
    "declared",
    "defaults",
    "with_options",
]
