"""OpenAI's messages become those that templates read; what is wrong is named."""

from typing import Any

import pytest

from kvshare.conversation.history import template_messages
from kvshare.errors import RequestError


def call(arguments: object = '{"city": "Rome"}', **more: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}} | more


def assistant(*calls: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)} | more


def test_a_chat_with_tools() -> None:
    """Each role in the shape that templates read."""
    read = template_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "is it?"}],
                "name": "ann",
            },
            assistant(call()),
            {"role": "tool", "tool_call_id": "c1", "content": "12 °C"},
            {"role": "tool", "tool_call_id": "c2", "content": "rain", "name": "sky"},
            {"role": "assistant", "content": "Wet.", "refusal": None, "tool_calls": None, "audio": None},
        ]
    )
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert read == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "12 °C", "tool_call_id": "c1", "name": "weather"},
        {"role": "tool", "content": "rain", "tool_call_id": "c2", "name": "sky"},
        {"role": "assistant", "content": "Wet."},
    )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        (" {} ", {}),
        ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a":' * 100_000, '{"a":' * 100_000),
    ],
)
def test_arguments(text: str, arguments: object) -> None:
    """An object is parsed; what is none stays the text that it was."""
    (read,) = template_messages([assistant(call(text))])
    assert read["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "assistant", "refusal": "No."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ],
)
def test_a_refusal_is_what_was_said(message: dict[str, Any]) -> None:
    """Where an assistant refused, that is its content."""
    assert template_messages([message]) == ({"role": "assistant", "content": "No."},)


@pytest.mark.parametrize(
    ("message", "param", "found", "expected"),
    [
        ({"content": "a"}, "role", "nothing", "one of system, developer, user, assistant, tool"),
        ({"role": "bot", "content": "a"}, "role", "'bot'", "one of"),
        ({"role": ["user"], "content": "a"}, "role", "a list", "one of"),
        ({"role": "user"}, "content", "nothing", "a string or a list of text parts"),
        ({"role": "tool", "tool_call_id": "c1", "content": None}, "content", "nothing", "a string"),
        ({"role": "user", "content": 3}, "content", "a number", "a string"),
        ({"role": "user", "content": ["a"]}, "content[0]", "a string", 'an object with a "type"'),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "content[0].type",
            "'image_url'",
            '"text": this server reads no other content',
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "nothing", "a string"),
        ({"role": "user", "content": "a", "name": True}, "name", "a boolean", "a string"),
        ({"role": "tool", "content": "a"}, "tool_call_id", "nothing", "a string"),
        (assistant(tool_calls={"id": "c1"}), "tool_calls", "an object", "a list of calls"),
        (assistant("c1"), "tool_calls[0]", "a string", 'an object with "id" and "function"'),
        (assistant(call(type="custom")), "tool_calls[0].type", "'custom'", '"function"'),
        (assistant(call(), call(id=None)), "tool_calls[1].id", "nothing", "a string"),
        (assistant(call(function=None)), "tool_calls[0].function", "nothing", "an object"),
        (assistant(call(function={"name": 1})), "tool_calls[0].function.name", "a number", "a string"),
        (assistant(call({})), "tool_calls[0].function.arguments", "an object", "a string"),
    ],
)
def test_what_is_wrong_is_named(message: dict[str, Any], param: str, found: str, expected: str) -> None:
    """The field, what was found, what is expected; no text of the chat."""
    with pytest.raises(RequestError) as error:
        template_messages([{"role": "user", "content": "Hi"}, message])
    assert error.value.param == f"messages[1].{param}"
    assert str(error.value).startswith(f"'messages[1].{param}': found {found}; expected {expected}")


def test_no_text_of_a_chat_stands_in_an_error() -> None:
    """Only a short name of a role or a type is repeated."""
    secret = "the patient's name is Ann " * 3
    for message in ({"role": secret}, {"role": "user", "content": [secret]}, assistant(tool_calls=secret)):
        with pytest.raises(RequestError) as error:
            template_messages([message])
        assert "patient" not in str(error.value)
