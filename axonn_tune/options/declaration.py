"""What an option's declaration says, and parameters of Python functions made from it.

A declaration gives the name, the type, the help text and the default. The parameter of the Python
functions (`with_options`) with its documentation, and the option of the command line
(`cli.options`), are made from it. The key under which JSON reports an assumption is the option's
name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from itertools import zip_longest
from typing import Any, ParamSpec, TypeAlias, TypeVar

from axonn_tune.errors import InputError, choices_hint
from axonn_tune.options.arguments import check_kind, plain
from axonn_tune.spec.checks import require_choice

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Option:
    """The declaration of an option, which has its name and its type next to it.

    help
        A phrase that says what the option does.
    default
        Value of the option where the user gives none.
    shown_default
        What happens without the option, if the default is None or an empty text.
    metavar
        Word that stands for the value in the help of the command line, if the name of its type says
        too little.
    is_flag
        Whether the command line has no ``--no-`` form of a bool, which is then False by default.
    minimum
        Smallest value of a number.
    choices
        Allowed values of the texts of an option that may be given again.
    """

    help: str
    default: Any = None
    shown_default: str = ""
    metavar: str = ""
    is_flag: bool = False
    minimum: float = 1
    choices: tuple[str, ...] = ()

    def check(self, owner: str, name: str, value: Any) -> None:
        """Refuse a value that is too small or is not one of the choices, as the command line does.

        Counts of at least 1 are left to what they enter, which knows more about them.

        Raises
        ------
        InputError
            The message names the option, its value and what is allowed.
        """
        if self.choices:
            for item in value:
                require_choice(owner, name, item, self.choices)
        elif self.minimum > 1 and value < self.minimum:
            raise InputError(f"{owner}: {name} is {value}; allowed: at least {self.minimum:g}")


# The type and the declaration of every option of a command or a function, by name in order.
Declarations: TypeAlias = dict[str, tuple[Any, Option]]


def declared(
    *groups: type, changed: Mapping[str, Option] | None = None, without: Collection[str] = ()
) -> Declarations:
    """Return the declarations of some groups.

    Parameters
    ----------
    groups : TypedDicts
        The groups in the order in which a help text lists them.
    changed : mapping of str to Option
        Declarations that replace those of the groups.
    without : collection of str
        Names of the options that are left out.
    """
    declarations = {
        name: (hint.__origin__, hint.__metadata__[0])
        for group in groups
        for name, hint in group.__annotations__.items()
        if name not in without
    }
    for name, option in (changed or {}).items():
        declarations[name] = (declarations[name][0], option)
    return declarations


def defaults(declarations: Declarations) -> dict[str, Any]:
    """Return the default of every option."""
    return {name: option.default for name, (_, option) in declarations.items()}


def with_options(known: Declarations) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function some options as named, documented, checked parameters.

    The function takes them as ``**options``. An unknown name raises an `InputError` that suggests
    the nearest known one, and so does a value of another kind than the parameter's. Numbers of
    NumPy become plain ones. ``{options}`` in the docstring becomes their documentation.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        explicit = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [p.name for p in explicit]
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=option.default,
                annotation=_type_text(hint),
            )
            for name, (hint, option) in known.items()
            if name not in names
        ]
        allowed = [*names, *(p.name for p in keywords)]
        kinds = {p.name: str(p.annotation) for p in (*explicit, *keywords)}

        @wraps(function)
        def checked(*arguments: P.args, **options: P.kwargs) -> R:
            arguments = tuple(  # type: ignore[assignment]
                plain(value, kinds.get(name, "")) for name, value in zip_longest(names, arguments)
            )[: len(arguments)]
            options = {  # type: ignore[assignment]
                name: plain(value, kinds.get(name, "")) for name, value in options.items()
            }
            for name, value in zip(names, arguments, strict=False):
                check_kind(function.__name__, name, kinds[name], value)
            for name in options:
                if name not in allowed:
                    raise InputError(
                        f"{function.__name__}: no option '{name}'{choices_hint(name, allowed)}"
                    )
                check_kind(function.__name__, name, kinds[name], options[name])
                if name in known:
                    known[name][1].check(function.__name__, name, options[name])
            return function(*arguments, **options)

        checked.__signature__ = signature.replace(parameters=[*explicit, *keywords])  # type: ignore[attr-defined]
        documentation = "\n".join(_documented(name, *known[name]) for name in known)
        checked.__doc__ = (function.__doc__ or "").replace("    {options}", documentation)
        return checked

    return decorate


def _documented(name: str, hint: Any, option: Option) -> str:
    """Return the documentation of an option as a parameter of a function."""
    default = option.shown_default or option.default
    shown = f" By default {default}." if default not in ("", None, ()) else ""
    return f"    {name} : {_type_text(hint)}\n        {option.help}{shown}"


@cache
def _type_text(hint: Any) -> str:
    """Return the text of a type, without modules."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)
