"""What a job script starts: the best configuration that its framework can run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from axonn_tune.api.searching import MachineLike, ModelLike, build_search
from axonn_tune.job_scripts.script import engine_of, recomputes_in_part
from axonn_tune.search.one_layout import layout_or_best

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from axonn_tune.options import SearchOptions
    from axonn_tune.spec.layout import Layout
    from axonn_tune.step.prediction import Prediction


def configuration_to_launch(
    layout: Layout | str | None,
    framework: str | None,
    model: ModelLike,
    gpus: int,
    machine: MachineLike | None = None,
    **options: Unpack[SearchOptions],
) -> Prediction:
    """Return the best configuration that a framework can run.

    Parameters
    ----------
    layout : Layout, str or None
        The layout; None for the best one.
    framework : str or None
        The framework that starts it; None for that of the engine, or the usual one of the strategy.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or no released framework runs the strategy.
    """
    options["engine"] = options.get("engine") or engine_of(framework)
    search = build_search(model, gpus, machine, **options)
    if not recomputes_in_part(search.scenario.strategy, framework):
        search = replace(search, partial_recompute=False)
    return layout_or_best(search, layout)
