"""What a run trains on: a layout with what its options leave open, or the best configuration."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from axonn_tune.api.measuring import run_here
from axonn_tune.api.searching import MachineLike, ModelLike, build_search, loaded
from axonn_tune.search.one_layout import layout_or_best
from axonn_tune.spec.layout import Axes, Layout, parse_layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from axonn_tune.options import SearchOptions
    from axonn_tune.step.prediction import Prediction


def configuration_to_run(
    grid: str | None,
    model: ModelLike,
    gpus: int | None,
    machine: MachineLike | None,
    device: str,
    **options: Unpack[SearchOptions],
) -> Prediction:
    """Return the configuration on which a run trains, as it is predicted.

    Parameters
    ----------
    grid : str or None
        The layout; None for the best one on that number of GPUs.
    gpus : int or None
        Number of ranks of the best layout; None for as many as are at hand.
    machine : Machine, str, path or None
        The machine of the prediction; None where a layout runs that nobody predicts.
    device : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or the strategy, the model or the layout is not executed here.
    """
    from axonn_tune.runtime.ranks.launch import default_dtype, ranks_at_hand
    from axonn_tune.runtime.request import require_built

    strategy = options["strategy"]
    assert strategy is None or isinstance(strategy, str)
    runnable = run_here(strategy, options["engine"])
    require_built(loaded(model), options["seq_len"])
    options["strategy"], options["fix"] = runnable.strategy, runnable.fixed_axes
    options["dtype"] = options["dtype"] or default_dtype(device)
    layout = None
    if grid is None:
        n_ranks = gpus or ranks_at_hand(device)
        options["recompute"] = options["recompute"] or "auto"
        options["global_batch"] = options["global_batch"] or n_ranks
    else:
        layout = parse_layout(grid, runnable.axes)
        n_ranks = layout.n_ranks
        options["recompute"] = options["recompute"] or "none"
        if machine is None or not options["global_batch"]:
            _give_batches(options, layout, runnable.axes)
    search = runnable.search_of(build_search(model, n_ranks, machine, **options))
    return layout_or_best(search, layout)


def _give_batches(options: SearchOptions, layout: Layout, axes: Axes) -> None:
    """Set the batches that are not given: a micro-batch of one sequence, and one on each share."""
    micro_batch = options["micro_batch"] or 1
    n_shares = prod(layout.size(axis) for axis in axes.batch)
    options["micro_batch"] = micro_batch
    options["global_batch"] = options["global_batch"] or n_shares * micro_batch
