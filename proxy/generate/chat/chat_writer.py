"""chat.completion and chat.completion.chunk: text, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvshare.engine import Delta, FinishReason, TokenLogprob
from proxy.generate.answer_writer import BlockChange, BlockKind, Blocks
from proxy.generate.chat.bodies import ChatBody
from proxy.generate.chat.completion_writer import ChoiceWriter, Content, Piece, WrittenChoice, finite
from proxy.generate.requests import ChatRequest

_THOUGHTS = "<think>"  # how they begin where a model writes them by itself


class ChatWriter(ChoiceWriter):
    """
    Writes the answer of POST /v1/chat/completions.

    Where an answer may hold more than text, each choice consists of blocks. Else its text goes out as it
    comes, unless it begins as thoughts do. In the older API of functions, an answer has at most one call;
    further ones are left out.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, body: ChatBody) -> None:
        first = {"delta": {"role": "assistant", "content": ""}}
        super().__init__([asked.generation], body, asked.model, [first] * body.num_choices)
        self._new_parser = asked.new_parser
        self._has_functions = bool(body.functions)  # of the older API
        for choice in self.choices:
            choice.blocks = None if asked.is_plain else Blocks(asked.new_parser())

    @property
    def calls_tools(self) -> bool:
        return any(choice.calls_tools for choice in self.choices)

    def _whole(self, index: int) -> Piece:
        choice = self.choices[index]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if (read := self._blocks(choice, choice.text)) is None:
            return {"message": message}
        read.add(Delta(index, choice.text, 0, finish_reason=choice.finish_reason, stop=choice.stop))
        text, thought = read.text_of(BlockKind.TEXT), read.text_of(BlockKind.REASONING)
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in read.all
            if call.kind is BlockKind.CALL
        ]
        message["content"] = None if calls and not text else text
        if thought:
            message |= _reasoning(thought)
        if calls:
            first = calls[0]["function"]
            message |= {"function_call": first} if self._has_functions else {"tool_calls": calls}
        return {"message": message}

    def _blocks(self, choice: WrittenChoice, text: str) -> Blocks | None:
        """Return the blocks of a choice that goes on with `text`; None if it is plain text."""
        if not choice.has_begun and text and not text.isspace():
            choice.has_begun = True
            if choice.blocks is None and _THOUGHTS.startswith(text.lstrip()[: len(_THOUGHTS)]):
                choice.blocks = Blocks(self._new_parser())
        return choice.blocks

    def _contents(self, delta: Delta) -> list[Content]:
        choice = self.choices[delta.choice]
        blocks = self._blocks(choice, delta.text)
        if blocks is None:
            choice.num_before_blocks += len(delta.text)
            return super()._contents(delta)
        choice.unsent.extend(delta.logprobs)
        pieces = [piece for change in blocks.add(delta) if (piece := self._piece(change))]
        tokens = self._sendable(choice, blocks, ended=delta.finish_reason is not None, said=bool(pieces))
        if not pieces and tokens:
            pieces = [{"content": ""}]
        return [({"delta": piece}, None if number else tokens) for number, piece in enumerate(pieces)]

    def _sendable(
        self, choice: WrittenChoice, blocks: Blocks, *, ended: bool, said: bool
    ) -> list[TokenLogprob]:
        """The tokens that go out with what is said: those of text that is read; at the end all others."""
        if not ended and not said:
            return []
        num_read = choice.num_before_blocks + blocks.num_read
        tokens = [token for token in choice.unsent if ended or token.offset < num_read]
        choice.unsent = choice.unsent[len(tokens) :]
        return choice.shown(tokens)

    def _piece(self, change: BlockChange) -> Piece:
        """A change as a delta says it; empty where it says nothing."""
        block, begins = change.block, change.kind == "began"
        if change.kind == "ended" or (begins and block.kind is not BlockKind.CALL):
            return {}
        if block.kind is BlockKind.TEXT:
            return {"content": change.text}
        if block.kind is BlockKind.REASONING:
            return _reasoning(change.text)
        function = {"name": block.name, "arguments": ""} if begins else {"arguments": change.text}
        if self._has_functions:
            return {} if block.number else {"function_call": function}
        head = {"id": block.call_id, "type": "function"} if begins else {}
        return {"tool_calls": [{"index": block.number, **head, "function": function}]}

    def _part(self, text: str | None) -> Piece:
        return {"delta": {} if text is None else {"content": text}}

    def _finish_reason(self, choice: WrittenChoice) -> str | None:
        if choice.finish_reason is FinishReason.STOP and choice.calls_tools:
            return "function_call" if self._has_functions else "tool_calls"
        return choice.finish_reason

    def _logprobs(self, choice: WrittenChoice, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [{**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens]
        return {"content": content, "refusal": None}


def _reasoning(text: str) -> dict[str, str]:
    """Write the reasoning under DeepSeek's name and under vLLM's: clients know one of them."""
    return {"reasoning_content": text, "reasoning": text}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.raw)}
