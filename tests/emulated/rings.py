"""Every rank measures the bandwidth of each axis of a cluster, with all groups of it at once.

Rank 0 prints the rates as JSON.
"""

import json
import os
import sys

import torch

from axonn_tune.calibration.measure.links import Groups, time_collective, whole_bytes
from axonn_tune.calibration.measure.timing import Sampling
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.runtime.ranks.place import place_in_job
from axonn_tune.runtime.ranks.session import joined

# Long enough for latencies to hardly count, and for rings where more than two take part. An
# all-reduce moves each byte twice.
NBYTES = {"all_gather": 2**21, "all_reduce": 2**20}
SAMPLING = Sampling(sample_seconds=0.0, n_samples=3, max_seconds=0.0)
# All axes are measured so often, and the best counts: a host that is busy for some seconds can only
# make rings slower.
N_ROUNDS = 3


def main(kind, axes):
    place, device = place_in_job(os.environ), torch.device("cpu")
    with joined(place, device, 100.0):
        rounds = [[bandwidth(kind, *axis, device) for axis in axes] for _ in range(N_ROUNDS)]
    if place.rank == 0:
        print(json.dumps([max(found) for found in zip(*rounds, strict=True)]))


def bandwidth(kind, stride, size, device):
    """Return the bytes per second that each ring of an axis moves."""
    groups = Groups(stride, size, n_rings=stride, everywhere=True)
    mesh = groups.mesh(device)
    nbytes = whole_bytes(NBYTES[kind], size)
    seconds = time_collective(kind, nbytes, groups, mesh, SAMPLING).seconds
    mesh.close()
    return float(moved_fraction(kind, size)) * nbytes / seconds


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
