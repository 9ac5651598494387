"""Text and calls of any format, as they stream: what is text, and what a call."""

import re
from dataclasses import replace

import pytest

from kvshare.conversation.chat import CallArguments, CallBegins, Chat, Text, ToolChoice, ToolUse
from kvshare.conversation.parser import parser_for
from kvshare.conversation.tools import ToolFormat
from tests.kvshare.conversation.answers import CHAT, read, read_plain

HERMES, LLAMA3, MISTRAL, XML = ToolFormat
ONE_CALL = replace(CHAT, parallel_tool_calls=False)
NO_CALLS = replace(CHAT, tool_choice=ToolChoice(ToolUse.NONE))


@pytest.mark.parametrize("fmt", ToolFormat)
def test_plain_text_goes_out_at_once(fmt: ToolFormat) -> None:
    """Nothing is held back of text that cannot begin a call."""
    parser = parser_for(CHAT, fmt)
    for text in ("It is", " 5 < 6", " and", " [1]", " fine."):
        assert parser.add(text) == [Text(text)]
    assert parser.end() == []
    assert parser.num_calls == 0


@pytest.mark.parametrize("chat", [NO_CALLS, Chat(CHAT.messages)])
@pytest.mark.parametrize("fmt", ToolFormat)
def test_where_nothing_may_be_called_all_is_text(fmt: ToolFormat, chat: Chat) -> None:
    """Markers and white space pass at once."""
    parser = parser_for(chat, fmt)
    for text in (' {"name": "weather", "parameters": {}}\n', "<tool_call>\n", "[TOOL_CALLS]", "<", "\n "):
        assert parser.add(text) == [Text(text)]
    assert parser.end() == []


def test_a_call_in_the_format_of_hermes() -> None:
    """Text in front, two calls; white space around them is dropped, arguments stay as they were written."""
    text = (
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city":  "}\\"{"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    )
    assert read_plain(HERMES, text) == [
        ("text", "Let me see."),
        ("call", 0, "weather"),
        ("arguments", 0, '{"city":  "}\\"{"}'),
        ("call", 1, "now"),
        ("arguments", 1, "{}"),
    ]


def test_a_call_streams() -> None:
    """It begins with the name's closing quote; arguments go out as they come and end at their bracket."""
    parser = parser_for(CHAT, HERMES)
    assert parser.add('Ok<tool_call>{"name": "wea') == [Text("Ok")]
    (begins,) = parser.add('ther"')
    assert isinstance(begins, CallBegins)
    assert (begins.number, begins.name) == (0, "weather")
    assert re.fullmatch("call_[0-9a-f]{24}", begins.call_id)
    assert parser.num_calls == 1
    assert parser.add(', "arguments": {"ci') == [CallArguments(0, '{"ci')]
    assert parser.add('ty": "Rome"}}') == [CallArguments(0, 'ty": "Rome"}')]
    assert parser.add("</tool_call>") == []
    assert parser.end() == []


def test_ids_differ() -> None:
    """Each call has its own id."""
    call = '<tool_call>{"name": "now"}</tool_call>'
    begun = [part for part in read(HERMES, [call * 3]) if isinstance(part, CallBegins)]
    assert len({part.call_id for part in begun}) == 3


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"arguments": {"a": [1, {"b": "]"}]}, "name": "f"}', '{"a": [1, {"b": "]"}]}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f"}', "{}"),
        ('{"id": 7, "name": "f", "x": {"name": "g"}, "parameters": {"a": 1}, "y": []}', '{"a": 1}'),
        ('{"name": "f", "arguments": {"a": 1}', '{"a": 1}'),
    ],
)
def test_shapes_of_calls(call: str, arguments: str) -> None:
    """Fields in any order, arguments as a string, none, other fields, the last bracket forgotten."""
    expected = [("call", 0, "f"), ("arguments", 0, arguments), ("text", " End.")]
    assert read_plain(HERMES, f"<tool_call>{call}</tool_call> End.") == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>weather</tool_call>",
        '<tool_call>\n{"city": "Rome"}\n</tool_call> so',
        '<tool_call>{"name": 3, "arguments": {}}',
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        "<tool_call>{name: weather}",
        "<tool_call>{} <tool_call>[]",
        "ends in <tool_ca",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Nothing of a malformed call is lost."""
    assert read_plain(HERMES, text) == [("text", text)]


def test_a_good_call_inside_a_bad_one_is_read() -> None:
    """Reading goes on where it found that a marker begins no call."""
    text = '<tool_call>oops <tool_call>{"name": "now"}</tool_call> and on'
    assert read_plain(HERMES, text) == [
        ("text", "<tool_call>oops"),
        ("call", 0, "now"),
        ("arguments", 0, "{}"),
        ("text", " and on"),
    ]
    inner = '<tool_call>{"a": [<tool_call>{"name": "now"}</tool_call>]}</tool_call>'
    assert read_plain(HERMES, inner) == [("text", inner)]


def test_a_call_that_breaks_after_its_name() -> None:
    """What was begun cannot be taken back; the rest is text."""
    assert read_plain(HERMES, '<tool_call>{"name": "f", oops}') == [("call", 0, "f"), ("text", ", oops}")]
    text = '<tool_call>{"name": "f", "arguments": {"a": [}]}}'
    assert read_plain(HERMES, text) == [("call", 0, "f"), ("arguments", 0, '{"a": ['), ("text", "}]}}")]


def test_only_the_first_call_where_calls_are_not_parallel() -> None:
    """All behind it is dropped."""
    text = 'Ok <tool_call>{"name": "now"}</tool_call> text <tool_call>{"name": "weather"}</tool_call> more'
    assert read_plain(HERMES, text, chat=ONE_CALL) == [
        ("text", "Ok"),
        ("call", 0, "now"),
        ("arguments", 0, "{}"),
    ]
    parser = parser_for(ONE_CALL, HERMES)
    parser.add(text)
    assert parser.num_calls == 1


def test_unknown_tools_are_called_too() -> None:
    """Whether a tool exists is for the caller to say."""
    text = '<tool_call>{"name": "rm", "arguments": {"f": 1}}</tool_call>'
    assert read_plain(HERMES, text) == [("call", 0, "rm"), ("arguments", 0, '{"f": 1}')]


@pytest.mark.parametrize("chat", [CHAT, NO_CALLS])
@pytest.mark.parametrize("fmt", ToolFormat)
def test_thoughts_come_first(fmt: ToolFormat, chat: Chat) -> None:
    """They stand between tags, or the prompt has opened them; white space around them is dropped."""
    rows = [("thought", "Is <b> it\n\nfine?"), ("text", "Yes. ")]
    assert read_plain(fmt, "<think>\nIs <b> it\n\nfine?\n</think>\n\nYes. ", chat=chat) == rows
    assert read_plain(fmt, "Is <b> it\n\nfine?\n</think>\n\nYes. ", chat=chat, in_reasoning=True) == rows
    assert read_plain(fmt, "<think>\n\n</think>\n\nYes. ", chat=chat) == [("text", "Yes. ")]
    assert read_plain(fmt, "<think>Hm, ", chat=chat) == [("thought", "Hm,")]
    later = "So <think>no</think>"
    assert read_plain(fmt, later, chat=chat) == [("text", later)]


def test_an_answer_that_goes_on_does_not_begin_with_thoughts() -> None:
    """The tag is text where the answer continues a message."""
    chat = replace(NO_CALLS, continue_final_message=True)
    assert read_plain(HERMES, "<think>a</think>", chat=chat) == [("text", "<think>a</think>")]


def test_a_call_behind_thoughts() -> None:
    """What is thought of calling is not called."""
    text = '<think>I <tool_call>{"name": "now"}</tool_call></think>\n<tool_call>{"name": "now"}</tool_call>'
    assert read_plain(HERMES, text) == [
        ("thought", 'I <tool_call>{"name": "now"}</tool_call>'),
        ("call", 0, "now"),
        ("arguments", 0, "{}"),
    ]
