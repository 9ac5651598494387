"""chat.completion and chat.completion.chunk: text, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshare.conversation.parser import AnswerParser
from kvshare.conversation.parts import CallArguments, CallBegins, Part, Reasoning, Text
from kvshare.engines.base import Delta, FinishReason, TokenLogprob
from proxy.generate.chat.answers import Content, OpenAIAnswer, finite
from proxy.generate.chat.bodies import ChatBody
from proxy.generate.requests import ChatRequest

_THOUGHTS = "<think>"  # how they begin where a model writes them by itself


@dataclass(slots=True)
class _Voice:
    """How a choice is read. `unsent`: tokens that were not sent, as the parser waits for more text."""

    parser: AnswerParser | None
    has_begun: bool = False
    unsent: list[TokenLogprob] = field(default_factory=list)

    @property
    def has_calls(self) -> bool:
        return self.parser is not None and self.parser.num_calls > 0


class ChatAnswer(OpenAIAnswer):
    """
    The answer of POST /v1/chat/completions.

    Where an answer may hold more than text, each choice has a parser. Else its text goes out as it comes,
    unless it begins as thoughts do.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, body: ChatBody, *, model: str) -> None:
        super().__init__([asked.generation], body, model=model)
        self._new_parser = asked.new_parser
        self._voices = [_Voice(None if asked.is_plain else asked.new_parser()) for _ in self.choices]
        self._calls: type[Calls] = LegacyCalls if body.functions else Calls

    @property
    def has_calls(self) -> bool:
        return any(voice.has_calls for voice in self._voices)

    def _opening(self) -> list[tuple[int, dict[str, Any]]]:
        first = {"delta": {"role": "assistant", "content": ""}}
        return [(index, first) for index in range(len(self.choices))]

    def _whole(self, index: int) -> dict[str, Any]:
        text = self.choices[index].text
        parser = self._parser(index, text)
        if parser is None:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"message": self._message([*parser.add(text), *parser.end()])}

    def _parser(self, index: int, text: str) -> AnswerParser | None:
        """Of a choice that goes on with `text`; None where it is only that."""
        voice = self._voices[index]
        if not voice.has_begun and text and not text.isspace():
            voice.has_begun = True
            if voice.parser is None and _THOUGHTS.startswith(text.lstrip()[: len(_THOUGHTS)]):
                voice.parser = self._new_parser()
        return voice.parser

    def _message(self, parts: Sequence[Part]) -> dict[str, Any]:
        text = "".join(part.text for part in parts if isinstance(part, Text))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = self._calls.whole(parts)
        content = None if calls and not text else text
        return {
            "role": "assistant",
            "content": content,
            "refusal": None,
            **(_reasoning(thought) if thought else {}),
            **calls,
        }

    def _contents(self, delta: Delta) -> list[Content]:
        parser = self._parser(delta.choice, delta.text)
        if parser is None:
            return super()._contents(delta)
        unsent = self._voices[delta.choice].unsent
        unsent.extend(delta.logprobs)
        parts = parser.add(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *parser.end()]
        pieces = [piece for part in parts if (piece := self._piece(part))]
        if not pieces and unsent and delta.finish_reason is not None:
            pieces = [{"content": ""}]
        if not pieces:
            return []
        self._voices[delta.choice].unsent = []
        return [({"delta": piece}, None if number else unsent) for number, piece in enumerate(pieces)]

    def _piece(self, part: Part) -> dict[str, Any]:
        """A part as a delta says it; empty where it says nothing."""
        if isinstance(part, Text):
            return {"content": part.text} if part.text else {}
        if isinstance(part, Reasoning):
            return _reasoning(part.text) if part.text else {}
        return self._calls.piece(part)

    def _part(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _finish_reason(self, index: int) -> str | None:
        reason = self.choices[index].finish_reason
        if reason is FinishReason.STOP and self._voices[index].has_calls:
            return self._calls.finish_reason
        return reason

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [{**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens]
        return {"content": content, "refusal": None}


class Calls:
    """How calls of tools are written."""

    finish_reason = "tool_calls"

    @staticmethod
    def whole(parts: Sequence[Part]) -> dict[str, Any]:
        """Of all parts of an answer; empty if there are no calls."""
        calls = [
            {
                "id": begin.call_id,
                "type": "function",
                "function": {"name": begin.name, "arguments": _arguments(parts, begin.number)},
            }
            for begin in parts
            if isinstance(begin, CallBegins)
        ]
        return {"tool_calls": calls} if calls else {}

    @staticmethod
    def piece(part: CallBegins | CallArguments) -> dict[str, Any]:
        if isinstance(part, CallArguments):
            return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.number, "id": part.call_id, "type": "function", "function": function}
        return {"tool_calls": [call]}


class LegacyCalls(Calls):
    """In the older API of functions, an answer has at most one call; further ones are left out."""

    finish_reason = "function_call"

    @staticmethod
    def whole(parts: Sequence[Part]) -> dict[str, Any]:
        first = next((part for part in parts if isinstance(part, CallBegins)), None)
        if first is None:
            return {}
        return {"function_call": {"name": first.name, "arguments": _arguments(parts, first.number)}}

    @staticmethod
    def piece(part: CallBegins | CallArguments) -> dict[str, Any]:
        if part.number > 0:
            return {}
        if isinstance(part, CallArguments):
            return {"function_call": {"arguments": part.text}}
        return {"function_call": {"name": part.name, "arguments": ""}}


def _arguments(parts: Sequence[Part], number: int) -> str:
    return "".join(part.text for part in parts if isinstance(part, CallArguments) and part.number == number)


def _reasoning(text: str) -> dict[str, str]:
    """By DeepSeek's name and by vLLM's: clients know one of them."""
    return {"reasoning_content": text, "reasoning": text}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}
