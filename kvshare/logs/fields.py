"""Checked texts, ids, counts, times and messages, for all formats. Raises no error but RowError."""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from kvshare.logs.names import AS_JSON, LANGUAGE, ROLES
from kvshare.logs.requests import Message
from kvshare.logs.rows import RowError, RowFault

_ROLES = {name: role for role, names in ROLES.items() for name in names}
_MAX_INT32 = (1 << 31) - 1
_FIRST_MILLISECONDS = 1e11  # as seconds, the year 5138
_FIRST_MICROSECONDS = 1e14
_TEXT_PARTS = ("text", "input_text", "output_text")

_T = TypeVar("_T")


def first(row: Mapping[str, Any], *names: str) -> Any:
    """Return the first of these fields that is not null; None if there is none."""
    return next((row[name] for name in names if row.get(name) is not None), None)


def unpacked(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row with its messages and bodies as what they are, where the log has them as JSON text."""
    found = {name: parsed(row[name]) for name in AS_JSON if isinstance(row.get(name), str)}
    return {**row, **found} if found else row


def parsed(value: object) -> object:
    """Parse a JSON text that holds an object or a list of objects; return any other value unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return value
    is_list = isinstance(document, list) and all(isinstance(item, dict) for item in document)
    return document if is_list or isinstance(document, dict) else value


def optional(check: Callable[[object], _T], row: Mapping[str, Any], *names: str) -> _T | None:
    """Return the first of these fields, checked; None where there is none."""
    value = first(row, *names)
    return None if value is None else check(value)


def of_type(kind: type[_T], value: object) -> _T:
    """Return the value itself. Raises MISSING_FIELD for None, WRONG_TYPE for a value of another type."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RowError(RowFault.MISSING_FIELD if value is None else RowFault.WRONG_TYPE)
    return value


def text(value: object) -> str:
    """Return any string that can be written as UTF-8, empty or not."""
    string = of_type(str, value)
    if not string.isascii():
        try:
            string.encode("utf-8")
        except UnicodeEncodeError as exc:  # half a surrogate pair, written as an escape
            raise RowError(RowFault.BAD_UTF8) from exc
    return string


def language(row: Mapping[str, Any]) -> str:
    """Return the log's word for the language; "unknown" if there is none."""
    named = first(row, *LANGUAGE)
    return (text(named) if isinstance(named, str) else "") or "unknown"


def optional_id(row: Mapping[str, Any], *names: str) -> str | None:
    """Return a string or a whole number, as a string; None where there is none, or where all are empty."""
    value = next((row[name] for name in names if row.get(name) not in (None, "")), None)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    return None if value is None else text(value)


def count(value: object) -> int:
    """Return a whole number from 0; a string of digits counts as one."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    number = of_type(int, value)
    if number < 0:
        raise RowError(RowFault.WRONG_TYPE)
    return number


def int32(value: object) -> int:
    """A count that fits 32 bits."""
    number = count(value)
    if number > _MAX_INT32:
        raise RowError(RowFault.WRONG_TYPE)
    return number


def time_s(value: object) -> float | None:
    """
    Seconds since 1970, or since the start of the log's clock; None stays None.

    Takes a date and time (UTC unless it has a zone), or a number of seconds, milliseconds or microseconds,
    which are distinguished by size.
    """
    if value is None:
        return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, str):
        return _time_of_text(value.strip())
    number = seconds(value)
    if number >= _FIRST_MICROSECONDS:
        return number / 1e6
    return number / 1e3 if number >= _FIRST_MILLISECONDS else number


def seconds(value: object) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise RowError(RowFault.WRONG_TYPE)
    return float(value)


def _time_of_text(value: str) -> float | None:
    with suppress(ValueError):
        return time_s(float(value))
    try:
        return time_s(datetime.fromisoformat(value.removesuffix(" UTC")))
    except (ValueError, OverflowError) as exc:
        raise RowError(RowFault.WRONG_TYPE) from exc


def messages(value: object, *, role: str = "role", content: str = "content") -> tuple[Message, ...]:
    """Messages with the roles system, user, assistant and tool. Raises EMPTY if none has any text."""
    read = tuple(_message(of_type(dict, item), role, content) for item in of_type(list, value))
    if not any(message["content"].strip() for message in read):
        raise RowError(RowFault.EMPTY)
    return read


def _message(item: Mapping[str, Any], role: str, content: str) -> Message:
    name = text(item.get(role)).strip().lower()
    if name not in _ROLES:
        raise RowError(RowFault.UNKNOWN_ROLE)
    body = item.get(content)
    calls = first(item, "tool_calls", "function_call")
    parts = [] if body is None and calls else [message_text(body)]
    if calls:  # as text: the template of the log's model is not known here
        parts.append(json.dumps(calls, ensure_ascii=False, separators=(",", ":"), default=str))
    return {"role": _ROLES[name], "content": text("\n".join(part for part in parts if part))}


def message_text(value: object) -> str:
    """Return a string, or the texts of content parts. Raises NOT_TEXT for an image, a sound or a file."""
    if not isinstance(value, list):
        return text(value)
    texts = []
    for part in value:
        if of_type(dict, part).get("type") not in _TEXT_PARTS:
            raise RowError(RowFault.NOT_TEXT)
        texts.append(text(part.get("text")))
    return "\n".join(texts)
