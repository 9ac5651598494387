"""
Server-sent events: headers, frames, comments. What the frames say is decided elsewhere.

A stream that merely ends looks like success to clients, so every one that began ends with `[DONE]`, after
an error frame if it failed.
"""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold frames back
}


DONE = b"data: [DONE]\n\n"


class EventStream:
    """One SSE response. From `begin` on, the status line is out and errors can only be frames."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    async def begin(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, *documents: dict[str, Any]) -> None:
        """One frame per document, in one write."""
        if documents:
            await self.response.write(b"".join(frame(document) for document in documents))

    async def keep_alive(self) -> None:
        """A comment: clients skip it, idle timeouts on the way do not."""
        await self.response.write(b": keep-alive\n\n")

    async def finish(self) -> None:
        await self.response.write(DONE)
        await self.response.write_eof()


def frame(document: dict[str, Any]) -> bytes:
    """One event. JSON escapes line ends, so that a document is always one `data` line."""
    return b"data: " + dump(document) + b"\n\n"


def dump(document: dict[str, Any]) -> bytes:
    """Compact and pure ASCII, so that half a character, as an engine may emit it, can be sent."""
    return json.dumps(document, separators=(",", ":")).encode("ascii")
