"""Finds the end of a JSON value that is still growing."""

from __future__ import annotations

import json

from kvshare.conversation.formats.cursor import Cursor, Waiting

_CLOSING = {"{": "}", "[": "]"}


class JsonValue:
    """One value. Its brackets and strings are followed, no more: what stands between them is not checked."""

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
        """What there is of it from the cursor on; the cursor goes behind it."""
        start = cursor.at
        while not self.ended and cursor.at < len(cursor.text):
            character = cursor.text[cursor.at]
            if self._goes_on_with(character):
                cursor.at += 1
        return cursor.text[start : cursor.at]

    def _goes_on_with(self, character: str) -> bool:
        inside = self._in_string or bool(self._expected)
        if not inside and (character in ",}]" or character.isspace() or (self._begun and character in '"{[')):
            self.complete, self.broken = (
                self._begun,
                not self._begun,
            )  # a number or a word has ended, or none began
            return False
        self._begun = True
        self._follow(character)
        if inside and not self._in_string and not self._expected:
            self.complete = not self.broken
        return not self.broken

    def _follow(self, character: str) -> None:
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
    """The text of a whole value. None, and the cursor stays: there is none, or not all of it."""
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
    """What a string says. None, and the cursor stays: there is none, or not all of it."""
    start = cursor.at
    raw = yield from take_value(cursor)
    text = None if raw is None else string_content(raw)
    if text is None:
        cursor.at = start
    return text


def string_content(raw: str) -> str | None:
    """What the JSON string `raw` says; line breaks may stand in it as they are. None: it is no string."""
    if not raw.startswith('"'):
        return None
    try:
        text: str = json.loads(raw, strict=False)
        text.encode()
    except ValueError:  # an escape that is none, or half a surrogate pair
        return None
    return text
