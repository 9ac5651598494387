"""
Server-sent events: headers, frames, comments. What the frames say is decided elsewhere.

A stream that merely ends looks like success to clients, so every one that began ends with `[DONE]`, or with
the last event of its API, after an error event if it failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold frames back
}
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients skip it, idle timeouts on the way do not
DONE = b"data: [DONE]\n\n"


def frames(*documents: Mapping[str, Any]) -> bytes:
    """One event per document. JSON escapes line ends, so that a document is always one `data` line."""
    return b"".join(b"data: " + dump(document) + b"\n\n" for document in documents)


def named_events(*documents: Mapping[str, Any]) -> bytes:
    """The same, each event named by its document's `type`, as in the Messages and the Responses API."""
    return b"".join(b"event: %s\n" % each["type"].encode("ascii") + frames(each) for each in documents)


def dump(document: object) -> bytes:
    """Compact and pure ASCII, so that half a character, as an engine may emit it, can be sent."""
    return json.dumps(document, separators=(",", ":")).encode("ascii")
