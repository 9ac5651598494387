"""
The base of all APIs' answers, which are written whole, or piece by piece as a stream.

The Messages and the Responses API write an answer as blocks: text, thoughts and calls, in order. A block
grows until the next begins; the stream of both APIs is made of these changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from kvshare.conversation.chat import CallArguments, CallBegins, Part, Reasoning, Text
from kvshare.conversation.formats.json_value import is_object
from kvshare.conversation.parser import AnswerParser
from kvshare.engine import Delta, FinishReason, GenerationRequest
from kvshare.errors import EngineError
from kvshare.reasons import cache_miss_reason
from kvshare.requests import SharingReport
from proxy.errors import ErrorReply
from proxy.generate.requests import ChatRequest
from proxy.request_history import tokens_by_source
from proxy.sse import KEEP_ALIVE


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of an answer, over all prompts of its request."""

    report: SharingReport
    num_completion_tokens: int

    @property
    def kvshare(self) -> dict[str, Any]:
        """Return where the prompt's KV came from, and why not more was shared. Donors are never named."""
        report, prediction = self.report, self.report.prediction
        return {
            **tokens_by_source(report),
            "decision": report.decision,
            "reason": report.reason,
            "expected_deviation": prediction and prediction.expected,
            "max_deviation": prediction and prediction.limit,
            "cache_miss_reason": cache_miss_reason(report.reason),
            "cache_missed_input_tokens": report.num_missed,
        }


class AnswerWriter(ABC):
    """
    Writes one answer in its API's words; it neither reads nor writes sockets.

    Whole: `collect` each delta, then `whole`. As a stream: `opening`, `more` for each delta, and `closing`;
    `broken_off` where it cannot be finished.
    """

    requests: Sequence[GenerationRequest]  # the prompts of the body, each with its `sampling.n` choices
    is_stream: bool
    keep_alive: bytes = KEEP_ALIVE  # what a stream sends while there is nothing to say

    @property
    def calls_tools(self) -> bool:
        """True if the answer, which has ended, calls tools and each call is whole."""
        return False

    @abstractmethod
    def collect(self, delta: Delta) -> None:
        """Add a delta to its choice."""

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """The whole answer. Raises EngineError if a choice has no finish reason."""

    @abstractmethod
    def opening(self, usage: Usage) -> bytes:
        """The events before any text; `usage` has no completion tokens yet."""

    @abstractmethod
    def more(self, delta: Delta) -> bytes:
        """The events of a delta; empty where it has nothing to show yet."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """The events after the last delta. Raises EngineError as `whole` does."""

    @abstractmethod
    def broken_off(self, reply: ErrorReply) -> bytes:
        """The last events of a stream that failed. Without them it would look as if it had succeeded."""


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


_KINDS: dict[type[Part], BlockKind] = {
    Text: BlockKind.TEXT,
    Reasoning: BlockKind.REASONING,
    CallArguments: BlockKind.CALL,
}


@dataclass(slots=True)
class Block:
    """`text` is what is said or thought, or the JSON text of a call's arguments."""

    index: int  # in the answer
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""  # of the tool
    number: int = 0  # of the call among the calls
    is_cut_off: bool = False  # the answer ended in this block, by the limit or an error; an incomplete call


@dataclass(frozen=True, slots=True)
class BlockChange:
    """A block begins, empty; gets more `text`; or ends."""

    kind: Literal["began", "grew", "ended"]
    block: Block
    text: str = ""


class Blocks:
    """The blocks of one answer. Once it has ended there is at least one: clients look at the first."""

    def __init__(self, parser: AnswerParser) -> None:
        self.all: list[Block] = []
        self.num_reasoning_tokens = 0
        self.stop: str | None = None  # the stop string that ended the answer
        self._parser = parser
        self._finish_reason: FinishReason | None = None
        self._is_open = False  # whether the last block may still grow

    @property
    def finish_reason(self) -> FinishReason:
        """Raises EngineError if the answer has no finish reason, which clients would take for success."""
        if self._finish_reason is None:
            raise EngineError("The engine ended the answer without saying why.")
        return self._finish_reason

    @property
    def calls_tools(self) -> bool:
        """
        Return whether the answer has calls, and each has the JSON text of an object as arguments.

        A call that is cut short, by the token limit or a stop string, or that the model wrote wrongly, must
        not pass for one that can be made.
        """
        calls = [block for block in self.all if block.kind is BlockKind.CALL]
        return bool(calls) and all(is_object(call.text) for call in calls)

    @property
    def num_read(self) -> int:
        """Characters of the answer that became parts of blocks, or are not shown."""
        return self._parser.num_read

    def is_shown(self, offset: int) -> bool:
        """Return whether the answer's text at this place is in a block: the head of a cut call is not."""
        hidden_from = self._parser.hidden_from
        return hidden_from is None or offset < hidden_from

    def text_of(self, kind: BlockKind) -> str:
        """All that blocks of this kind say."""
        return "".join(block.text for block in self.all if block.kind is kind)

    def add(self, delta: Delta) -> list[BlockChange]:
        """Return what a delta changes. The last delta, which has a finish reason, ends the last block."""
        changes = list(self._take(self._parser.add(delta.text)))
        if delta.finish_reason is not None:
            self._finish_reason, self.stop = delta.finish_reason, delta.stop
            is_at_limit = delta.finish_reason is FinishReason.LENGTH
            changes += self._take(self._parser.end(cut=is_at_limit or delta.stop is not None))
            if not self.all:
                changes += self._begin(Block(0, BlockKind.TEXT))
            if is_at_limit and self.all[-1].kind is not BlockKind.CALL:
                self.cut_off()
            changes += self._end()
        if self.all and self.all[-1].kind is BlockKind.REASONING:
            self.num_reasoning_tokens += delta.num_tokens
        return changes

    def cut_off(self) -> None:
        """The answer ends here, whatever else it would have said."""
        if self._is_open:
            self.all[-1].is_cut_off = True

    def _take(self, parts: Iterable[Part]) -> Iterator[BlockChange]:
        for part in parts:
            index = len(self.all)
            if isinstance(part, CallBegins):
                call = Block(index, BlockKind.CALL, call_id=part.call_id, name=part.name, number=part.number)
                yield from self._begin(call)
            elif part.text:
                kind = _KINDS[type(part)]
                if not self._is_open or self.all[-1].kind is not kind:
                    yield from self._begin(Block(index, kind))
                self.all[-1].text += part.text
                yield BlockChange("grew", self.all[-1], part.text)

    def _begin(self, block: Block) -> Iterator[BlockChange]:
        yield from self._end()
        self.all.append(block)
        self._is_open = True
        yield BlockChange("began", block)

    def _end(self) -> Iterator[BlockChange]:
        if self._is_open:
            self._is_open = False
            if self.all[-1].kind is BlockKind.CALL:
                self.all[-1].is_cut_off |= not is_object(self.all[-1].text)
            yield BlockChange("ended", self.all[-1])


class BlockWriter(AnswerWriter):
    """Writes an answer that consists of blocks; its stream is made of their changes."""

    def __init__(self, asked: ChatRequest, *, is_stream: bool) -> None:
        self.requests = [asked.generation]
        self.is_stream = is_stream
        self._blocks = Blocks(asked.new_parser())

    @property
    def calls_tools(self) -> bool:
        return self._blocks.calls_tools

    def collect(self, delta: Delta) -> None:
        self._blocks.add(delta)
