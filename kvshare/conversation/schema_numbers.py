"""
Numbers that a JSON schema names, as llguidance can follow them: it reads every number as a 64-bit float, and
writes integers of 64 bits.

A bound that this does not hold exactly is moved inwards, so that all answers still are within the client's
bounds: so do the bounds that generators write for 64-bit integers. A value that would come back as another
number is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvshare.conversation.schema_references import KEYWORDS, References

# The largest float below 2^63. Beyond it llguidance overflows: its process ends.
LARGEST = 2**63 - 1024

SCHEMA_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords whose value has a schema under each name, and names of the client's own."""

_VALUES = frozenset(("const", "enum", "multipleOf"))
_NO_SCHEMAS = frozenset(("default", "examples", "example", "required", "type", "x-guidance"))
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")


class UnsupportedNumberError(ValueError):
    """A number of a schema that an answer could not give back, or that is where it cannot be looked for."""


def with_exact_numbers(schema: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the same schema with bounds that floats hold; the rest is not copied.

    Raises:  UnsupportedNumberError for a value that would change, for bounds without a number in between, and
             for a reference to what is not a schema, such as a `default`
    """
    copied: dict[str, Any] = dict(schema)
    waiting: list[tuple[dict[str, Any], Callable[[dict[str, Any]], None]]] = [(copied, _narrow)]
    schemas: list[dict[str, Any]] = []
    while waiting:
        node, narrow = waiting.pop()
        narrow(node)
        if narrow is _narrow:
            schemas.append(node)
        for key, value in node.items():
            if narrow is _narrow and key in _VALUES:
                _check_values(value)
            elif narrow is _narrow and key in _NO_SCHEMAS:
                continue
            elif isinstance(value, dict):
                node[key] = dict(value)
                names_only = narrow is _narrow and key in SCHEMA_MAPS
                waiting.append((node[key], _leave if names_only else _narrow))
            elif isinstance(value, list):
                node[key] = [dict(each) if isinstance(each, dict) else each for each in value]
                waiting += [(each, _narrow) for each in node[key] if isinstance(each, dict)]
    _check_references(copied, schemas)
    return copied


def _check_references(document: dict[str, Any], schemas: Sequence[Mapping[str, Any]]) -> None:
    """Those that point outside of the document are for the compiler to refuse."""
    if not any(keyword in each for each in schemas for keyword in KEYWORDS):
        return
    references, known = References(document), set(map(id, schemas))
    for schema in schemas:
        if any(isinstance(each, dict) and id(each) not in known for each in references.targets(schema)):
            raise UnsupportedNumberError("a reference in it points to what is not a schema")


def _leave(names: dict[str, Any]) -> None:
    """Its keys are names of properties or definitions."""


def _narrow(schema: dict[str, Any]) -> None:
    """Move the bounds of one schema inwards to numbers that floats hold."""
    moved = False
    for keys, towards, limit in ((_LOWER, math.inf, -LARGEST), (_UPPER, -math.inf, LARGEST)):
        for key in keys:
            bound = schema.get(key)
            if not isinstance(bound, int | float) or isinstance(bound, bool):
                continue
            inner = _held(bound, towards)
            inner = max(inner, limit) if towards > 0 else min(inner, limit)
            if abs(inner) > LARGEST:
                raise UnsupportedNumberError(f"{key} {_shown(bound)} needs more than 64 bits")
            if inner != bound:
                schema[key], moved = inner, True
    lowest = max((schema[key] for key in _LOWER if _is_number(schema.get(key))), default=-math.inf)
    highest = min((schema[key] for key in _UPPER if _is_number(schema.get(key))), default=math.inf)
    if moved and lowest > highest:
        raise UnsupportedNumberError("its bounds are too close for numbers of more than 53 bits")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _held(number: float, towards: float) -> int | float:
    """Return the number, or the next one in this direction that a float holds."""
    if isinstance(number, float):
        return number
    try:
        near = float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    if near == number:  # exact in Python, also between an integer and a float
        return number
    if (near < number) == (towards > 0):
        near = math.nextafter(near, towards)
    return int(near)


def _check_values(value: object) -> None:
    for number in _numbers(value):
        if abs(number) > LARGEST or _held(number, math.inf) != number:
            raise UnsupportedNumberError(
                f"the value {_shown(number)} needs more than 53 bits and would come back as another number; "
                "write it as a string"
            )


def _numbers(value: object) -> Iterator[int | float]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, int | float) and not isinstance(each, bool):
            yield each


def _shown(number: float) -> str:
    text = str(number)
    return text if len(text) <= 24 else f"{text[:24]}…"
