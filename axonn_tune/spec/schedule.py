"""The names of the schedules of a pipeline."""

from __future__ import annotations

SCHEDULES = ONE_F_ONE_B, ZB_H1, DUALPIPE = ("1f1b", "zb-h1", "dualpipe")
