"""Finds the end of a JSON value that is still growing."""

import json

from kvshare.conversation.formats.reader import Cursor, Waiting

_CLOSING = {"{": "}", "[": "]"}


class JsonValue:
    """Finds the end of one value by its brackets and strings. Does not check what is between them."""

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._begun = False
        self._expected: list[str] = []  # closing brackets
        self._in_string = False
        self._escaped = False

    @property
    def ended(self) -> bool:
        return self.complete or self.broken

    def take(self, cursor: Cursor) -> str:
        """Take the available text of the value, and advance over it."""
        start = cursor.at
        while not self.ended and cursor.at < len(cursor.text):
            character = cursor.text[cursor.at]
            if self._continues_with(character):
                cursor.at += 1
        return cursor.text[start : cursor.at]

    def _continues_with(self, character: str) -> bool:
        inside = self._in_string or bool(self._expected)
        if not inside and (character in ",}]" or character.isspace() or (self._begun and character in '"{[')):
            self.complete = self._begun  # a number or a word has ended
            self.broken = not self._begun  # there is no value
            return False
        self._begun = True
        self._track(character)
        if inside and not self._in_string and not self._expected:
            self.complete = not self.broken
        return not self.broken

    def _track(self, character: str) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._expected.append(_CLOSING[character])
        elif character in "}]":
            self.broken = self._expected.pop() != character


def take_value(cursor: Cursor) -> Waiting[str | None]:
    """Take the text of a complete value. None if there is none; the cursor stays then."""
    start = cursor.at
    yield from cursor.skip_space()
    value, text = JsonValue(), ""
    while True:
        text += value.take(cursor)
        if value.ended or not (yield from cursor.more()):
            break
    cursor.scanned = max(cursor.scanned, cursor.at)
    if value.complete:
        return text
    cursor.at = start
    return None


def take_string(cursor: Cursor) -> Waiting[str | None]:
    """Take the content of a complete string. None if there is none; the cursor stays then."""
    start = cursor.at
    raw = yield from take_value(cursor)
    text = None if raw is None else string_content(raw)
    if text is None:
        cursor.at = start
    return text


def is_object(raw: str) -> bool:
    """Return whether this is the JSON text of an object, as strict parsers read it."""
    try:
        return isinstance(json.loads(raw, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def refuse_constant(constant: str) -> None:
    """For `json.loads`, which reads NaN and Infinity. Raises ValueError."""
    raise ValueError(f"{constant} is not JSON")


def string_content(raw: str) -> str | None:
    """Return the content of the JSON string `raw`, which may have line breaks; None if it is not a string."""
    if not raw.startswith('"'):
        return None
    try:
        text: str = json.loads(raw, strict=False)
        text.encode()
    except ValueError:  # an invalid escape, or half of a surrogate pair
        return None
    return text
