"""An answer's parts become blocks: each ends before the next begins, and there is at least one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare.conversation.chat import Chat
from kvshare.conversation.parser import parser_for
from kvshare.conversation.tools import ToolFormat
from kvshare.engine import Delta, FinishReason
from kvshare.errors import EngineError
from proxy.generate.answer_writer import BlockChange, BlockKind, Blocks

TOOLS = ({"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},)
CALL = '<tool_call>{"name": "time", "arguments": {"zone": "UTC"}}</tool_call>'


def blocks() -> Blocks:
    return Blocks(parser_for(Chat((), tools=TOOLS), ToolFormat.HERMES))


def answered(
    text: str, cuts: list[int] | None = None, end: FinishReason = FinishReason.STOP
) -> tuple[Blocks, list[BlockChange]]:
    """The blocks of a text that comes in pieces, and all that changed."""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts or [])})
    read, changes = blocks(), []
    for start, stop in pairwise(edges):
        changes += read.add(Delta(0, text[start:stop], 1))
    changes += read.add(Delta(0, "", 0, finish_reason=end))
    return read, changes


@given(
    texts=st.lists(
        st.sampled_from(["Hello. ", "<think>Hm.</think>", CALL, "\n", "a < b "]), min_size=1, max_size=5
    ),
    cuts=st.lists(st.integers(0, 200)),
)
def test_the_changes_are_the_blocks(texts: list[str], cuts: list[int]) -> None:
    """However the text is cut, the blocks begin and end in turn, and their growth adds up to their text."""
    read, changes = answered("".join(texts), cuts)
    whole, _ = answered("".join(texts))
    assert [(block.kind, block.name, block.text) for block in read.all] == [
        (block.kind, block.name, block.text) for block in whole.all
    ]
    grown, is_open = "", -1
    for change in changes:
        if change.kind == "began":
            assert is_open == -1
            is_open, grown = change.block.index, ""
        elif change.kind == "grew":
            assert change.block.index == is_open
            grown += change.text
        else:
            assert change.block.index == is_open
            assert grown == change.block.text
            is_open = -1
    assert is_open == -1
    assert [change.block.index for change in changes if change.kind == "ended"] == list(range(len(read.all)))


def test_an_answer_without_text_has_an_empty_block() -> None:
    """Clients look at the first block."""
    read, changes = answered("")
    assert [(block.kind, block.text) for block in read.all] == [(BlockKind.TEXT, "")]
    assert [change.kind for change in changes] == ["began", "ended"]


def test_only_the_last_block_is_cut_off() -> None:
    """Where the tokens run out, the block that still grew is not complete."""
    read, _ = answered(f"Hello. {CALL[:-20]}", end=FinishReason.LENGTH)
    assert [(block.kind, block.is_cut_off) for block in read.all] == [
        (BlockKind.TEXT, False),
        (BlockKind.CALL, True),
    ]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (CALL, True),
        (f"Hello. {CALL}\n{CALL}", True),
        (CALL.removesuffix("</tool_call>"), True),
        (CALL[:-20], False),
        (f"{CALL}\n{CALL[:-20]}", False),
        ('<tool_call>{"name": "time", "arguments": [1]}</tool_call>', False),
        ('<tool_call>{"name": "time", "arguments": {"a": NaN}}</tool_call>', False),
        ('<tool_call>{"name": "time", "arguments": {"a": "\n"}}</tool_call>', False),
        ('<tool_call>{"name": "time", oops}</tool_call>', False),
        ("Hello.", False),
    ],
)
@pytest.mark.parametrize("end", FinishReason)
def test_an_answer_calls_tools_if_every_call_is_whole(text: str, calls: bool, end: FinishReason) -> None:
    """Whole is what strict parsers read as an object; another call is cut off, however the answer ended."""
    read, _ = answered(text, end=end)
    assert read.calls_tools == calls
    cut_off = [block.is_cut_off for block in read.all if block.kind is BlockKind.CALL]
    assert any(cut_off) == (bool(cut_off) and not calls)


def test_an_answer_that_has_not_ended_has_no_reason() -> None:
    """It must not pass for a finished one."""
    read = blocks()
    read.add(Delta(0, "Hello.", 1))
    with pytest.raises(EngineError):
        _ = read.finish_reason
