"""What the runs of a table are called: by as few of their facts as tell them apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

from axonn_tune.api.table_rows import OPTION_COLUMNS, SIZE_COLUMNS, model_name
from axonn_tune.spec.configuration import Configuration

# What may tell apart runs of one model, layout and number of GPUs; the first of equals is taken.
_TELLING = tuple(
    dict.fromkeys(("global_batch", "micro_batch", *OPTION_COLUMNS, "machine", *SIZE_COLUMNS))
)


def run_labels(
    rows: Sequence[Mapping[str, str]], configurations: Sequence[Configuration]
) -> list[str]:
    """Return a label for each row of a table of runs, which no other row has.

    A label has the model, the layout and the GPUs; the layout has one name, however a row writes
    it. What else a label has depends on the other rows: columns in which the rows differ that would
    be called alike, and for equal rows a number.

    Parameters
    ----------
    configurations
        What each row was read as.
    """
    labels = [
        f"{model_name(row)}, {_layout_name(configuration)}, {row['gpus']} GPUs"
        for row, configuration in zip(rows, configurations, strict=True)
    ]
    for alike in _classes((label, index) for index, label in enumerate(labels)):
        _tell_apart(rows, alike, labels)
    return labels


def _layout_name(configuration: Configuration) -> str:
    """Return the sizes of a layout above one by the full names of their axes, or the grid."""
    layout = configuration.layout
    large = ",".join(f"{axis}={size}" for axis, size in layout.sizes.items() if size > 1)
    return configuration.ordered_layout if layout.is_grid or not large else large


def _tell_apart(rows: Sequence[Mapping[str, str]], alike: list[int], labels: list[str]) -> None:
    """Add to the labels of some rows, which are alike, the cells that differ.

    The column with the most different cells comes first, and an empty cell adds nothing.
    """
    if len(alike) == 1:
        return
    column = max(_TELLING, key=lambda name: len({rows[index].get(name) for index in alike}))
    classes = _classes((rows[index].get(column), index) for index in alike)
    if len(classes) == 1:
        for number, index in enumerate(alike, start=1):
            labels[index] += f", run {number} of {len(alike)}"
        return
    for same in classes:
        for index in same:
            if column in rows[index]:
                labels[index] += f", {_words(column)} {rows[index][column]}"
        _tell_apart(rows, same, labels)


def _classes(indices: Iterable[tuple[Hashable, int]]) -> list[list[int]]:
    """Return the indices in groups of equal keys, ordered by where each key first appears."""
    classes: dict[Hashable, list[int]] = defaultdict(list)
    for key, index in indices:
        classes[key].append(index)
    return list(classes.values())


def _words(column: str) -> str:
    """Return what a column is called in a label."""
    return "micro-batch" if column == "micro_batch" else column.replace("_", " ")
