"""Answers of Anthropic's Messages API: deltas become a document, or the events of a stream."""

from __future__ import annotations

import math
from typing import Any

from pydantic_core import from_json

from kvshare.engine import Delta, FinishReason
from proxy.errors import ErrorReply
from proxy.generate.answer_writer import Block, BlockChange, BlockKind, BlockWriter, Usage
from proxy.generate.messages.bodies import MessagesBody
from proxy.generate.requests import ChatRequest
from proxy.sse import named_events


class MessageWriter(BlockWriter):
    """Writes one message: blocks of text, thoughts and tool uses."""

    keep_alive = named_events({"type": "ping"})

    def __init__(self, asked: ChatRequest, body: MessagesBody) -> None:
        super().__init__(asked, is_stream=body.stream)
        self._client_request_id = asked.client_request_id
        answer_id = f"msg_{asked.generation.request_id}"
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": asked.model}

    def whole(self, usage: Usage) -> dict[str, Any]:
        content = [
            _documented(block, text=block.text, arguments=_parsed(block.text)) for block in self._blocks.all
        ]
        return {**self._head, "content": content, **self._ending, "usage": _document(usage)}

    def opening(self, usage: Usage) -> bytes:
        nothing_yet: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing_yet, "usage": _document(usage)}
        return named_events({"type": "message_start", "message": message})

    def more(self, delta: Delta) -> bytes:
        return named_events(*(_event(change) for change in self._blocks.add(delta)))

    def closing(self, usage: Usage) -> bytes:
        last = {"type": "message_delta", "delta": self._ending, "usage": _document(usage)}
        return named_events(last, {"type": "message_stop"})

    def broken_off(self, reply: ErrorReply) -> bytes:
        return named_events(reply.anthropic_body(self._client_request_id))

    @property
    def _ending(self) -> dict[str, str | None]:
        """Return why the answer ended. A stop string may cut a call short, so it counts before the calls."""
        blocks = self._blocks
        if blocks.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if blocks.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": blocks.stop}
        return {"stop_reason": "tool_use" if blocks.calls_tools else "end_turn", "stop_sequence": None}


def _event(change: BlockChange) -> dict[str, Any]:
    index = change.block.index
    if change.kind == "began":
        block = _documented(change.block, text="", arguments={})
        return {"type": "content_block_start", "index": index, "content_block": block}
    if change.kind == "grew":
        delta_type, field = _DELTAS[change.block.kind]
        return {
            "type": "content_block_delta",
            "index": index,
            "delta": {"type": delta_type, field: change.text},
        }
    return {"type": "content_block_stop", "index": index}


_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def _documented(block: Block, *, text: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}  # this server signs nothing
    return {"type": "text", "text": text}


def _parsed(arguments: str) -> dict[str, Any]:
    """Read arguments in which the answer was cut off as far as they go, as clients read a stream of them."""
    try:
        document = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return _writable(document) if isinstance(document, dict) else {}


def _writable(value: Any) -> Any:
    """A number beyond all floats, such as 1e400, is null, as in JavaScript: JSON has no infinity."""
    match value:
        case dict():
            return {name: _writable(each) for name, each in value.items()}
        case list():
            return [_writable(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value


def _document(usage: Usage) -> dict[str, Any]:
    """Return `usage`. In Anthropic's count, a prompt's tokens are `input_tokens` and those from the cache."""
    num_cached = usage.report.num_cached
    return {
        "input_tokens": usage.report.num_prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.num_completion_tokens,
        "kvshare": usage.kvshare,
    }
