"""Reads `{"name": .., "parameters": {..}}` at the start of an answer, or after `<|python_tag|>`."""

from __future__ import annotations

from kvshare.conversation.formats.calls import CallReader, Calls, Steps
from kvshare.conversation.formats.cursor import Cursor
from kvshare.conversation.formats.json_call import read_calls


class Llama3Reader(CallReader):
    markers = ("<|python_tag|>",)
    first_markers = ("{",)

    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        marked = marker in self.markers
        if not marked:
            cursor.at -= len(marker)  # the marker is the opening bracket of the call
        return (yield from read_calls(cursor, calls, separator=";", marked=marked))
