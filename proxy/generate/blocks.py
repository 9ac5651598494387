"""
An answer as blocks, as the Messages and the Responses API write it: text, thoughts and calls, in order.

A block grows until the next begins; the stream of both APIs is made of these changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvshare.conversation.parser import AnswerParser
from kvshare.conversation.parts import CallArguments, CallBegins, Part, Reasoning, Text
from kvshare.engines.base import Delta, FinishReason
from kvshare.errors import EngineError
from proxy.generate.answer import Answer
from proxy.generate.requests import ChatRequest


class BlockKind(StrEnum):
    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """`text` is what is said or thought, or the JSON text of a call's arguments."""

    index: int  # in the answer
    kind: BlockKind
    text: str = ""
    call_id: str = ""
    name: str = ""  # of the tool
    is_cut_off: bool = False  # the answer ended in it for want of tokens, or by an error


@dataclass(frozen=True, slots=True)
class Change:
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
        """Raises EngineError for an answer without an end: clients take that for success."""
        if self._finish_reason is None:
            raise EngineError("The engine ended the answer without saying why.")
        return self._finish_reason

    @property
    def has_calls(self) -> bool:
        return any(block.kind is BlockKind.CALL for block in self.all)

    def add(self, delta: Delta) -> list[Change]:
        """What a delta changes. The last delta, which has a finish reason, ends the last block."""
        changes = list(self._take(self._parser.add(delta.text)))
        if delta.finish_reason is not None:
            self._finish_reason, self.stop = delta.finish_reason, delta.stop
            changes += self._take(self._parser.end())
            if not self.all:
                changes += self._begin(BlockKind.TEXT)
            if delta.finish_reason is FinishReason.LENGTH:
                self.cut_off()
            changes += self._end()
        if self.all and self.all[-1].kind is BlockKind.REASONING:
            self.num_reasoning_tokens += delta.num_tokens
        return changes

    def cut_off(self) -> None:
        """The answer ends here, whatever else it would have said."""
        if self._is_open:
            self.all[-1].is_cut_off = True

    def _take(self, parts: Iterable[Part]) -> Iterator[Change]:
        for part in parts:
            if isinstance(part, CallBegins):
                yield from self._begin(BlockKind.CALL, call_id=part.call_id, name=part.name)
            elif part.text:
                kind = _KINDS[type(part)]
                if not self._is_open or self.all[-1].kind is not kind:
                    yield from self._begin(kind)
                self.all[-1].text += part.text
                yield Change("grew", self.all[-1], part.text)

    def _begin(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._end()
        self.all.append(Block(len(self.all), kind, call_id=call_id, name=name))
        self._is_open = True
        yield Change("began", self.all[-1])

    def _end(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield Change("ended", self.all[-1])


class BlockAnswer(Answer):
    """An answer that consists of blocks; its stream is made of their changes."""

    def __init__(self, asked: ChatRequest, *, is_stream: bool) -> None:
        self.requests = [asked.generation]
        self.is_stream = is_stream
        self._blocks = Blocks(asked.new_parser())

    @property
    def has_calls(self) -> bool:
        return self._blocks.has_calls

    def collect(self, delta: Delta) -> None:
        self._blocks.add(delta)


_KINDS: dict[type[Part], BlockKind] = {
    Text: BlockKind.TEXT,
    Reasoning: BlockKind.REASONING,
    CallArguments: BlockKind.CALL,
}
