"""What the products of a job cost in each number format that it has."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.cost.gemm import Products
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Gemm
from axonn_tune.spec.precision import TF32, TF32_FACTOR


@dataclass(frozen=True)
class PricedFormat:
    """The prices of products in a number format, which may be priced like another one.

    dtype
        Number type or format whose measurements and peak are taken.
    products
        Its products.
    kernel_tuning
        Whether the fastest of the three modes is chosen.
    factor
        Time of a product over that of a product in `dtype`, apart from its launch.
    """

    dtype: str
    products: Products
    kernel_tuning: bool
    factor: float = 1.0

    def seconds(self, gemm: Gemm, launch_seconds: float) -> Array:
        """Return the time of a product that a measurement would show."""
        seconds = self.products.seconds(gemm.m, gemm.n, gemm.k, gemm.mode, self.kernel_tuning)
        return seconds + (self.factor - 1.0) * (seconds - launch_seconds)

    def peak_flops_per_s(self, machine: Machine) -> float:
        """Return the GPU's advertised peak in the format."""
        return machine.gpu.peak_flops_per_s[self.dtype].value / self.factor


def priced_formats(machine: Machine, job: Job) -> dict[str, PricedFormat]:
    """Return the prices by the format of operands; the empty text stands for the job's type.

    The operands of low products are cast into the layout that they need: these products have no
    other modes to choose from.
    """
    products = Products(machine, job.dtype)
    formats = {
        "": PricedFormat(job.dtype, products, job.kernel_tuning),
        TF32: PricedFormat(job.dtype, products, job.kernel_tuning, TF32_FACTOR),
    }
    if job.recipe is not None:
        low = job.product_format
        formats[low] = PricedFormat(low, Products(machine, low), kernel_tuning=False)
    return formats
