"""A hash of 64-bit integers in torch: values that depend on a place, not on an order of draws.

It is SplitMix64's finaliser (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators",
OOPSLA 2014). torch has no unsigned shift, so copies of the sign bit are masked away.
"""

from __future__ import annotations

import torch

_GOLDEN = -0x61C8864680B583EB  # 0x9e3779b97f4a7c15 as a signed number
_FIRST = -0x40A7B892E31B1A47  # 0xbf58476d1ce4e5b9
_SECOND = -0x6B2FB644ECCEEE15  # 0x94d049bb133111eb


def mix(values: torch.Tensor) -> torch.Tensor:
    """Hash int64 values, elementwise."""
    values = values * _GOLDEN
    values = (values ^ _shift_right(values, 30)) * _FIRST
    values = (values ^ _shift_right(values, 27)) * _SECOND
    return values ^ _shift_right(values, 31)


def unit_interval(hashed: torch.Tensor) -> torch.Tensor:
    """Map hashes to float64 values in (0, 1)."""
    return (_shift_right(hashed, 11).double() + 0.5) / 2.0**53


def _shift_right(values: torch.Tensor, n_bits: int) -> torch.Tensor:
    return (values >> n_bits) & ((1 << (64 - n_bits)) - 1)
