"""Layouts: the number of ranks along each axis of a strategy, and the orders of the axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from types import MappingProxyType

from axonn_tune.errors import InputError

AXES = ("x", "y", "z", "data")
PIPELINE = "pipeline"
TENSOR = "tensor"
# The axis whose ranks share a sequence.
CONTEXT = "context"
# The axis that divides the ranks of other axes anew, for experts, and the group of ranks that hold
# the same experts.
EXPERT = "expert"
EXPERT_REPLICAS = "expert_replicas"
# Other names that users give to axes.
ALIASES = {"tp": TENSOR, "cp": CONTEXT, "dp": "data", "pp": PIPELINE, "ep": EXPERT}
PAPER_ORDER = "xyzd"
# Letter of each axis of a grid in the text of a rank order.
LETTERS = {"x": "x", "y": "y", "z": "z", "data": "d"}
# The axis that varies fastest with the rank number stands first; the paper's order comes first.
ORDERS = tuple("".join(letters) for letters in permutations(PAPER_ORDER))


@dataclass(frozen=True)
class Axes:
    """The axes along which a strategy arranges its ranks.

    names
        The axes in rank order, the fastest varying first.
    batch
        The axes that split the global batch.
    groups
        The groups over which collectives run: axes, or products of neighbouring axes such as
        ``context*data``.
    folded
        The product of neighbouring axes whose ranks the axis `EXPERT` divides anew, beginning with
        the fastest varying of them (Megatron's parallel folding, arXiv 2504.14960); empty where
        there is no such axis. `EXPERT` is a group then, and so is `EXPERT_REPLICAS`.
    """

    names: tuple[str, ...]
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    folded: str = ""

    @property
    def sized(self) -> tuple[str, ...]:
        """The axes that have a size in a layout: those that arrange ranks, and the folded one."""
        return (*self.names, EXPERT) if self.folded else self.names

    @property
    def is_grid(self) -> bool:
        """Whether layouts are AxoNN's grids, with or without a pipeline."""
        return set(AXES) <= set(self.names) <= {*AXES, PIPELINE}

    @property
    def has_orders(self) -> bool:
        """Whether the rank order is part of a configuration, as it is for the four axes alone."""
        return self.names == AXES


AXONN_AXES = Axes(AXES, ("z", "data"), AXES)


@dataclass(frozen=True)
class Layout:
    """Holds the number of ranks along each axis of a strategy, by name, in rank order.

    A grid of AxoNN has the axes x, y, z and data, and pipeline where it has several stages. Its
    text is ``8x4x4x8``; the text of other layouts is ``tensor=8,data=16``. `parse_layout` reads
    both.
    """

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        sizes = dict(self.sizes)
        if "x" in sizes and sizes.get(PIPELINE) == 1:
            del sizes[PIPELINE]
        if sizes.get(EXPERT) == 1:
            del sizes[EXPERT]
        object.__setattr__(self, "sizes", MappingProxyType(sizes))

    def __hash__(self) -> int:
        return hash(frozenset(self.sizes.items()))

    def __reduce__(self) -> tuple[type[Layout], tuple[dict[str, int]]]:
        return Layout, (dict(self.sizes),)

    @property
    def is_grid(self) -> bool:
        """Whether this is a grid of AxoNN, with no other axis than that of a pipeline."""
        return "x" in self.sizes and self.sizes.keys() <= {*AXES, PIPELINE}

    @property
    def n_ranks(self) -> int:
        """The number of ranks, the product of the sizes but that of the folded axis."""
        return math.prod(size for axis, size in self.sizes.items() if axis != EXPERT)

    @property
    def n_stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.size(PIPELINE)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, which is 1 for an axis that is not listed."""
        return self.sizes.get(axis, 1)

    @property
    def brief(self) -> str:
        """The sizes above one by name, which `parse_layout` reads; the text if there are none.

        Layouts that split tensors name their axes as their users do: ``tp=8,dp=16``.
        """
        short = {axis: name for name, axis in ALIASES.items()} if TENSOR in self.sizes else {}
        sizes = self.sizes.items()
        large = [f"{short.get(axis, axis)}={size}" for axis, size in sizes if size > 1]
        return ",".join(large) or str(self)

    def __str__(self) -> str:
        if self.is_grid:
            return "x".join(str(size) for size in self.sizes.values())
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())


def grid_layout(x: int, y: int, z: int, data: int, pipeline: int = 1) -> Layout:
    """Return the layout of a G_x x G_y x G_z x G_data grid on each stage of a pipeline."""
    return Layout({"x": x, "y": y, "z": z, "data": data, PIPELINE: pipeline})


_SIZE = re.compile(r"[1-9][0-9]{0,8}")


def parse_layout(text: str, axes: Axes = AXONN_AXES) -> Layout:
    """Read the text of a layout.

    Parameters
    ----------
    text : str
        ``'tensor=8,data=16'``, where axes that are left out have size 1; for grids also
        ``'8x4x4x8'``: G_x, G_y, G_z, G_data, and the number of stages if there is a fifth.

    Raises
    ------
    InputError
        The text is not a layout of these axes.
    """
    if axes.is_grid and "=" not in text:
        return _parse_grid(text, axes)
    given: dict[str, int] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, _, size = (word.strip() for word in part.partition("="))
        name = ALIASES.get(name, name)
        if name.isalpha() and name not in axes.sized:
            raise InputError(
                f"layout '{text}': there is no axis '{name}'; the axes of this strategy are "
                f"{', '.join(axes.sized)}, and other strategies have others"
            )
        if name not in axes.sized or not _SIZE.fullmatch(size):
            example = ",".join(f"{axis}=2" for axis in axes.sized)
            raise InputError(
                f"layout '{text}': '{part}' is not the size of an axis; for example {example}"
            )
        if given.setdefault(name, int(size)) != int(size):
            raise InputError(f"layout '{text}': {name} has two sizes; give one")
    return Layout({axis: given.get(axis, 1) for axis in axes.sized})


def parse_ordered_layout(text: str, axes: Axes) -> tuple[Layout, str | None]:
    """Read the text of a layout that a rank order may follow, as in ``'8x4x4x8 zyxd'``.

    Raises
    ------
    InputError
        The text is not a layout of these axes.
    """
    layout, _, order = text.strip().rpartition(" ")
    if layout and order in ORDERS and axes.has_orders:
        return parse_layout(layout, axes), order
    return parse_layout(text, axes), None


def _parse_grid(text: str, axes: Axes) -> Layout:
    """Read the short text of a grid, ``8x4x4x8`` or with a fifth size for the pipeline."""
    sizes = re.split(r"[x×,]", text.strip())
    if len(sizes) not in (4, 5) or not all(_SIZE.fullmatch(size) for size in sizes):
        raise InputError(
            f"grid '{text}' is not four sizes; write G_x x G_y x G_z x G_data, for example 8x4x4x8"
        )
    layout = grid_layout(*(int(size) for size in sizes))
    if layout.n_stages > 1 and PIPELINE not in axes.names:
        raise InputError(f"grid '{text}' has a fifth size, the stages of axonn-pipeline")
    return layout


def check_order(text: str) -> str:
    """Return the given rank order, such as ``'xyzd'``: the four axes, fastest varying first.

    Raises
    ------
    InputError
        The text is not a permutation of x, y, z, d.
    """
    if text not in ORDERS:
        raise InputError(
            f"order '{text}' is not a permutation of 'xyzd' (fastest varying axis first, d = data)"
        )
    return text
