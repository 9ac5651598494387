"""The output items of a response, and the events of a stream in which they grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.generate.blocks import Block, BlockKind, Change

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}
_EVENTS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
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
