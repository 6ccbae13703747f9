"""How much a product slows down while a collective runs, and the collective with it."""

from __future__ import annotations

import math
from statistics import fmean

import torch
import torch.distributed as dist

from axonn_tune.calibration.measure.links import AXIS, slowest
from axonn_tune.calibration.measure.shapes import DTYPES
from axonn_tune.runtime.axonn.gemm import synchronize
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.ranks.collectives import Collectives, wait
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.measurement import Operation

# The collective lasts at least as long as this many products, so that its ends hardly count.
PRODUCTS_PER_COLLECTIVE = 20
# Enough products are started for a collective that is slowed down by this factor.
COVER = 3.0
FIRST_BYTES = 2**18
# Edge of the square product, by type of device.
EDGES = {"cpu": 256, "cuda": 2048}


class SlowdownTimer:
    """Runs products and an all-reduce alone and together, on every rank at once.

    Parameters
    ----------
    mesh : Mesh
        The groups of its axis `AXIS` communicate.
    dtype : str
        Number format of the products.
    most_bytes : int
        Size of the largest message. [bytes]
    """

    def __init__(self, mesh: Mesh, dtype: str, most_bytes: int) -> None:
        device = mesh.device
        self._device = device
        self._recorder = Recorder(device)
        self._collectives = Collectives(mesh, self._recorder)
        edge = EDGES[device.type]
        self._a = torch.randn(edge, edge, device=device).to(DTYPES[dtype])
        self._b = torch.randn(edge, edge, device=device).to(DTYPES[dtype])
        self._out = torch.empty_like(self._a)
        self._message = torch.zeros(FIRST_BYTES // 4, device=device)
        self._run(PRODUCTS_PER_COLLECTIVE, with_message=True)  # warm-up
        while self._message.nbytes * 2 <= most_bytes:
            product, collective = (slowest(seconds, device) for seconds in self._alone())
            if collective >= PRODUCTS_PER_COLLECTIVE * product:
                break
            self._message = torch.zeros(2 * self._message.numel(), device=device)

    def slowdowns(self) -> tuple[float, float]:
        """Return the relative slowdown of products and of the all-reduce: together over alone, - 1.

        Both are means over the ranks; all ranks call it and get them.
        """
        product, collective = self._alone()
        n_products = math.ceil(COVER * slowest(collective / product, self._device)) + 1
        together = self._run(n_products, with_message=True)
        (message,) = (op for op in together if op.name == "collective")
        slowed_products = [
            op.seconds
            for op in together
            if op.name == "product"
            and op.start_seconds >= message.start_seconds
            and op.end_seconds <= message.end_seconds
        ]
        slowdowns = [
            fmean(slowed_products) / product - 1.0 if slowed_products else 0.0,
            message.seconds / collective - 1.0,
        ]
        means = torch.tensor(slowdowns, dtype=torch.float64, device=self._device)
        dist.all_reduce(means)
        product_mean, collective_mean = (means / dist.get_world_size()).clamp(min=0.0).tolist()
        return product_mean, collective_mean

    def _alone(self) -> tuple[float, float]:
        """Return the seconds of one product and of one all-reduce."""
        products = self._run(PRODUCTS_PER_COLLECTIVE, with_message=False)
        (message,) = self._run(0, with_message=True)
        return fmean(op.seconds for op in products), message.seconds

    def _run(self, n_products: int, with_message: bool) -> list[Operation]:
        synchronize(self._device)
        dist.barrier()
        self._recorder.start_step()
        work = None
        if with_message:
            work = self._collectives.all_reduce("collective", self._message, AXIS)
        for _ in range(n_products):
            with self._recorder.kernel("product", "gemm"):
                torch.mm(self._a, self._b, out=self._out)
        wait(work)
        synchronize(self._device)
        return self._recorder.take_step()
