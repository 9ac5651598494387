"""Answers of OpenAI's Responses API: deltas become a document, or the events of a stream."""

from __future__ import annotations

import time
from typing import Any

from kvshare.engines.base import Delta, FinishReason
from proxy.errors import ErrorReply
from proxy.generate.answer import Usage
from proxy.generate.blocks import BlockAnswer
from proxy.generate.requests import ChatRequest
from proxy.generate.responses.bodies import ResponsesBody
from proxy.generate.responses.output import Output
from proxy.sse import named_events


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
