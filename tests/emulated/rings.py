"""On every rank: bus bandwidth of each axis of a cluster, all its groups at once, as JSON."""

import json
import os
import sys

import torch

from axonn_tune.calibration.measure.links import Groups, time_collective, whole_bytes
from axonn_tune.calibration.measure.timing import Sampling
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.runtime.ranks.session import joined, place_in_job

# Long enough for latencies to hardly count, and for rings where more than two take part.
NBYTES = 2**21
SAMPLING = Sampling(sample_seconds=0.0, n_samples=3, max_seconds=0.0)


def main(kind, axes):
    place, device = place_in_job(os.environ), torch.device("cpu")
    with joined(place, device, 100.0):
        found = []
        for stride, size in axes:
            groups = Groups(stride, size, n_rings=stride, everywhere=True)
            mesh = groups.mesh(device)
            nbytes = whole_bytes(NBYTES, size)
            seconds = time_collective(kind, nbytes, groups, mesh, SAMPLING).seconds
            found.append(float(moved_fraction(kind, size)) * nbytes / seconds)
            mesh.close()
    if place.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
