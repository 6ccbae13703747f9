"""The base of the model's modules."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module whose parameters and parts are found as fast as any other attribute.

    Torch keeps them in tables of its own, which Python asks only after it has searched everywhere
    else. A step looks up dozens of them in each block.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value
