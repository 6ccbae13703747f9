"""The Python interface: the answers of the commands as DataFrames and documented objects.

Every function takes the options of `options.SearchOptions` by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from axonn_tune.api.comparing import comparison
from axonn_tune.api.searching import (
    MachineLike,
    ModelLike,
    build_search,
    loaded,
    loaded_machine,
)
from axonn_tune.errors import InputError
from axonn_tune.io.presets import machine_of_gpu
from axonn_tune.options import SEARCH, SearchOptions, with_options
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_best, with_best_batch
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import require_count
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.step.prediction import Prediction

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from axonn_tune.step.explain import Explanation

# A layout, its text, the sizes of a grid in order, or the sizes by axis.
LayoutLike: TypeAlias = Layout | str | Sequence[int] | Mapping[str, int]


@with_options(SEARCH)
def suggest(
    model: ModelLike,
    gpus: int,
    machine: MachineLike | None = None,
    top_n: int | None = 10,
    **options: Unpack[SearchOptions],
) -> pandas.DataFrame:
    """Rank the layouts on which to train a model.

    Parameters
    ----------
    top_n : int or None
        Number of rows, at least 1; None returns all.
    {options}

    Returns
    -------
    pandas.DataFrame
        One row per layout and rank order with its best configuration, best first. The column
        ``layout`` holds the text that `predict` and the command line read; units stand in the
        names of the other columns, which are the keys of the JSON output. ``attrs`` holds the
        assumptions on which the numbers rest.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or no layout is legal and fits.
    """
    if top_n is not None:
        require_count("suggest", "top_n", top_n)
    ranking = rank_best(build_search(model, gpus, machine, **options), top_n)
    return _frame(ranking.search, ranking.top(top_n))


@with_options(SEARCH)
def compare(
    model: ModelLike,
    gpus: int,
    machine: MachineLike | None = None,
    strategies: Sequence[str] | None = None,
    grids: Sequence[str] = (),
    vary: Sequence[str] = (),
    **options: Unpack[SearchOptions],
) -> pandas.DataFrame:
    """Return the best configuration of every strategy that has one, the fastest first.

    Parameters
    ----------
    strategies : sequence of str
        Names of the strategies; by default all that keep the numerics and are released, or with
        ``every_strategy`` all of them.
    grids : sequence of str
        Layouts to compare instead, such as ``"8x4x4x8"`` or ``"megatron:tensor=8,data=16"``.
    vary : sequence of str
        What is varied, such as ``"batch=512,1024"``; each value has its own rows.
    {options}

    Returns
    -------
    pandas.DataFrame
        One row per strategy or layout, and per value of what is varied, with the columns of
        `suggest`; axes that a strategy lacks are ``<NA>``. ``attrs["left_out"]`` names by reason
        the strategies and engines that cannot do the job.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or nothing to compare can do the job.
    """
    compared = comparison(model, gpus, machine, strategies, grids, vary, **options)
    predictions = [best.prediction for best in compared.best]
    frame = _frame(compared.best[0].search, [best for best in predictions if best is not None])
    frame.attrs["left_out"] = compared.left_out
    return frame


def _layout(grid: LayoutLike) -> Layout | str:
    """Return a layout, or the text that the sizes of one would have."""
    if isinstance(grid, Layout | str):
        return grid
    if isinstance(grid, Mapping):
        return ",".join(f"{axis}={size}" for axis, size in grid.items())
    if not isinstance(grid, Iterable):
        raise InputError(
            f"a layout is {type(grid).__name__}; allowed: a text such as 8x4x4x8, its sizes, or "
            "the sizes by axis"
        )
    return "x".join(map(str, grid))


@with_options(SEARCH)
def predict(
    model: ModelLike,
    gpus: int,
    grid: LayoutLike,
    machine: MachineLike | None = None,
    **options: Unpack[SearchOptions],
) -> Prediction:
    """Predict one layout with its best micro-batch and recomputation, unless these are given.

    A configuration that does not fit is predicted too, with ``fits`` False.

    Parameters
    ----------
    grid : str, sequence of int, mapping, or Layout
        The layout, such as ``"8x4x4x8"``, ``(8, 4, 4, 8)``, ``"tensor=8,data=16"`` or
        ``{"tensor": 8, "data": 16}``.
    {options}

    Raises
    ------
    AxonnTuneError
        An option is wrong, or the layout breaks a rule of the algorithm (the message says which).
    """
    return best_of_layout(build_search(model, gpus, machine, **options), _layout(grid))


@with_options(SEARCH)
def explain(
    model: ModelLike,
    gpus: int,
    grid: LayoutLike,
    machine: MachineLike | None = None,
    **options: Unpack[SearchOptions],
) -> Explanation:
    """Say where the time of one layout goes, operation by operation, and what would help.

    Parameters
    ----------
    grid : str, sequence of int, mapping, or Layout
        The layout, such as ``"8x4x4x8"``, ``(8, 4, 4, 8)``, ``"tensor=8,data=16"`` or
        ``{"tensor": 8, "data": 16}``.
    {options}

    Returns
    -------
    axonn_tune.step.explain.Explanation
        The prediction, its operations, and the seconds that 10 % more of each resource saves.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or the layout breaks a rule of the algorithm (the message says which).
    """
    from axonn_tune.step.explain import explain as explain_prediction

    return explain_prediction(predict(model, gpus, grid, machine, **options))


@with_options(SEARCH)
def scale(
    model: ModelLike | Sequence[ModelLike],
    gpus: Sequence[int],
    machine: MachineLike | None = None,
    batch_per_gpu: int | None = None,
    **options: Unpack[SearchOptions],
) -> pandas.DataFrame:
    """Return the best layout for each of several numbers of GPUs, with its efficiency.

    Parameters
    ----------
    model : str, path, Model, or a sequence of these
        One model, or for weak scaling one model for each number of GPUs.
    gpus : sequence of int
        The numbers of GPUs.
    batch_per_gpu : int or None
        Sequences of the global batch for each GPU, if the batch is to grow.
    {options}

    Returns
    -------
    pandas.DataFrame
        One row per number of GPUs that has a candidate: ``gpus``, ``model``, ``global_batch``,
        ``efficiency`` (against the first number), and the columns of `suggest`.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or no number of GPUs has a layout that fits.
    """
    from axonn_tune.report.scale import scaling_records
    from axonn_tune.studies.scaling import scale as scale_searches

    searches = scaling_searches(model, gpus, machine, batch_per_gpu, **options)
    points = scale_searches(searches)
    predictions = [point.prediction for point in points if point.prediction is not None]
    return _frame_of_records(points[0].search, scaling_records(points), predictions)


def scaling_searches(
    model: ModelLike | Sequence[ModelLike],
    gpus: Sequence[int],
    machine: MachineLike | None = None,
    batch_per_gpu: int | None = None,
    **options: Unpack[SearchOptions],
) -> list[Search]:
    """Return a search for each number of GPUs; see `scale`.

    Raises
    ------
    InputError
        There are not as many models as numbers of GPUs, or the batch is given twice.
    """
    models = [loaded(model)] * len(gpus) if isinstance(model, str | Path | Model) else list(model)
    if len(models) != len(gpus):
        counts = ", ".join(map(str, gpus))
        raise InputError(
            f"--weak names {len(models)} models for {len(gpus)} counts ({counts}); give as many"
        )
    global_batch = options.get("global_batch") or options.get("global_batch_tokens")
    if batch_per_gpu is not None and global_batch is not None:
        raise InputError("give either --batch-per-gpu or a global batch, not both")
    machine = loaded_machine(machine)
    searches = []
    for count, name in zip(gpus, models, strict=True):
        if batch_per_gpu is not None:
            options = _changed(options, global_batch=batch_per_gpu * count)
        searches.append(build_search(name, count, machine, **options))
    return searches


def _changed(options: SearchOptions, **changes: Any) -> SearchOptions:
    """Return the options with some of them changed."""
    return cast("SearchOptions", {**options, **changes})


@with_options(SEARCH)
def whatif(
    model: ModelLike,
    gpus: int,
    machine: MachineLike | None = None,
    changes: Sequence[str] = (),
    by: float = 1.1,
    **options: Unpack[SearchOptions],
) -> pandas.DataFrame:
    """Say how the best layout and its time change on another machine.

    Parameters
    ----------
    changes : sequence of str
        Changed numbers of the machine, such as ``"inter_node.bandwidth=2x"`` or ``"gpu=h200"``.
    by : float
        Factor of the table of sensitivities, which is returned if there are no changes.
    {options}

    Returns
    -------
    pandas.DataFrame
        With changes, three rows (``machine``: as it is, changed, layout kept) with the columns of
        `suggest`. Without changes, one row per number of the machine, with the best step for less
        and for more of it.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or nothing fits.
    """
    from axonn_tune.report.whatif import influence_records, what_if_records
    from axonn_tune.studies.whatif import influences, what_if

    search = with_best_batch(build_search(model, gpus, machine, **options))
    if not changes:
        records = influence_records(influences(search, by))
        return _frame_of_records(search, records)
    result = what_if(search, changed_machine(search, changes))
    predictions = [result.before, result.after, result.kept]
    return _frame_of_records(search, what_if_records(result), predictions)


def changed_machine(search: Search, changes: Sequence[str]) -> Machine:
    """Return the machine of a search with some numbers changed, the GPU first.

    Raises
    ------
    InputError
        A number does not exist, or a value does not suit it.
    """
    from axonn_tune.studies.parameters import with_gpu, with_settings

    machine = search.scenario.machine
    dtype = search.scenario.job.dtype
    gpu_changes = [change for change in changes if change.partition("=")[0].strip() == "gpu"]
    for change in gpu_changes:
        try:
            other = machine_of_gpu(change.partition("=")[2].strip())
        except InputError as error:
            raise InputError(f"--set {change}: {error}") from None
        machine = with_gpu(machine, other)
    machine.peak_flops_per_s(dtype)
    machine.require_precision(search.scenario.job.precision)
    settings = [change for change in changes if change not in gpu_changes]
    return with_settings(machine, settings, dtype)


@with_options(SEARCH)
def plan(
    model: ModelLike,
    gpus: int | None = None,
    machine: MachineLike | None = None,
    tokens: float | None = None,
    deadline_seconds: float | None = None,
    node_hours: float | None = None,
    gpu_hours: float | None = None,
    **options: Unpack[SearchOptions],
) -> pandas.DataFrame:
    """Plan a whole training run: days, node-hours, energy, money.

    Parameters
    ----------
    gpus : int or None
        Number of GPUs; None for the fewest that meet the deadline, for those that finish soonest
        within the budget, or with both limits for those that take the fewest node-hours.
    tokens : float or None
        Tokens of the whole run; by default as many as the budget buys, or without a budget 20 for
        each parameter (Chinchilla).
    deadline_seconds : float or None
        Time by which the run has to end.
    node_hours, gpu_hours : float or None
        The budget, in one of the two units. If no number of GPUs trains the tokens within it, the
        runs are over what it buys.
    {options}

    Returns
    -------
    pandas.DataFrame
        One row per number of GPUs that was tried, the last of which is the plan. The columns
        ``deadline_probability``, ``budget_probability`` and ``tokens_within_limits`` say what the
        limits make of each.

    Raises
    ------
    AxonnTuneError
        An option is wrong, nothing fits, or no number of GPUs meets the deadline.
    """
    from axonn_tune.report.plan import training_flat_records
    from axonn_tune.studies.limits import Limits
    from axonn_tune.studies.run_plan import plan_run

    search = build_search(model, 1 if gpus is None else gpus, machine, **options)
    limits = Limits(deadline_seconds, node_hours, gpu_hours)
    runs = plan_run(search, tokens, limits, gpus is not None)
    predictions = [run.best for run in runs.runs]
    return _frame_of_records(runs.best.search, training_flat_records(runs), predictions)


@with_options(SEARCH)
def launch(
    model: ModelLike,
    gpus: int,
    grid: LayoutLike | None = None,
    machine: MachineLike | None = None,
    framework: str | None = None,
    train: str | None = None,
    sbatch: Sequence[str] = (),
    **options: Unpack[SearchOptions],
) -> dict[str, str]:
    """Return the files that run one layout: the job script and the program that it starts.

    Parameters
    ----------
    grid : str, sequence of int, mapping, Layout or None
        The layout; by default the best one.
    framework : str or None
        axonn, megatron, fsdp2, torchtitan, deepspeed or megatron-fsdp; by default that of the
        engine, or the usual one of the strategy.
    train : str or None
        A program of your own in place of the written one, or the path of pretrain_gpt.py.
    sbatch : sequence of str
        Further options of sbatch, such as ``--account=abc``.
    {options}

    Returns
    -------
    dict of str to str
        The text of each file by its name.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or no released framework runs the strategy.
    """
    from axonn_tune.api.launching import configuration_to_launch
    from axonn_tune.job_scripts.script import launch_files

    layout = _layout(grid) if grid else None
    chosen = configuration_to_launch(layout, framework, model, gpus, machine, **options)
    return launch_files(chosen, framework, train, sbatch)


def _frame(search: Search, predictions: Sequence[Prediction]) -> pandas.DataFrame:
    """Return predictions as rows."""
    from axonn_tune.report.records import flat_record

    records = [flat_record(prediction) for prediction in predictions]
    return _frame_of_records(search, records, predictions)


def _frame_of_records(
    search: Search, records: Sequence[dict[str, Any]], predictions: Sequence[Prediction] = ()
) -> pandas.DataFrame:
    """Return records as rows, with the layout of each and the assumptions of all."""
    from importlib.metadata import version

    import pandas

    from axonn_tune.report.records import assumptions

    frame = pandas.DataFrame(list(records))
    # Axes that some strategies lack would become floats.
    axes = [name for name in map(str, frame) if name.startswith("g_") and frame[name].hasnans]
    frame = frame.astype(dict.fromkeys(axes, "Int64"))
    if predictions:
        frame["layout"] = [str(prediction.layout) for prediction in predictions]
    versions = {name: version(name) for name in ("axonn-tune", "numpy", "pandas")}
    frame.attrs.update(assumptions(search), versions=versions)
    return frame
