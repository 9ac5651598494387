"""Reads `<tool_call>{"name": .., "arguments": {..}}</tool_call>`."""

from __future__ import annotations

from kvshare.conversation.formats.calls import CallReader, Calls, Steps
from kvshare.conversation.formats.cursor import Cursor
from kvshare.conversation.formats.json_call import read_call


class HermesReader(CallReader):
    markers = ("<tool_call>",)

    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        begun = yield from read_call(cursor, calls, marked=True)
        if begun:
            yield from cursor.accept_after_space("</tool_call>")
        return begun
