"""
The JSON of OpenAI's answers, whole and as chunks of a stream: what `/v1/chat/completions` and
`/v1/completions` write alike, and text completions.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshare.engine import Delta, FinishReason, GenerationRequest, TokenLogprob
from kvshare.errors import EngineError
from proxy.errors import ErrorReply
from proxy.generate.answer_writer import AnswerWriter, Blocks, Usage
from proxy.generate.chat.bodies import CompletionBody, GenerationBody
from proxy.sse import DONE, frames

Piece = dict[str, Any]
"""What a choice says next, as JSON."""

_PRINTABLE = frozenset(range(0x20, 0x7F)) - {ord("\\")}

Content = tuple[Piece, Sequence[TokenLogprob] | None]
"""A piece, and the tokens that it consists of; None where an earlier piece had them."""


@dataclass(slots=True)
class WrittenChoice:
    """One choice as far as it has come. `blocks`: of a chat's choice that may hold more than text."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    blocks: Blocks | None = None
    has_begun: bool = False  # with more than white space
    num_before_blocks: int = 0  # characters that were sent before there were blocks
    unsent: list[TokenLogprob] = field(default_factory=list)  # as the blocks wait for more text

    @property
    def calls_tools(self) -> bool:
        return self.blocks is not None and self.blocks.calls_tools

    def shown(self, tokens: Iterable[TokenLogprob]) -> list[TokenLogprob]:
        """Return those of the tokens whose text is in the answer, which has ended."""
        if self.blocks is None:
            return list(tokens)
        return [token for token in tokens if self.blocks.is_shown(token.offset - self.num_before_blocks)]


class ChoiceWriter(AnswerWriter):
    """Writes an answer of choices. Every document carries the same id, creation time and model."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def __init__(
        self, requests: Sequence[GenerationRequest], body: GenerationBody, model: str, first: Sequence[Piece]
    ) -> None:
        """
        `requests` are the prompts of `body`; each has as many choices as it asks for. `first`: what each
        choice of a stream says before any generated text, if anything.
        """
        self.requests = requests
        self.is_stream = bool(body.stream)
        self._first = first
        answer_id = f"{self.id_prefix}-{requests[0].request_id}"
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._with_logprobs = requests[0].sampling.logprobs is not None
        self._no_usage_yet: dict[str, Any] = {"usage": None} if body.include_usage else {}
        self.choices = [WrittenChoice() for _ in range(len(requests) * body.num_choices)]

    def whole(self, usage: Usage) -> dict[str, Any]:
        self._check_ended()
        pieces = [self._whole(index) for index in range(len(self.choices))]
        choices = [
            self._choice(index, piece, self.choices[index].shown(self.choices[index].logprobs), ended=True)
            for index, piece in enumerate(pieces)
        ]
        return {**self._head, "object": self.object_name, "choices": choices, "usage": document(usage)}

    def collect(self, delta: Delta) -> None:
        choice = self.choices[delta.choice]
        choice.text += delta.text
        choice.logprobs.extend(delta.logprobs)
        choice.finish_reason = delta.finish_reason or choice.finish_reason
        choice.stop = delta.stop or choice.stop

    def opening(self, usage: Usage) -> bytes:
        return frames(*(self._chunk(self._choice(index, part)) for index, part in enumerate(self._first)))

    def more(self, delta: Delta) -> bytes:
        """A delta's content, if there is any to send, then the end of its choice, if it is the end."""
        index = delta.choice
        documents = [self._choice(index, part, tokens) for part, tokens in self._contents(delta)]
        if delta.finish_reason is not None:
            self.choices[index].finish_reason = delta.finish_reason
            documents.append(self._choice(index, self._part(None), ended=True))
        return frames(*map(self._chunk, documents))

    def closing(self, usage: Usage) -> bytes:
        self._check_ended()
        if not self._no_usage_yet:
            return DONE
        return frames({**self._chunk(), "usage": document(usage)}) + DONE

    def broken_off(self, reply: ErrorReply) -> bytes:
        return frames(reply.body) + DONE

    def _check_ended(self) -> None:
        if any(choice.finish_reason is None for choice in self.choices):
            raise EngineError("The engine ended a choice without saying why.")

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        head = {**self._head, "object": self.chunk_object_name}
        return {**head, "choices": list(choices), **self._no_usage_yet}

    def _choice(
        self, index: int, piece: Piece, tokens: Sequence[TokenLogprob] | None = None, *, ended: bool = False
    ) -> dict[str, Any]:
        """A choice, or a piece of it; `tokens` are those of the piece, None where it has none."""
        choice = self.choices[index]
        logprobs = None if tokens is None or not self._with_logprobs else self._logprobs(choice, tokens)
        finish_reason = self._finish_reason(choice) if ended else None
        return {"index": index, **piece, "logprobs": logprobs, "finish_reason": finish_reason}

    def _contents(self, delta: Delta) -> list[Content]:
        if delta.text or (self._with_logprobs and delta.logprobs):
            return [(self._part(delta.text), delta.logprobs)]
        return []

    def _finish_reason(self, choice: WrittenChoice) -> str | None:
        return choice.finish_reason

    @abstractmethod
    def _whole(self, index: int) -> Piece:
        """All that a choice says."""

    @abstractmethod
    def _part(self, text: str | None) -> Piece:
        """More text of a choice; None at its end."""

    @abstractmethod
    def _logprobs(self, choice: WrittenChoice, tokens: Sequence[TokenLogprob]) -> dict[str, Any]: ...


class CompletionWriter(ChoiceWriter):
    """Writes the answer of POST /v1/completions."""

    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self, requests: Sequence[GenerationRequest], body: CompletionBody, model: str, echoed: Sequence[str]
    ) -> None:
        """`echoed`: the text of each prompt, if choices begin with it."""
        first = [self._part(text) for text in echoed for _ in range(body.num_choices)]
        super().__init__(requests, body, model, first)

    def _whole(self, index: int) -> Piece:
        echoed = self._first[index]["text"] if self._first else ""
        return self._part(echoed + self.choices[index].text)

    def _part(self, text: str | None) -> Piece:
        return {"text": text or ""}

    def _logprobs(self, choice: WrittenChoice, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [token_name(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [top_of(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def token_name(token: TokenLogprob) -> str:
    r"""A token's text; as OpenAI writes it, `bytes:\xf0\x9f` where it is not whole characters."""
    try:
        token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if byte in _PRINTABLE else f"\\x{byte:02x}" for byte in token.raw)
    return token.text


def top_of(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens and the sampled one. Tokens of equal text get different names, by their ids."""
    names: dict[str, int] = {token_name(token): token.token_id}
    entries: dict[str, float] = {}
    for entry in (*token.top, token):
        name = token_name(entry)
        if names.setdefault(name, entry.token_id) != entry.token_id:
            name = f"token_id:{entry.token_id}"
        entries[name] = finite(entry.logprob)
    return entries


def finite(logprob: float) -> float:
    """JSON has no -Infinity; OpenAI writes -9999.0 for a token that cannot come."""
    return max(logprob, -9999.0)


def document(usage: Usage) -> dict[str, Any]:
    """`cached_tokens` is always a number: 0 where nothing was shared."""
    report = usage.report
    return {
        "prompt_tokens": report.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": report.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": report.num_cached},
        "kvshare": usage.kvshare,
    }
