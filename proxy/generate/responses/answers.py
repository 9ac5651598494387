"""Answers of OpenAI's Responses API: deltas become a document, or the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvshare.engines.base import Delta, FinishReason
from proxy.errors import ErrorReply
from proxy.generate.answer import Usage
from proxy.generate.blocks import Block, BlockAnswer, BlockKind, Change
from proxy.generate.requests import ChatRequest
from proxy.generate.responses.bodies import ResponsesBody
from proxy.sse import named_events

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
_EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseAnswer(BlockAnswer):
    """One response: items of output, each an assistant's message, its thoughts or a call of a function."""

    def __init__(self, asked: ChatRequest, body: ResponsesBody, *, model: str) -> None:
        super().__init__(asked, is_stream=body.stream)
        request_id = asked.generation.request_id
        head = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time())}
        self._head = {**head, "model": model, **body.echo}
        self._output = Output(request_id)
        self._num_events = 0

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
        return self._events(*(event for change in changes for event in self._output.events(change)))

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
        output = [self._output.item(block) for block in self._blocks.all]
        unset = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._head, "status": status, **unset, "output": output}

    def _events(self, *documents: dict[str, Any]) -> bytes:
        """Numbered from 0 through the whole stream."""
        first = self._num_events
        self._num_events += len(documents)
        return named_events(
            *({**document, "sequence_number": first + n} for n, document in enumerate(documents))
        )


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


@dataclass(frozen=True, slots=True)
class Output:
    """Writes the items of one response; their ids begin with `answer_id`."""

    answer_id: str

    def item(self, block: Block) -> dict[str, Any]:
        """A block that has ended."""
        status = "incomplete" if block.is_cut_off else "completed"
        return self._item(block, status, block.text, [_part(block, block.text)])

    def events(self, change: Change) -> Iterator[dict[str, Any]]:
        """Without sequence numbers."""
        block = change.block
        if change.kind == "began":
            yield self._of_item("added", block, self._item(block, "in_progress", "", []))
            if block.kind is not BlockKind.CALL:
                yield self._of_part("added", block, "")
        elif change.kind == "grew":
            yield {**self._of_text("delta", block), "delta": change.text}
        else:
            yield {**self._of_text("done", block), **_final(block)}
            if block.kind is not BlockKind.CALL:
                yield self._of_part("done", block, block.text)
            yield self._of_item("done", block, self.item(block))

    def _item(self, block: Block, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id(block), "status": status}
        if block.kind is BlockKind.CALL:
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {**head, "type": "function_call", **call}
        if block.kind is BlockKind.REASONING:
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _of_item(self, what: str, block: Block, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": f"response.output_item.{what}", "output_index": block.index, "item": item}

    def _of_part(self, what: str, block: Block, text: str) -> dict[str, Any]:
        place = self._place(block)
        return {"type": f"response.content_part.{what}", **place, "part": _part(block, text)}

    def _of_text(self, what: str, block: Block) -> dict[str, Any]:
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
        return {"type": f"{_EVENTS[block.kind]}.{what}", **self._place(block), **logprobs}

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self.answer_id}_{block.index}"


def _part(block: Block, text: str) -> dict[str, Any]:
    """The only part of an item's content."""
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _final(block: Block) -> dict[str, Any]:
    """What the event at the end of a block's text says beside its place."""
    if block.kind is BlockKind.CALL:
        return {"name": block.name, "arguments": block.text}
    return {"text": block.text}
