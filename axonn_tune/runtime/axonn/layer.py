"""The base of the model's modules."""

from __future__ import annotations

from typing import Any

from torch import nn


class Layer(nn.Module):
    """A module whose parameters and parts are found as fast as any other attribute.

    Torch finds them only after Python has searched everywhere else, which takes the host longer
    than to launch a view.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self.__dict__[name] = value
