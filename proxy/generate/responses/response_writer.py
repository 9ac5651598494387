"""Answers of OpenAI's Responses API: deltas become a document, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from kvshare.engine import Delta, FinishReason
from proxy.errors import ErrorReply
from proxy.generate.answer_writer import Block, BlockChange, BlockKind, BlockWriter, Usage
from proxy.generate.requests import ChatRequest
from proxy.generate.responses.bodies import ResponsesBody
from proxy.sse import named_events

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
_EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseWriter(BlockWriter):
    """Writes one response: items of output, each a message, its thoughts or a call of a function."""

    def __init__(self, asked: ChatRequest, body: ResponsesBody) -> None:
        super().__init__(asked, is_stream=body.stream)
        self._answer_id = asked.generation.request_id
        head = {"id": f"resp_{self._answer_id}", "object": "response", "created_at": int(time.time())}
        self._head = {**head, "model": asked.model, **body.echo}
        self._numbers = count()  # of events

    def whole(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._blocks.finish_reason is FinishReason.LENGTH
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        return {**response, "usage": _document(usage, self._blocks.num_reasoning_tokens)}

    def opening(self, usage: Usage) -> bytes:
        response = self._response("in_progress")
        return self._events(
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        )

    def more(self, delta: Delta) -> bytes:
        changes = self._blocks.add(delta)
        return self._events(*(event for change in changes for event in self._change_events(change)))

    def closing(self, usage: Usage) -> bytes:
        response = self.whole(usage)
        return self._events({"type": f"response.{response['status']}", "response": response})

    def broken_off(self, reply: ErrorReply) -> bytes:
        """An error, which the openai client raises for its member `error`, then the failed response."""
        self._blocks.cut_off()
        code = reply.code or "server_error"
        error = {"code": code, "message": reply.message, "param": reply.param}
        response = {**self._response("failed"), "error": {"code": code, "message": reply.message}}
        return self._events(
            {"type": "error", **error, **reply.body}, {"type": "response.failed", "response": response}
        )

    def _response(self, status: str) -> dict[str, Any]:
        output = [self._ended_item(block) for block in self._blocks.all]
        unset = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._head, "status": status, **unset, "output": output}

    def _events(self, *documents: dict[str, Any]) -> bytes:
        """Numbered from 0 through the whole stream."""
        return named_events(*({**document, "sequence_number": next(self._numbers)} for document in documents))

    def _change_events(self, change: BlockChange) -> Iterator[dict[str, Any]]:
        """Yield the events of a change, without sequence numbers."""
        block, kind = change.block, change.block.kind
        item_place = {"output_index": block.index}
        place: dict[str, Any] = {"item_id": self._item_id(block), **item_place}
        if kind is not BlockKind.CALL:
            place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if kind is BlockKind.TEXT else {}
        if change.kind == "began":
            item = self._item(block, "in_progress", "", [])
            yield {"type": "response.output_item.added", **item_place, "item": item}
            if kind is not BlockKind.CALL:
                yield {"type": "response.content_part.added", **place, "part": _part(block, "")}
        elif change.kind == "grew":
            yield {"type": f"{_EVENTS[kind]}.delta", **place, **logprobs, "delta": change.text}
        else:
            is_call = kind is BlockKind.CALL
            final = {"name": block.name, "arguments": block.text} if is_call else {"text": block.text}
            yield {"type": f"{_EVENTS[kind]}.done", **place, **logprobs, **final}
            if not is_call:
                yield {"type": "response.content_part.done", **place, "part": _part(block, block.text)}
            yield {"type": "response.output_item.done", **item_place, "item": self._ended_item(block)}

    def _ended_item(self, block: Block) -> dict[str, Any]:
        status = "incomplete" if block.is_cut_off else "completed"
        return self._item(block, status, block.text, [_part(block, block.text)])

    def _item(self, block: Block, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {**head, "type": "function_call", **call}
        if block.kind is BlockKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._answer_id}_{block.index}"


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _document(usage: Usage, num_reasoning_tokens: int) -> dict[str, Any]:
    num_input, num_output = usage.report.num_prompt_tokens, usage.num_completion_tokens
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": usage.report.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_input + num_output,
        "kvshare": usage.kvshare,
    }
