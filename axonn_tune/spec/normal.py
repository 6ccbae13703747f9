"""Numbers of the normal law by which scatter and intervals are stated."""

from __future__ import annotations

# Ratio of the standard deviation to the median of the absolute values.
NORMAL_FROM_MEDIAN = 1.4826
# Standard deviations from the middle to the ends of an interval of 90 %.
NORMAL_90 = 1.645
