"""Runs of logs become rows of a table of runs, as `score` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.presets import list_models, load_model
from axonn_tune.io.runs.logged_run import LoggedRun
from axonn_tune.spec.measurement import WARM_UP_STEPS
from axonn_tune.spec.model import Model
from axonn_tune.spec.normal import NORMAL_FROM_MEDIAN
from axonn_tune.units import gib

COLUMNS = (
    "model",
    "gpus",
    "layout",
    "global_batch",
    "micro_batch",
    "seq_len",
    "strategy",
    "engine",
    "dtype",
    "precision",
    "attention",
    "recompute",
    "virtual_stages",
    "sequence_parallel",
    "distributed_optimizer",
    "split_experts",
    "dropout",
    "machine",
    "step_seconds",
    "spread_fraction",
    "n_steps",
    "memory_gib",
    "status",
    "source",
)
_NEEDED = ("gpus", "layout", "global_batch")
# The fields by which a model is recognised.
_BLOCK_FIELDS = (
    "n_layers",
    "hidden_size",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "gated_mlp",
    "position",
    "norm",
)
# A vocabulary is padded so that ranks can share it.
_MOST_PADDING = 0.02


@dataclass(frozen=True)
class TableRow:
    """A row of a table of runs.

    Parameters
    ----------
    cells : dict of str to str
        The stated cells by column.
    model : Model or None
        The model that the log describes, if it is no preset and the cell names it.
    """

    cells: dict[str, str]
    model: Model | None


def table_row(
    run: LoggedRun, source: str, given: Mapping[str, str], warm_up: int | None
) -> TableRow:
    """Return the row of a run; what the user gives counts more than what the log says.

    Parameters
    ----------
    source : str
        The log, as messages and the row call it.
    given : mapping of str to str
        Facts of the user by column.
    warm_up : int or None
        Number of steps to leave out at the begin; None leaves out `WARM_UP_STEPS` of them or a
        tenth, whichever is more.

    Raises
    ------
    FileError
        A fact is missing, or no step is left.
    """
    facts = {**run.facts, **given}
    model = None
    if "model" not in facts and run.sizes:
        model = _model_of(run.sizes, source)
        facts["model"] = model.name
        model = None if model.name in list_models() else model
    missing = [name for name in ("model", *_NEEDED) if name not in facts]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise FileError(f"{source} does not say its {', '.join(missing)}; give {options}")
    facts["status"] = "oom" if run.out_of_memory and not run.step_seconds else "ok"
    if facts["status"] == "oom":
        facts["step_seconds"] = "1"  # A table wants a number, and nobody reads it.
    else:
        facts |= _timing(run.step_seconds, source, warm_up)
    if run.memory_bytes:
        facts["memory_gib"] = f"{gib(run.memory_bytes):.4g}"
    facts["source"] = source
    return TableRow({name: facts[name] for name in COLUMNS if name in facts}, model)


def _timing(seconds: Sequence[float], source: str, warm_up: int | None) -> dict[str, str]:
    """Return the median of the steps after the warm-up, their robust spread and their number."""
    if warm_up is None:
        warm_up = max(WARM_UP_STEPS, len(seconds) // 10)
    timed = seconds[warm_up:]
    if not timed:
        raise FileError(
            f"{source} times {len(seconds)} steps, of which the first {warm_up} are warm-up; "
            "allowed: more (--warm-up)"
        )
    middle = median(timed)
    spread = NORMAL_FROM_MEDIAN * median(abs(second - middle) for second in timed) / middle
    return {
        "step_seconds": f"{middle:.6g}",
        "spread_fraction": f"{spread:.3g}",
        "n_steps": str(len(timed)),
    }


def _model_of(sizes: Mapping[str, Any], source: str) -> Model:
    """Return the preset of these sizes, or a model that is named after them."""
    name = f"{sizes.get('n_layers')}-layers-of-{sizes.get('hidden_size')}"
    try:
        model = Model(name=name, source=f"the log {source}", **sizes)
    except (InputError, TypeError) as error:
        raise FileError(f"{source}: {error}") from None
    presets = (load_model(preset) for preset in list_models())
    return next((preset for preset in presets if _is_same(preset, model)), model)


def _is_same(preset: Model, model: Model) -> bool:
    """Return whether a preset has the blocks of a model, and its vocabulary but for padding."""
    padding = model.vocab_size / preset.vocab_size - 1
    has_same_blocks = all(getattr(preset, name) == getattr(model, name) for name in _BLOCK_FIELDS)
    return has_same_blocks and preset.experts is None and 0 <= padding <= _MOST_PADDING
