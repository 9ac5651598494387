"""The arguments of an operator's question: text, as they come from a query string, or values of JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvshare.errors import RequestError

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


class QueryArguments:
    """
    Arguments by name; None is as good as not given.

    Raises:  RequestError that names the argument, for one that is not `known` (a misspelt `dry_run` must not
             evict), and from each method for one that is wrong
    """

    def __init__(self, given: Mapping[str, Any], *known: str) -> None:
        for name in given:
            if name not in known:
                message = f"{name}: unknown argument; expected one of: {', '.join(known)}"
                raise RequestError(message, param=name)
        self._given = {name: value for name, value in given.items() if value is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str:
        return str(self._given[name])

    def integer(
        self, name: str, *, default: int | None = None, minimum: int = 1, maximum: int = 2**53 - 1
    ) -> int:
        """Without a default the argument is required."""
        value = self._given.get(name, default)
        number = _parsed(value)
        if number is None or not minimum <= number <= maximum:
            got = "nothing" if value is None else repr(value)
            message = f"{name}: expected an integer from {minimum} to {maximum}, got {got}"
            raise RequestError(message, param=name)
        return number

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self._given.get(name, default)
        if (truth := _BOOLEANS.get(str(value).lower())) is None:
            raise RequestError(f"{name}: expected true or false, got {value!r}", param=name)
        return truth

    def choice(self, name: str, choices: Collection[str], *, default: str) -> str:
        chosen = str(self._given.get(name, default))
        if chosen not in choices:
            message = f"{name}: expected one of {', '.join(choices)}, got {chosen!r}"
            raise RequestError(message, param=name)
        return chosen


def _parsed(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 16 else None
