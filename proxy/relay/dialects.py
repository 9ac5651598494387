"""
The four routes of vLLM that generate, and what differs between them: where a body has its text, which bodies
cannot be planned, and how a stream says that it breaks off.

Tokens are not made here: vLLM renders every route's body itself, see `render.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.reasons import Reason
from kvshare.rules.texts import SHAPES
from proxy.errors import ErrorReply
from proxy.sse import DONE, frames, named_events
from vector_index import PromptText

Body = Mapping[str, Any]


class Unplannable(Exception):
    """Why a request is relayed without a plan."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Dialect:
    """One generating route of vLLM."""

    path: str
    broken_off: Callable[[ErrorReply, str], bytes]  # the end of a stream that breaks off; + the request's id
    first_token: bytes = b""  # is in a stream as soon as there is a token; empty: its first byte says so
    check: Callable[[Body], None] = lambda document: None  # raises Unplannable

    def text_of(self, document: Body) -> PromptText:
        """The text of a body, of which `kvshare.rules.texts` says where it is. Raises Unplannable."""
        self.check(document)
        shape = SHAPES[self.path]
        if shape.messages is None:
            prompt = only_prompt(document)
            return PromptText(last_user_turn="", body=prompt if isinstance(prompt, str) else "")
        turns = document.get(shape.messages)
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise Unplannable(Reason.MALFORMED)
        texts = [_text(turn.get("content", turn.get("output"))) for turn in turns]
        users = [text for text, turn in zip(texts, turns, strict=True) if turn.get("role") == "user"]
        before = [_text(document.get(name)) for name in shape.texts]
        body = "\n".join(text for text in (*before, *texts) if text)
        return PromptText(last_user_turn=users[-1] if users else "", body=body)


# Parts of a content, and where each has its text, if it has any. Any other part is no text: an image, a file.
_TEXT_AT = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_result": "content",
    "tool_use": "",
    "tool_reference": "",
    "tool_addition": "",
    "tool_removal": "",
    "redacted_thinking": "",
}


def _text(content: object) -> str:
    """The text of a content, in one or in parts. Raises Unplannable where it is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        return "".join(map(_text, content))
    if not isinstance(content, Mapping) or (place := _TEXT_AT.get(str(content.get("type")))) is None:
        raise Unplannable(Reason.MULTIMODAL)
    return _text(content.get(place))


def _check_response(document: Body) -> None:
    if document.get("previous_response_id") is not None:
        raise Unplannable(Reason.PREVIOUS_RESPONSE)  # vLLM has the rest of the prompt
    if document.get("background"):
        raise Unplannable(Reason.BACKGROUND)  # it goes on when its answer is over


def _check_completion(document: Body) -> None:
    for reason in (Reason.PROMPT_EMBEDS, Reason.SUFFIX):  # named like the members
        if document.get(reason) is not None:
            raise Unplannable(reason)
    if document.get("echo") and document.get("logprobs") is not None:
        raise Unplannable(Reason.PROMPT_LOGPROBS)


def only_prompt(document: Body) -> str | list[Any]:
    """A completion's prompt, text or tokens; a list of one counts as that one. Raises Unplannable."""
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise Unplannable(Reason.SEVERAL_PROMPTS)
        prompt = prompt[0]
    if not isinstance(prompt, str | list):
        raise Unplannable(Reason.MALFORMED)
    return prompt


# Each begins with a blank line, which ends what may be half an event.


def _openai_end(reply: ErrorReply, request_id: str) -> bytes:
    return b"\n\n" + frames(reply.body) + DONE


def _responses_end(reply: ErrorReply, request_id: str) -> bytes:
    error = {"type": "error", "code": reply.code, "message": reply.message, "param": reply.param}
    return b"\n\n" + named_events({**error, **reply.body})  # the openai client raises for a member `error`


def _messages_end(reply: ErrorReply, request_id: str) -> bytes:
    return b"\n\n" + named_events(reply.anthropic_body(request_id))


CHAT = Dialect("/v1/chat/completions", _openai_end)
COMPLETION = Dialect("/v1/completions", _openai_end, check=_check_completion)
# A response begins with events that say so, at once.
_FIRST_ITEM = b"event: response.output_item.added"
RESPONSES = Dialect("/v1/responses", _responses_end, first_token=_FIRST_ITEM, check=_check_response)
MESSAGES = Dialect("/v1/messages", _messages_end)
