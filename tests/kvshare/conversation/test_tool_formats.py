"""Calls in the formats of Llama 3, Mistral and Qwen Coder, and answers in JSON."""

import json

import pytest

from kvshare.conversation.chat import CallArguments, Text
from kvshare.conversation.parser import parser_for
from kvshare.conversation.tools import ToolFormat
from tests.kvshare.conversation.answers import CHAT, plain, read, read_plain

HERMES, LLAMA3, MISTRAL, XML = ToolFormat


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
