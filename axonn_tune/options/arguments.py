"""What Python callers give: numbers of NumPy become plain ones, and kinds of values are checked.

The command line gets texts, which click turns into values of the declared types. A Python caller
may give anything, and a text where a list or a switch is wanted would be taken for something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from axonn_tune.errors import InputError


def plain(value: Any, kind: str = "") -> Any:
    """Return a value with plain numbers and lists in place of those of NumPy and pandas.

    A row of pandas becomes a mapping where the parameter's `kind` allows one.
    """
    if hasattr(value, "to_dict") and ("Layout" in kind or "Mapping" in kind):
        named = value.to_dict()
        if all(isinstance(name, str) for name in named):
            return plain(named)
    if hasattr(value, "tolist"):  # a number, an array, a column of a table
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value


def check_kind(owner: str, name: str, kind: str, value: Any) -> None:
    """Refuse a value that is not of the kind that its parameter has.

    Parameters
    ----------
    kind : str
        The text of the parameter's type; what it is not known for is left to what follows.

    Raises
    ------
    InputError
        The message names the parameter, its value and what is allowed.
    """
    is_allowed, allowed = _KINDS.get(kind.removesuffix(" | None"), (_is_anything, ""))
    if value is not None and not is_allowed(value):
        text = repr(value).split("\n")[0][:40]
        raise InputError(f"{owner}: {name} is {text}; allowed: {allowed}")


def _is_anything(_value: Any) -> bool:
    return True


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, a path, or an object of one's own, such as a strategy."""
    is_plain = isinstance(value, bool | int | float | bytes | Mapping) or _is_list(value)
    return isinstance(value, str) or not is_plain


def _is_list(value: Any) -> bool:
    return not isinstance(value, str | bytes | Mapping) and hasattr(value, "__len__")


# Whether a value is of a kind, and what a message says is allowed.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (_is_switch, "True or False"),
    "float": (_is_number, "a number"),
    "str": (_is_text, "a text"),
    "Sequence[str]": (_is_list, "a list of texts"),
    "Sequence[int]": (_is_list, "a list of whole numbers"),
}
