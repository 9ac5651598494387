"""The parser over random answers: how they are cut makes no difference, and nothing is lost."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.conversation.tools import ToolFormat
from tests.kvshare.conversation.answers import plain, read

HERMES, LLAMA3, MISTRAL, XML = ToolFormat
FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<function=weather>",
    "</function>",
    "<parameter=city>",
    "<parameter=days>",
    "</parameter>",
    '{"name": "now", "arguments": {}}',
    '{"name": "weather", "parameters": {"city": "Rome", "days": [1, "\\"}"]}}',
    '{"arguments": ',
    '"name": "',
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    ";",
    " ",
    "\n",
    "<",
    "now",
    "ü",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@settings(max_examples=500)
@given(data=st.data(), fmt=st.sampled_from(ToolFormat), text=TEXTS, in_reasoning=st.booleans())
def test_pieces_make_no_difference(
    data: st.DataObject, fmt: ToolFormat, text: str, in_reasoning: bool
) -> None:
    """Whatever pieces a text comes in, what is read from it is the same."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = plain(read(fmt, [text], in_reasoning=in_reasoning))
    assert plain(read(fmt, parts, in_reasoning=in_reasoning)) == expected
    assert plain(read(fmt, text, in_reasoning=in_reasoning)) == expected


@settings(max_examples=500)
@given(fmt=st.sampled_from(ToolFormat), text=TEXTS)
def test_where_nothing_is_called_nothing_is_lost(fmt: ToolFormat, text: str) -> None:
    """Without calls and thoughts the text is as it was, to the last space."""
    rows = plain(read(fmt, [text]))
    if all(row[0] == "text" for row in rows) and not text.lstrip().startswith("<think>"):
        assert "".join(str(row[1]) for row in rows) == text


@given(st.text(), st.sampled_from(ToolFormat))
def test_calls_have_numbers_in_order(text: str, fmt: ToolFormat) -> None:
    """Arguments belong to the last call that has begun."""
    calls = '<tool_call>{"name": "now"}</tool_call>' if fmt is HERMES else "<function=now></function>"
    begun = 0
    for row in plain(read(fmt, [calls + text + calls])):
        if row[0] == "call":
            assert row[1] == begun
            begun += 1
        elif row[0] == "arguments":
            assert row[1] == begun - 1
