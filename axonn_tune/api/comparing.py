"""What `compare` shows: the best of each strategy, engine or layout, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from axonn_tune.api.contenders import (
    Contender,
    able_of,
    contenders_of,
    left_out_of,
    named_layout,
)
from axonn_tune.api.searching import (
    MachineLike,
    ModelLike,
    build_search,
    is_special,
    loaded,
    loaded_machine,
    names_of_all_strategies,
    options_of_each,
    usual_strategy,
)
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.options import SearchOptions
from axonn_tune.search.rank import Best, Detail, Each
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import require_choice, whole_number
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.strategies.named import STRATEGIES

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What a comparison varies, by the names that users give it.
VARIED = {"batch": "global_batch", "seq_len": "seq_len", "micro_batch": "micro_batch"}


@dataclass(frozen=True)
class BestOfContenders:
    """The best of each contender, and what was left out.

    best
        Answers for each value of what is varied, the fastest first.
    left_out
        Names of the strategies and engines that are not compared, by the reason for it.
    """

    best: Sequence[Best]
    left_out: Mapping[str, Sequence[str]]


def comparison(
    model: ModelLike,
    gpus: int,
    machine: MachineLike | None = None,
    strategies: Sequence[str] | None = None,
    grids: Sequence[str] = (),
    vary: Sequence[str] = (),
    each: Each = iter,
    detail: Detail = "chance",
    **options: Unpack[SearchOptions],
) -> BestOfContenders:
    """Return what `compare` shows: for each value of what is varied, the best of each contender.

    A strategy or an engine that cannot do the job is left out, as long as another one can. The
    predictions of given grids state no chance, whatever `detail` is wanted.

    Raises
    ------
    AxonnTuneError
        An option is wrong, no contender can do the job, or a given layout breaks a rule.
    """
    from axonn_tune.studies.compare import compare, compare_layouts

    if grids and strategies:
        raise InputError("give either --grid with its strategy, or --strategies, not both")
    engine = options.get("engine")
    # All searches share what is read once.
    model, machine = loaded(model), loaded_machine(machine)
    jobs = [{**options, **values} for values in _varied(vary)]
    best: list[Best] = []
    if grids:
        usual = _usual_contender(model, engine)
        named = [named_layout(text, usual) for text in grids]
        for job in jobs:
            searches, refused = _searches([c for c, _ in named], model, gpus, machine, job)
            if refused:
                raise refused[0][1]
            layouts = [layout for _, layout in named]
            best += compare_layouts(list(zip(searches, layouts, strict=True)), each)
        return BestOfContenders(best, {})
    for name in strategies or ():
        require_choice("search", "strategy", name, tuple(STRATEGIES))
    names = strategies or ([] if engine else names_of_all_strategies(model, **options))
    contenders, left_out = contenders_of(names, engine, is_named=bool(strategies))
    able = able_of(model, contenders, is_special(options)) or contenders
    refusals: list[tuple[Contender, InputError]] = []
    for job in jobs:
        searches, refused = _searches(able, model, gpus, machine, job)
        refusals += refused
        best += compare(searches, each, detail) if searches else []
    if not best:
        raise refusals[0][1]
    for contender, error in refusals:
        left_out.setdefault(f"since {str(error).removeprefix('job: ')}", []).append(contender.title)
    compared = {one.search.scenario.strategy.name for one in best}
    compared |= {contender.strategy for contender, _ in refusals}
    if engine is None:
        wanted = [Contender(name, None) for name in strategies or STRATEGIES]
    else:
        wanted = contenders
    for reason, titles in left_out_of(best[0].search.scenario, compared, wanted).items():
        left_out.setdefault(reason, []).extend(titles)
    return BestOfContenders(
        best, {reason: list(dict.fromkeys(t)) for reason, t in left_out.items()}
    )


def _searches(
    contenders: Sequence[Contender],
    model: Model,
    gpus: int,
    machine: Machine,
    options: Mapping[str, Any],
) -> tuple[list[Search], list[tuple[Contender, InputError]]]:
    """Return the searches of contenders, and the contenders that cannot do the job, with why."""
    own = options_of_each([contender.strategy for contender in contenders], options)
    searches, refused = [], []
    for contender in contenders:
        try:
            searches.append(
                build_search(model, gpus, machine, **own[contender.strategy] | contender._asdict())
            )
        except InputError as error:
            refused.append((contender, error))
    return searches, refused


def _usual_contender(model: Model, engine: str | None) -> Contender:
    """Return what carries out a layout for which neither a strategy nor an engine is named."""
    named = None if engine is None else load_engine(engine)
    return Contender(usual_strategy(model, named), engine)


def _varied(vary: Sequence[str]) -> list[dict[str, int]]:
    """Return every combination of the values of options that texts such as ``batch=8,16`` name."""
    combinations: list[dict[str, int]] = [{}]
    for text in vary:
        name, _, values = text.partition("=")
        require_choice("--vary", "name", name.strip(), tuple(VARIED))
        numbers = [whole_number(value.strip()) for value in values.split(",")]
        counts = [number for number in numbers if number is not None]
        if len(counts) < len(numbers):
            raise InputError(
                f"--vary {text[:40]}: allowed: counts with commas, such as {name}=512,1024"
            )
        combinations = [
            {**combination, VARIED[name.strip()]: count}
            for combination in combinations
            for count in counts
        ]
    return combinations
