"""The events of vLLM's streams on each generating route, as a fake sends them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Events:
    """`opening` comes before anything is computed, `beginning` with the first token, `more` for each."""

    more: str
    opening: bytes = b""
    beginning: bytes = b""
    closing: bytes = b""

    def text(self, text: str) -> bytes:
        return self.more.replace("TEXT", json.dumps(text)).encode()


def _event(document: Mapping[str, Any]) -> bytes:
    """With spaces where ours has none: whoever parses and writes anew is found out."""
    return f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode()


_CHUNK = (
    'data: {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny", '
    '"choices": [{"index": 0, "delta": {"content": TEXT}, "finish_reason": null}]}\n\n'
)
_CHAT = Events(
    _CHUNK, closing=_CHUNK.replace("TEXT", '""').replace("null", '"stop"').encode() + b"data: [DONE]\n\n"
)
_RESPONSE = {"id": "x", "object": "response", "output": []}

EVENTS: Mapping[str, Events] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _CHAT,
    "/v1/responses": Events(
        'event: response.output_text.delta\ndata: {"type": "response.output_text.delta", "delta": TEXT}\n\n',
        opening=_event({"type": "response.created", "response": _RESPONSE}),
        beginning=_event({"type": "response.output_item.added", "output_index": 0, "item": {}}),
        closing=_event({"type": "response.completed", "response": _RESPONSE}),
    ),
    "/v1/messages": Events(
        'event: content_block_delta\ndata: {"type": "content_block_delta", "index": 0, '
        '"delta": {"type": "text_delta", "text": TEXT}}\n\n',
        beginning=_event({"type": "message_start", "message": {"id": "x", "type": "message"}}),
        closing=_event({"type": "message_stop"}),
    ),
}
