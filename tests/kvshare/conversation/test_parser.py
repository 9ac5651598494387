"""Answers are cut into text, thoughts and calls, whatever pieces they come in."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.conversation.chat import CallArguments, CallBegins, Chat, Text, ToolChoice, ToolUse
from kvshare.conversation.parser import joined, parser_for
from kvshare.conversation.tools import ToolFormat
from tests.kvshare.conversation.answers import CHAT, plain, read, read_plain

HERMES, LLAMA3, MISTRAL, XML = ToolFormat
ONE_CALL = replace(CHAT, parallel_tool_calls=False)
REQUIRED = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED))
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


@pytest.mark.parametrize(
    ("fmt", "text", "rows"),
    [
        (HERMES, '<tool_call>{"name": "f", "argu', [("call", 0, "f")]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "b',
            [("call", 0, "f"), ("arguments", 0, '{"a": "b')],
        ),
        (HERMES, '<tool_call>{"na', [("text", '<tool_call>{"na')]),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na',
            [("call", 0, "f"), ("arguments", 0, "{}")],
        ),
        (
            XML,
            "<tool_call><function=weather><parameter=city>Ro",
            [("call", 0, "weather"), ("arguments", 0, '{"city": "Ro')],
        ),
        (
            XML,
            "<tool_call><function=weather><parameter=days>1",
            [("call", 0, "weather"), ("arguments", 0, '{"days": 1')],
        ),
    ],
)
def test_an_answer_that_ends_inside_a_call(
    fmt: ToolFormat, text: str, rows: list[tuple[object, ...]]
) -> None:
    """What was begun stays as it is."""
    assert read_plain(fmt, text) == rows


ARGUMENTS = '{"city": "Rome"}'
TWO_CALLS = {
    "hermes": (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama 3": (
        LLAMA3,
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "mistral, list": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "mistral, names": (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}"),
    "qwen coder": (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
}


def ended(
    fmt: ToolFormat, text: str, *, chat: Chat, cut: bool
) -> tuple[list[tuple[object, ...]], str, int | None]:
    """What is read of an answer that ends with this text; its text parts; where nothing more is shown."""
    parser = parser_for(chat, fmt)
    rows = plain(joined([*parser.add(text), *parser.end(cut=cut)]))
    return rows, "".join(str(row[1]) for row in rows if row[0] == "text"), parser.hidden_from


@pytest.mark.parametrize(("fmt", "text"), TWO_CALLS.values(), ids=TWO_CALLS)
def test_the_head_of_a_call_that_was_cut_off_is_not_shown(fmt: ToolFormat, text: str) -> None:
    """
    Wherever an answer of two calls is cut, no markup is text: where calls are required whoever cut it, else
    where the model did not end it. A few characters of a first marker may be text, such as "5 <".
    """
    for end in range(len(text)):
        for cut in (False, True):
            _, shown, _ = ended(fmt, text[:end], chat=REQUIRED, cut=cut)
            assert shown == "", text[:end]
        rows, shown, hidden_from = ended(fmt, text[:end], chat=CHAT, cut=True)
        assert len(shown) < 3, text[:end]
        assert text[:end].startswith(shown)
        has_head = end > 0 and not any(row[0] == "call" for row in rows)
        assert (hidden_from == 0) == (has_head and not shown)
        if fmt is not LLAMA3:
            _, shown, hidden_from = ended(fmt, f"I look.\n{text[:end]}", chat=CHAT, cut=True)
            assert shown.removeprefix("I look.").strip() in ("", *(text[:length] for length in (1, 2)))
            assert hidden_from is None or hidden_from >= len("I look.")


def test_a_head_that_the_model_ended_itself_is_text() -> None:
    """It may have written about calls; nothing of that is lost."""
    for text in ("Models write <tool_call>", "<tool_call>{", "ends in <tool_ca"):
        assert ended(HERMES, text, chat=CHAT, cut=False) == ([("text", text)], text, None)


@pytest.mark.parametrize(
    ("text", "chat", "shown"),
    [
        ('{"name": "wea', CHAT, ""),
        ('{"name": "weather"', CHAT, ""),
        ('{"name": "weat"', CHAT, '{"name": "weat"'),
        ('{"name": "Ann', CHAT, '{"name": "Ann'),
        ('{"name": "wea', replace(CHAT, answer_schema={"type": "object"}), '{"name": "wea'),
    ],
)
def test_json_that_is_cut_off_is_text_unless_it_may_be_a_call(text: str, chat: Chat, shown: str) -> None:
    """Llama 3's calls have no marker: an object that names no tool, or that was asked for, is an answer."""
    assert ended(LLAMA3, text, chat=chat, cut=True)[1] == shown


@pytest.mark.parametrize(
    ("text", "in_reasoning", "rows"),
    [
        ("<thi", False, []),
        ("<think>Hm. </thi", False, [("thought", "Hm.")]),
        ("Hm. </thi", True, [("thought", "Hm.")]),
        ("Hm. 5 <", True, [("thought", "Hm. 5"), ("thought", " <")]),
    ],
)
def test_tags_of_thoughts_that_were_cut_off_are_not_shown(
    text: str, in_reasoning: bool, rows: list[tuple[object, ...]]
) -> None:
    """Neither as text nor as thoughts."""
    parser = parser_for(CHAT, HERMES, in_reasoning=in_reasoning)
    found = plain([*parser.add(text), *parser.end(cut=True)])
    assert [row[0] for row in found] == [row[0] for row in rows]
    assert "".join(str(row[1]) for row in found).split() == "".join(str(row[1]) for row in rows).split()


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


def test_calls_in_the_format_of_llama_3() -> None:
    """The whole answer, alone or behind the tag, several with semicolons between."""
    text = (
        '{"name": "weather", "parameters": {"city": "Rome"}}; '
        '{"type": "function", "name": "now", "parameters": {}}'
    )
    rows = [
        ("call", 0, "weather"),
        ("arguments", 0, '{"city": "Rome"}'),
        ("call", 1, "now"),
        ("arguments", 1, "{}"),
    ]
    assert read_plain(LLAMA3, text) == rows
    assert read_plain(LLAMA3, f"<|python_tag|>{text}") == rows
    assert read_plain(LLAMA3, f"\n{text}\n") == rows


@pytest.mark.parametrize(
    "text",
    [
        'Call {"name": "now", "parameters": {}}',
        '{"name": "Ann", "age": 3}',
        '{"name": "Ann"}',
        '<|python_tag|>brave_search.call(query="x")',
        "{x; y}",
    ],
)
def test_what_is_no_call_of_llama_3(text: str) -> None:
    """An object is a call only at the start, and with parameters."""
    assert read_plain(LLAMA3, text) == [("text", text)]


def test_an_answer_in_json_streams() -> None:
    """An object is held back only as long as it may be a call."""
    parser = parser_for(CHAT, LLAMA3)
    assert parser.add('{"name": "Ann", ') == []
    assert parser.add('"age"') == [Text('{"name": "Ann", "age"')]
    assert parser.add(": 3") == [Text(": 3")]


def test_calls_in_the_format_of_mistral() -> None:
    """A list of objects, or names with arguments behind them."""
    rows = [
        ("text", "Ok."),
        ("call", 0, "weather"),
        ("arguments", 0, '{"city": "Rome"}'),
        ("call", 1, "now"),
        ("arguments", 1, "{}"),
    ]
    listed = (
        '[{"name": "weather", "arguments": {"city": "Rome"}, "id": "aB3"}, {"name": "now", "arguments": {}}]'
    )
    assert read_plain(MISTRAL, f"Ok.[TOOL_CALLS] {listed}") == rows
    named = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}'
    assert read_plain(MISTRAL, f"Ok.{named}") == rows
    assert read_plain(MISTRAL, f"Ok.{named.replace('[ARGS]', '')}") == rows
    assert read_plain(MISTRAL, f"Ok.{named.replace('[ARGS]', '[CALL_ID]aB3[ARGS]')}") == rows
    assert read_plain(MISTRAL, "[TOOL_CALLS][] [TOOL_CALLS] no") == [
        ("text", "[TOOL_CALLS][] [TOOL_CALLS] no")
    ]


def test_calls_in_the_format_of_qwen_coder() -> None:
    """Values become JSON of the types that the schema gives; what has no other type is a string."""
    text = (
        "Ok.\n<tool_call>\n<function=weather>\n"
        '<parameter=city>\nNew "York"\n\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n"
        "<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=place>\n{"x": 1.50}\n</parameter>\n'
        "<parameter=unit>\n5\n</parameter>\n"
        "<parameter=other>\n5\n</parameter>\n"
        "</function>\n</tool_call>\n<function=now>\n</function>"
    )
    rows = read_plain(XML, text)
    assert rows[:2] == [("text", "Ok."), ("call", 0, "weather")]
    assert rows[3:] == [("call", 1, "now"), ("arguments", 1, "{}")]
    arguments = rows[2][2]
    assert isinstance(arguments, str)
    assert '"x": 1.50' in arguments
    assert json.loads(arguments) == {
        "city": 'New "York"\n',
        "days": 3,
        "hourly": True,
        "place": {"x": 1.5},
        "unit": "5",
        "other": "5",
    }


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("days", "three", "three"),
        ("days", "1.5", "1.5"),
        ("days", "NaN", "NaN"),
        ("hourly", "None", None),
        ("hourly", "maybe", "maybe"),
        ("place", "[1]", "[1]"),
        ("place", '{"x": NaN}', '{"x": NaN}'),
        ("place", "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_value_of_another_type_is_a_string(key: str, value: str, expected: object) -> None:
    """No value is lost because it does not fit."""
    text = f"<function=weather><parameter={key}>{value}</parameter></function>"
    (_, (_, _, arguments)) = plain(read(XML, [text]))
    assert isinstance(arguments, str)
    assert json.loads(arguments) == {key: expected}


def test_parameters_stream_one_by_one() -> None:
    """Each goes out when its closing tag is there."""
    parser = parser_for(CHAT, XML)
    parser.add("<tool_call>\n<function=weather>\n<parameter=city>\nRo")
    assert parser.add("me\n</parameter>") == [CallArguments(0, '{"city": "Rome"')]
    assert parser.add("\n<parameter=days>\n3\n</parameter>") == [CallArguments(0, ', "days": 3')]
    assert parser.add("\n</function>") == [CallArguments(0, "}")]


@pytest.mark.parametrize(
    "text", ["<tool_call>\n<fun>", "<tool_call><function=>", "<function=a\nb>", "<tool_call>{}</tool_call>"]
)
def test_what_is_no_call_of_qwen_coder(text: str) -> None:
    """Nothing of a malformed call is lost."""
    assert read_plain(XML, text) == [("text", text)]


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
