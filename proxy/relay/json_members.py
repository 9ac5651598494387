"""
A JSON object's bytes with the positions of its top-level members: some can be removed and others appended,
while every other byte stays as the client sent it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from json.decoder import JSONDecodeError
from typing import Any

from kvshare.errors import RequestError

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Member:
    """A name and its value, at [start, end) of the text."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class JsonMembers:
    """
    A body as text and as values. A name that comes twice has its last value, as everywhere in Python.
    """

    text: str
    members: tuple[Member, ...] = ()
    document: Mapping[str, Any] = field(default_factory=dict)

    def spliced(self, *, without: Collection[str], added: Mapping[str, Any]) -> bytes:
        """
        The body without the members of some names, wherever they come, and with new ones at its end.

        Neither: the very bytes that were read.
        """
        kept = [member for member in self.members if member.name not in without]
        tail = [f"{json.dumps(name)}:{_dump(value)}" for name, value in added.items()]
        if len(kept) == len(self.members):
            close = self.text.rindex("}")
            body, rest = self.text[:close], self.text[close:]
        else:
            body = self.text[: self.members[0].start]
            body += ",".join(self.text[member.start : member.end] for member in kept)
            rest = self.text[self.members[-1].end :]
        return (body + ",".join(([""] if kept and tail else []) + tail) + rest).encode()


def read_members(raw: bytes) -> JsonMembers:
    """
    Find the members of a body.

    Raises:  RequestError unless it is a JSON object in UTF-8: what cannot be read cannot be searched either
    """
    try:
        text = raw.decode("utf-8")
        start = _skip(text, 0)
        if text[start : start + 1] != "{":
            raise RequestError("The JSON body must be an object.")
        return _read_object(text, start)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None
    except UnicodeDecodeError as exc:
        raise RequestError(f"The body is not UTF-8: byte {exc.start} cannot be decoded.") from None
    except JSONDecodeError as exc:
        raise RequestError(f"The body is not JSON: {exc.msg} at character {exc.pos}.") from None
    except ValueError:  # an integer of thousands of digits
        raise RequestError("The JSON body holds a number that cannot be represented.") from None


def _read_object(text: str, position: int) -> JsonMembers:
    members: list[Member] = []
    document: dict[str, Any] = {}
    position = _skip(text, position + 1)
    while text[position : position + 1] != "}":
        if members:
            position = _expect(text, position, ",")
        start = position
        if text[start : start + 1] != '"':
            raise JSONDecodeError("Expecting property name enclosed in double quotes", text, start)
        name, position = _DECODER.raw_decode(text, start)
        position = _expect(text, _skip(text, position), ":")
        document[name], position = _DECODER.raw_decode(text, position)
        members.append(Member(name, start, position))
        position = _skip(text, position)
    if _skip(text, position + 1) != len(text):
        raise JSONDecodeError("Extra data", text, position + 1)
    return JsonMembers(text, tuple(members), document)


def _expect(text: str, position: int, mark: str) -> int:
    """The position of what comes after a mark. Raises JSONDecodeError."""
    if text[position : position + 1] != mark:
        raise JSONDecodeError(f"Expecting {mark!r} delimiter", text, position)
    return _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    assert match is not None, "it matches nothing as well"
    return match.end()


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
