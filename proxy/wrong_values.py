"""
The message about a wrong value: the field, what was expected, in pydantic's words, and what the field had.

No text of the body is quoted, as it may be a prompt: only its type, a number, or, where one of a few words
was expected, its first characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from kvshare.errors import ErrorCode, RequestError

_MAX_QUOTED = 40  # characters of a word, digits of a number
_MAX_PARAM = 200
_MAX_PROBLEMS = 200  # that are looked at: a long list of wrong entries has one for each
_ABSENT = ("missing", "union_tag_not_found")
_OF_VALUES = {*get_args(ErrorType)}.difference(
    _ABSENT
)  # pydantic's own errors; a field's validator says all itself
_OF_WORDS = ("literal_error", "enum")  # their values are words of a few, not text
_TAGS = ("type", "role")  # which branch of a union is meant
_CLASS = re.compile(r" or instance of \w+")
_SAYS_FOUND = re.compile(", (got|not) ")
_Path = tuple[int | str, ...]


def wrong(expected: str, value: object) -> PydanticCustomError:
    """The error that a field's own validator raises. `expected`: a noun phrase, such as "a list of texts"."""
    words = {"expected": expected, "found": found(value)}
    return PydanticCustomError("wrong_value", "expected {expected}, got {found}", words)


def invalid(param: str, problem: str) -> RequestError:
    """The error of a check that concerns more than one field, or a shape that no model describes."""
    return RequestError(f"Invalid '{param}': {problem}.", param=param)


def unknown_key(param: str, names: Iterable[str]) -> RequestError:
    """The error of a key that an object may not have."""
    param = param[:_MAX_PARAM]
    message = f"Unknown key '{param}': expected one of {', '.join(names)}."
    return RequestError(message, param=param, code=ErrorCode.UNKNOWN_PARAMETER, quoted=[param])


def found(value: object) -> str:
    """A value's type in JSON's words, or a short number itself."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return text if len(text := str(value)) <= _MAX_QUOTED else "a longer number"
    if isinstance(value, str):
        return "a string" if value else "an empty string"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    return "an object" if value else "an empty object"


def to_request_error(error: ValidationError, document: Mapping[str, Any]) -> RequestError:
    """Say what is wrong about `document`, which pydantic refuses: its first wrong parameter."""
    every = error.errors(include_url=False)
    problems = [_Problem.at(details, document) for details in every[:_MAX_PROBLEMS]]
    first, same = _meant(problems)
    expected, *others = dict.fromkeys(each.expected for each in same)
    message = " or ".join([expected, *(each.removeprefix("expected ") for each in others)])
    if first.kind in _OF_VALUES and not _SAYS_FOUND.search(message):
        message = f"{message}, got {first.found}"
    param = _param(first.place)
    return RequestError(f"Invalid '{param}': {message}.", param=param, quoted=first.quoted)


@dataclass(frozen=True, slots=True)
class _Problem:
    """One of pydantic's errors. `place`: the field as the client wrote it; `branch`: of a union, if any."""

    place: _Path
    branch: _Path
    details: ErrorDetails

    @classmethod
    def at(cls, details: ErrorDetails, document: object) -> _Problem:
        """
        pydantic's location has the branches of unions among the keys, and a branch may have the name of a
        key. Of the ways to read it, the one that leads to the wrong value counts.
        """
        location, kind = details["loc"], details["type"]
        absent = location[-1:] if kind == "missing" else ()
        ways = list(_ways(location[: len(location) - len(absent)], document))
        place, branch, _ = next((way for way in ways if way[2] is details["input"]), ways[0])
        if kind.startswith("union_tag"):
            absent = (str(details["ctx"]["discriminator"]).strip("'"),)
        return cls((*place, *absent), branch, details)

    @property
    def kind(self) -> str:
        return self.details["type"]

    @property
    def expected(self) -> str:
        """pydantic's message, without the names of our classes, and without the client's own tag."""
        if self.kind in _ABSENT:
            return "Field required"
        if self.kind == "union_tag_invalid":
            return f"expected one of {self.details['ctx']['expected_tags']}"
        return _CLASS.sub("", self.details["msg"]).replace("Input should be", "expected")

    @property
    def found(self) -> str:
        value = self.details["input"]
        if self.kind == "union_tag_invalid":
            return _quoted(self.details["ctx"]["tag"])
        return _quoted(value) if self.kind in _OF_WORDS and isinstance(value, str) else found(value)

    @property
    def quoted(self) -> Sequence[str]:
        """The client's own text in the message."""
        if self.kind in _OF_VALUES:
            return [self.found] if self.found.startswith("'") else []
        return [str(word) for name, word in self.details.get("ctx", {}).items() if name == "quoted"]


def _ways(location: _Path, here: object, at: int = 0) -> Iterator[tuple[_Path, _Path, object]]:
    """
    Yield the meanings of a location in a document, the one with the most keys first: the keys on the way, the
    location up to the last union's branch, and the value at its end.
    """
    if at == len(location):
        yield (), (), here
        return
    part = location[at]
    if part == "[key]":  # the key of an entry is wrong, not its value
        yield (part,), (), here
        return
    is_entry = isinstance(here, list) and isinstance(part, int) and part < len(here)
    if is_entry or (isinstance(here, Mapping) and part in here):
        for place, branch, value in _ways(location, here[part], at + 1):  # type: ignore[index]  # it is there
            yield (part, *place), branch, value
    if isinstance(part, str):
        for place, branch, value in _ways(location, here, at + 1):
            yield place, branch or location[: at + 1], value
    elif not is_entry:  # of a list that a field's own validator made
        yield location[at:], (), None


def _meant(problems: Sequence[_Problem]) -> tuple[_Problem, list[_Problem]]:
    """
    The first problem, and those that say what else its value may be.

    A union has problems for each of its branches. A branch with another `type` is not what the client meant;
    of the others it is the one that got furthest.
    """
    first = problems[0]
    if not first.branch:
        return first, [first]
    alternatives = [problem for problem in problems if problem.place[:1] == first.place[:1]]
    depths = {
        problem.branch: len(problem.place)
        for problem in alternatives
        if problem.kind in _OF_WORDS and problem.place[-1] in _TAGS
    }
    depth = max(depths.values(), default=0)
    fitting = [each for each in alternatives if each.branch not in depths and len(each.place) >= depth]
    fitting = fitting or alternatives
    first = max(fitting, key=lambda problem: (len(problem.place), problem.kind in _OF_VALUES))
    if first.kind not in _OF_VALUES:
        return first, [first]
    return first, [each for each in fitting if each.place == first.place and each.kind in _OF_VALUES]


def _param(place: _Path) -> str:
    """("messages", 0, "content") -> "messages[0].content", short enough to be sent back."""
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:_MAX_PARAM]


def _quoted(word: str) -> str:
    return f"'{word}'" if len(word) <= _MAX_QUOTED else f"'{word[:_MAX_QUOTED]}…'"
