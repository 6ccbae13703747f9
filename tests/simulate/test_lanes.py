"""Lanes of candidates that are played together although their groups lie on other links."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy

from axonn_tune.simulate.lanes import shared_lanes

GROUPS = ("x", "y", "z")
# Lanes are numbered from 1 and named after the first group on them; 0 is a group of one rank.
LANES = st.sampled_from([(0, 0, 0), (1, 1, 1), (1, 2, 2), (1, 0, 1), (0, 2, 3), (1, 2, 1)])


@given(
    st.lists(LANES, min_size=1, max_size=6),
    st.lists(st.sampled_from(range(3)), max_size=8),
    st.data(),
)
def test_lanes_of_candidates_together_are_free_when_those_of_each_alone_are(lanes, sends, data):
    lanes_of_groups = np.array(lanes).T
    axis_lanes, sharing = shared_lanes(GROUPS, lanes_of_groups)
    times = hypothesis_numpy.arrays(float, len(lanes), elements=st.floats(0.1, 1.0))
    together = {lane: np.zeros(len(lanes)) for lane in set(axis_lanes.values())}
    alone = [dict.fromkeys(own, 0.0) for own in lanes]
    for group in sends:
        lane = axis_lanes[GROUPS[group]]
        if not lane:
            continue
        taken = data.draw(times)
        noted = sharing.occupy(together, lane, together[lane] + taken)
        for i, own in enumerate(lanes):
            number = own[group]
            alone[i][number] = alone[i][number] + taken[i] if number else 0.0
            assert noted[i] == alone[i][number]
    for group, axis in enumerate(GROUPS):
        if axis_lanes[axis]:
            got = together[axis_lanes[axis]].tolist()
            assert got == [alone[i][own[group]] for i, own in enumerate(lanes)]
