"""The price of one kernel on a machine, as a search has it."""

from axonn_tune.cost.attention import AttentionPrices
from axonn_tune.cost.gemm import Products


def gemm_seconds(m, n, k, mode, machine, dtype, kernel_tuning):
    """The time of a product."""
    return Products(machine, dtype).seconds(m, n, k, mode, kernel_tuning)


def attention_seconds(operation, machine, dtype):
    """The time of attention."""
    return AttentionPrices(machine, dtype, Products(machine, dtype)).seconds(operation)
