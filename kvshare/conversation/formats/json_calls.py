"""
Reads tool calls that are JSON objects.

    Hermes     <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Llama 3    {"name": .., "parameters": {..}} at the start of an answer, or after <|python_tag|>
    Mistral    [TOOL_CALLS][{"name": .., "arguments": {..}}, ..], and the newer [TOOL_CALLS]name[ARGS]{..}
"""

import re

from kvshare.conversation.formats.json_value import JsonValue, string_content, take_string, take_value
from kvshare.conversation.formats.reader import CallReader, Calls, Cursor, Steps, Waiting

_ARGUMENTS = ("arguments", "parameters")
_WORD = re.compile(r"[^\s\[\]{}<>\"]*")
_KEYS = {"name", "type", "id", *_ARGUMENTS}


def read_call(cursor: Cursor, calls: Calls, *, marked: bool) -> Steps[bool]:
    """
    Read `{"name": .., "arguments": ..}`, and ignore other keys. Returns whether the call has begun.

    After a marker (`marked`) a call begins when its name is complete. Without one it begins when its
    arguments follow, and must not have other keys before: an answer in JSON may have a key "name", too.
    """
    call = _Call(cursor, calls, marked=marked)
    goes_on = yield from call.read_field("{")
    while goes_on:
        goes_on = yield from call.read_field(",")
    closed = not call.broken and (yield from cursor.accept_after_space("}"))
    if closed and call.begun and not call.has_arguments:
        yield calls.arguments("{}")
    return call.begun


def read_calls(cursor: Cursor, calls: Calls, *, separator: str, marked: bool) -> Steps[bool]:
    """Read one or more calls. Returns whether one has begun; the cursor is then after the last."""
    begun = goes_on = yield from read_call(cursor, calls, marked=marked)
    while goes_on:
        cursor.drop()
        goes_on = yield from cursor.accept_after_space(separator)
        goes_on = goes_on and (yield from read_call(cursor, calls, marked=marked))
        if not goes_on:
            if cursor.starved and cursor.text.strip():
                cursor.hide()
            cursor.at = 0
    return begun


def stream_arguments(cursor: Cursor, calls: Calls) -> Steps[bool]:
    """Read the arguments of the last call, as they come. Returns whether they are complete."""
    yield from cursor.skip_space()
    if (yield from cursor.peek()) != "{":
        raw = yield from take_value(cursor)
        if raw is not None:
            yield calls.arguments(_as_object(raw))
        return raw is not None
    value = JsonValue()
    while True:
        piece = value.take(cursor)
        if piece:
            cursor.drop()
            yield calls.arguments(piece)
        if value.ended or not (yield from cursor.more()):
            return value.complete


class _Call:
    """The state of a call while its fields are read."""

    def __init__(self, cursor: Cursor, calls: Calls, *, marked: bool) -> None:
        self.begun = False
        self.has_arguments = False
        self.broken = False  # its arguments are not complete
        self._cursor = cursor
        self._calls = calls
        self._marked = marked
        self._name: str | None = None
        self._early: str | None = None  # arguments that came before the name

    def read_field(self, opening: str) -> Steps[bool]:
        """Read `opening`, a key and its value. Returns whether they are complete; if not, it stays."""
        start = self._cursor.at
        key = yield from self._take_key(opening)
        if key in _ARGUMENTS and self._name and not self.has_arguments:
            return (yield from self._read_arguments())
        whole = key is not None
        if key == "name" and self._name is None:
            whole = yield from self._read_name()
        elif key is not None:
            value = yield from take_value(self._cursor)
            whole = value is not None
            if key in _ARGUMENTS and self._early is None and value is not None:
                self._early = _as_object(value)
        if not whole:
            self._cursor.at = start
        return whole

    def _take_key(self, opening: str) -> Waiting[str | None]:
        if not (yield from self._cursor.accept_after_space(opening)):
            return None
        key = yield from take_string(self._cursor)
        if key not in _KEYS and not (self._marked or self.begun):
            return None  # an object that is not a call becomes text at once, before it is complete
        return key if (yield from self._cursor.accept_after_space(":")) else None

    def _read_name(self) -> Steps[bool]:
        self._name = yield from take_string(self._cursor)
        if not self._name:
            return False
        if self._marked or self._early is not None:
            yield from self._begin(self._name)
        if self._early is not None:
            self.has_arguments = True
            yield self._calls.arguments(self._early)
        return True

    def _read_arguments(self) -> Steps[bool]:
        assert self._name
        if not self.begun:
            yield from self._begin(self._name)
        self.has_arguments = True
        self.broken = not (yield from stream_arguments(self._cursor, self._calls))
        return not self.broken

    def _begin(self, name: str) -> Steps[None]:
        self.begun = True
        yield self._calls.begin(name)


def _as_object(raw: str) -> str:
    """Arguments that are not an object: the content of a string, `{}` for null, others as they are."""
    if raw == "null":
        return "{}"
    return string_content(raw) or raw


class HermesReader(CallReader):
    markers = ("<tool_call>",)

    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        begun = yield from read_call(cursor, calls, marked=True)
        if begun:
            yield from cursor.accept_after_space("</tool_call>")
        return begun


class Llama3Reader(CallReader):
    markers = ("<|python_tag|>",)
    first_markers = ("{",)

    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        marked = marker in self.markers
        if not marked:
            cursor.at -= len(marker)  # the marker is the opening bracket of the call
        return (yield from read_calls(cursor, calls, separator=";", marked=marked))


class MistralReader(CallReader):
    markers = ("[TOOL_CALLS]",)

    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        if not (yield from cursor.accept_after_space("[")):
            return (yield from _read_named(cursor, calls))
        begun = yield from read_calls(cursor, calls, separator=",", marked=True)
        if begun:
            yield from cursor.accept_after_space("]")
        return begun


def _read_named(cursor: Cursor, calls: Calls) -> Steps[bool]:
    """Read `name[ARGS]{..}`. Some models write `name{..}`, or `name[CALL_ID]id[ARGS]{..}`."""
    yield from cursor.skip_space()
    name = yield from cursor.take_run(_WORD)
    if (yield from cursor.accept("[CALL_ID]")):
        yield from cursor.take_run(_WORD)
    if not name or not ((yield from cursor.accept("[ARGS]")) or (yield from cursor.peek()) == "{"):
        return False
    yield calls.begin(name)
    yield from stream_arguments(cursor, calls)
    return True
