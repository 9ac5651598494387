"""
Readers of calls that are JSON objects.

    Hermes     <tool_call>{"name": .., "arguments": {..}}</tool_call>
    Llama 3    {"name": .., "parameters": {..}} at the start of an answer, or after <|python_tag|>
    Mistral    [TOOL_CALLS][{"name": .., "arguments": {..}}, ..], and the newer [TOOL_CALLS]name[ARGS]{..}
"""

from __future__ import annotations

import re

from kvshare.conversation.formats.calls import CallReader, Calls, Steps
from kvshare.conversation.formats.cursor import Cursor
from kvshare.conversation.formats.json_call import read_call, read_calls, stream_arguments

_WORD = re.compile(r"[^\s\[\]{}<>\"]*")


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
