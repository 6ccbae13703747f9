"""The Python interface: build a search from plain arguments, run it, predict one configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_machine, load_model
from axonn_tune.search.rank import Ranking, rank_candidates
from axonn_tune.search.search import COST_MODELS, Constraints, Search
from axonn_tune.spec.checks import require_choice, require_count
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import (
    ALIASES,
    AXES,
    ORDERS,
    PAPER_ORDER,
    Layout,
    check_order,
    parse_layout,
)
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import RECOMPUTES, Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.strategy import Strategy
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.named import STRATEGIES, Switches, strategy_named

if TYPE_CHECKING:
    import pandas

DEFAULT_MACHINE = "perlmutter"
# Tokens of a global batch in AxoNN's weak-scaling runs (arXiv 2502.08145): 2**24.
DEFAULT_GLOBAL_BATCH_TOKENS = 2**24

ModelLike: TypeAlias = Model | str | Path
MachineLike: TypeAlias = Machine | str | Path


def build_search(
    model: ModelLike,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    *,
    global_batch: int | None = None,
    global_batch_tokens: int | None = None,
    seq_len: int | None = None,
    micro_batch: int | None = None,
    dtype: str = "bf16",
    attention: str = "flash",
    recompute: str = "auto",
    oar: bool = True,
    ors: bool = True,
    oag: bool = True,
    kernel_tuning: bool = True,
    keep_gathered_weights: bool = False,
    dropout: bool = False,
    order: str = PAPER_ORDER,
    cost_model: str = "full",
    max_tp: int | None = None,
    gx: int | None = None,
    gy: int | None = None,
    gz: int | None = None,
    gdata: int | None = None,
    fix: Mapping[str, int] | None = None,
    strategy: str | Strategy = "axonn",
    switches: Switches | None = None,
    include_oom: bool = False,
    every_configuration: bool = False,
) -> Search:
    """Check the arguments and put them together; see `suggest` for their meaning.

    Raises
    ------
    AxonnTuneError
        Names the argument, its value and what is allowed.
    """
    loaded_model = model if isinstance(model, Model) else load_model(model)
    loaded_machine = machine if isinstance(machine, Machine) else load_machine(machine)
    seq_len = loaded_model.seq_len if seq_len is None else seq_len
    require_count("job", "seq_len", seq_len)
    require_choice("job", "recompute", recompute, ("auto", *RECOMPUTES))
    require_choice("search", "cost_model", cost_model, COST_MODELS)
    chosen = strategy_named(strategy, switches) if isinstance(strategy, str) else strategy
    axes = {axis: size for axis, size in zip(AXES, (gx, gy, gz, gdata), strict=True) if size}
    for axis, size in (fix or {}).items():
        name = ALIASES.get(axis, axis)
        if axes.setdefault(name, size) != size:
            raise InputError(f"axis {name} is fixed to {axes[name]} and to {size}; give one size")
    for axis in axes:
        require_choice(f"strategy {chosen.name}", "axis", axis, chosen.axes.names)
    for name, count in {**axes, "micro_batch": micro_batch, "max_tp": max_tp}.items():
        if count is not None:
            require_count("search", name, count)
    job = Job(
        n_gpus=gpus,
        global_batch=_global_batch(global_batch, global_batch_tokens, seq_len),
        seq_len=seq_len,
        dtype=dtype,
        attention=attention,
        overlap=Overlap(oar, ors, oag),
        kernel_tuning=kernel_tuning,
        keep_gathered_weights=keep_gathered_weights,
        dropout=dropout,
    )
    if order != PAPER_ORDER and not chosen.axes.has_orders:
        raise InputError(f"strategy {chosen.name} has one rank order; --order is axonn's")
    if cost_model != "full" and not chosen.axes.is_grid:
        raise InputError(f"strategy {chosen.name} has one cost model; --cost-model is AxoNN's")
    orders = ORDERS if order == "all" else (check_order(order),)
    loaded_machine.peak_flops_per_s(dtype)
    return Search(
        Scenario(loaded_model, job, loaded_machine, chosen),
        constraints=Constraints(axes, max_tp, orders, micro_batch),
        recomputes=RECOMPUTES if recompute == "auto" else (recompute,),
        cost_model=cost_model,
        include_oom=include_oom,
        every_configuration=every_configuration,
    )


def _global_batch(sequences: int | None, tokens: int | None, seq_len: int) -> int:
    if sequences is not None and tokens is not None:
        raise InputError("give either a global batch in sequences or one in tokens, not both")
    if sequences is not None:
        return sequences
    if tokens is None:
        return max(DEFAULT_GLOBAL_BATCH_TOKENS // seq_len, 1)
    require_count("job", "global_batch_tokens", tokens)
    if tokens % seq_len:
        low = tokens // seq_len * seq_len
        near = f"{low} or {low + seq_len}" if low else str(seq_len)
        raise InputError(
            f"job: global_batch_tokens is {tokens}; allowed: a multiple of the sequence length "
            f"{seq_len}, such as {near}"
        )
    return tokens // seq_len


def rank(
    model: ModelLike, gpus: int, machine: MachineLike = DEFAULT_MACHINE, **options: Any
) -> Ranking:
    """Search and rank all configurations; the options are those of `build_search`."""
    return rank_candidates(build_search(model, gpus, machine, **options))


def suggest(
    model: ModelLike,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    top_n: int | None = 10,
    **options: Any,
) -> pandas.DataFrame:
    """Rank the grids on which to train a model.

    Parameters
    ----------
    model : str, path or Model
        A preset (``"80b"``), a YAML file, a Hugging Face ``config.json``, or a `Model`.
    gpus : int
        Number of GPUs (dies, where each is a device of its own).
    machine : str, path or Machine
        A preset or a YAML file.
    top_n : int or None
        Rows returned; None returns all.
    **options
        ``global_batch`` (sequences) or ``global_batch_tokens``, ``seq_len``,
        ``micro_batch``, ``dtype``, ``attention`` (flash, unfused), ``recompute`` (none,
        selective, full, auto), ``oar``, ``ors``, ``oag``, ``kernel_tuning``,
        ``keep_gathered_weights``, ``order`` (such as ``"xyzd"``, or ``"all"``),
        ``cost_model`` (full, paper), ``max_tp``, ``gx``, ``gy``, ``gz``, ``gdata``,
        ``fix`` (sizes of any axes, by name), ``strategy`` (axonn, axonn-pipeline, megatron,
        zero3, zeropp, zero-topo, or an object with the protocol `Strategy`), ``switches``
        (`strategies.named.Switches`), ``dropout``,
        ``include_oom``, ``every_configuration`` (every micro-batch and recomputation of a
        grid, not its best only).

    Returns
    -------
    pandas.DataFrame
        One row per grid and rank order with its best configuration, best first; units stand
        in the names of the columns.

    Raises
    ------
    AxonnTuneError
        Bad input, or no grid that is legal and fits.
    """
    import pandas

    from axonn_tune.report.records import flat_record

    predictions = rank(model, gpus, machine, **options).top(top_n)
    return pandas.DataFrame([flat_record(prediction) for prediction in predictions])


def compare(
    model: ModelLike,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    strategies: Sequence[str] = tuple(STRATEGIES),
    **options: Any,
) -> pandas.DataFrame:
    """The best configuration of every strategy that has one, the fastest first.

    Parameters
    ----------
    strategies : names; all of them if not given
    **options
        As those of `suggest`.

    Returns
    -------
    pandas.DataFrame
        One row per strategy; axes that a strategy does not have are NaN.

    Raises
    ------
    AxonnTuneError
        Bad input.
    """
    import pandas

    from axonn_tune.report.records import flat_record
    from axonn_tune.studies.compare import compare as compare_searches

    searches = [build_search(model, gpus, machine, strategy=s, **options) for s in strategies]
    found = [best.prediction for best in compare_searches(searches)]
    return pandas.DataFrame([flat_record(best) for best in found if best is not None])


def predict(
    model: ModelLike,
    gpus: int,
    grid: Layout | str,
    machine: MachineLike = DEFAULT_MACHINE,
    **options: Any,
) -> Prediction:
    """Predict one grid: its best micro-batch and recomputation, unless these are given.

    A configuration that does not fit is predicted too, with ``fits`` False.

    Raises
    ------
    AxonnTuneError
        Bad input, or a grid that breaks a rule of the algorithm (the message says which).
    """
    return predict_search(build_search(model, gpus, machine, **options), grid)


def predict_search(search: Search, grid: Layout | str) -> Prediction:
    """As `predict`, for a search that is already built."""
    from axonn_tune.search.why_not import broken_by

    wanted = parse_layout(grid, search.scenario.strategy.axes) if isinstance(grid, str) else grid
    reasons = broken_by(search, wanted)
    if reasons:
        raise InputError(f"grid {wanted} is not allowed: {'; '.join(reasons)}")
    return rank_candidates(search.of_layout(wanted)).prediction(0)
