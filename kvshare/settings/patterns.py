"""
The regular expressions that a rule may have.

Clients choose the text that is searched, so that no text may make a search slow. Python's `re` tries the ways
in which a pattern can match one after the other, and cannot be interrupted. So patterns that can match in too
many ways are refused when the settings are read, and lines longer than `MAX_LINE` are not searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

# Not public, but the one exact reader of Python's patterns; Hypothesis, too, reads patterns with it.
from re import _parser as parser  # type: ignore[attr-defined]  # typeshed does not have it
from typing import Any

MAX_LINE = 512  # characters; longer lines are left as they are
MAX_WAYS = 16 * (MAX_LINE + 1) ** 2  # two quantifiers without an upper bound, and little else

_REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def checked_pattern(text: str) -> str:
    """
    Return the same text, if it is a regular expression that a rule may have.

    Raises:  ValueError that says what is wrong with it and what to write instead
    """
    try:
        re.compile(text)
        parsed = parser.parse(text)
    except (re.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"expected a regular expression: {exc}") from None
    if parsed.getwidth()[0] == 0:
        raise ValueError("expected a pattern that matches at least one character")
    if _ways(parsed) > MAX_WAYS:
        raise ValueError(
            "this pattern can take very long on some texts: expected at most two quantifiers without an "
            "upper bound (*, + or {n,}), and none of them in a group that is repeated; write {n,m} for others"
        )
    return text


def _ways(sequence: Iterable[tuple[object, Any]]) -> int:
    """Count the ways in which a parsed pattern can match from one place; `MAX_WAYS` + 1 stands for more."""
    return min(MAX_WAYS + 1, prod(_ways_of(str(kind), argument) for kind, argument in sequence))


def _ways_of(kind: str, argument: Any) -> int:
    if kind in _REPEATS:
        fewest, most, repeated = argument
        return _ways_repeated(_ways(repeated), int(fewest), max(int(fewest), min(int(most), MAX_LINE)))
    if kind == "SUBPATTERN":
        return _ways(argument[-1])
    if kind in ("ASSERT", "ASSERT_NOT"):
        return _ways(argument[1])
    if kind == "ATOMIC_GROUP":
        return _ways(argument)
    if kind == "BRANCH":
        return sum(_ways(branch) for branch in argument[1])
    if kind == "GROUPREF_EXISTS":
        return sum(_ways(branch) for branch in argument[1:] if branch is not None)
    return 1


def _ways_repeated(ways: int, fewest: int, most: int) -> int:
    """Count the ways of a part that can match in so many ways, repeated `fewest` to `most` times."""
    if ways == 1:
        return most - fewest + 1
    total = 0
    for count in range(fewest, most + 1):
        total += ways ** min(count, MAX_LINE)
        if total > MAX_WAYS:
            break
    return total
