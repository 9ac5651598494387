"""
What a client learns of a value that is wrong: what was expected and what was found, in plain words.

No text of the body is quoted, since it may be a prompt; only short words where one of a few was expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import ErrorDetails, PydanticCustomError

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,32}")

_TYPES: Mapping[str, str] = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "finite_number": "a finite number",
}
_RANGES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than": lambda context: f"more than {context['gt']:g}",
    "greater_than_equal": lambda context: f"{_short(context['ge'])} or more",
    "less_than": lambda context: f"less than {_short(context['lt'])}",
    "less_than_equal": lambda context: f"{_short(context['le'])} or less",
    "string_too_short": lambda context: f"a string of {context['min_length']} characters or more",
    "string_too_long": lambda context: f"a string of {context['max_length']} characters or less",
    "too_short": lambda context: f"{context['min_length']} entries or more",
    "too_long": lambda context: f"{context['max_length']} entries or less",
    "literal_error": lambda context: str(context["expected"]),
}


def wrong(expected: str, value: object) -> PydanticCustomError:
    """The error that a field's own validator raises."""
    words = {"expected": expected, "found": found(value)}
    return PydanticCustomError("wrong_value", "expected {expected}, got {found}", words)


def describe(error: ErrorDetails) -> str:
    """One of pydantic's errors; the messages of fields' own validators are passed on as they are."""
    kind, value = error["type"], error["input"]
    if kind in _TYPES:
        return f"expected {_TYPES[kind]}, got {found(value)}"
    if kind == "literal_error" and isinstance(value, str) and _WORD.fullmatch(value):
        return f"expected {error['ctx']['expected']}, got '{value}'"
    if kind in _RANGES:
        return f"expected {_RANGES[kind](error['ctx'])}, got {found(value)}"
    return error["msg"]


def found(value: object) -> str:
    """What stood there, without any text of it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _short(value)
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    return "an object" if value else "an empty object"


def _short(number: float) -> str:
    if isinstance(number, float):
        return f"{number:g}"
    return str(number) if abs(number) < 10**20 else "a larger integer"
