"""Choose which configurations of a ranking to run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from axonn_tune.errors import InputError
from axonn_tune.search.rank import Ranking
from axonn_tune.spec.layout import parse_layout
from axonn_tune.step.prediction import Prediction

_CHOICE = re.compile(r"all|(top|spread):([1-9][0-9]{0,8})")


def choose(ranking: Ranking, choice: str) -> list[Prediction]:
    """Return the predictions to check, the best first.

    Parameters
    ----------
    choice : str
        ``"all"``; ``"top:6"``, the six best; ``"spread:6"``, six evenly over the ranking, from
        the best to the worst.

    Raises
    ------
    InputError
        Another choice.
    """
    match = _CHOICE.fullmatch(choice)
    if match is None:
        raise InputError(f"--grids is '{choice}'; allowed: all, top:N or spread:N, such as top:6")
    everything = ranking.top()
    if choice == "all":
        return everything
    count = min(int(match[2]), len(everything))
    if match[1] == "top":
        return everything[:count]
    last = len(everything) - 1
    return [everything[round(i * last / max(count - 1, 1))] for i in range(count)]


def choose_grids(ranking: Ranking, grids: Sequence[str]) -> list[Prediction]:
    """Return the predictions of the given grids, and the best one of all, which is the suggestion.

    Raises
    ------
    InputError
        A grid that is not among those of the ranking.
    """
    everything = ranking.top()
    axes = ranking.search.scenario.strategy.axes
    wanted = [parse_layout(text, axes) for text in grids]
    chosen = [p for p in everything if p.layout in wanted]
    missing = [layout for layout in wanted if layout not in [p.layout for p in chosen]]
    if missing:
        raise InputError(
            f"--grid {missing[0]} is not among the {len(everything)} configurations of this job"
        )
    return chosen if everything[0] in chosen else [everything[0], *chosen]
