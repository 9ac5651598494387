"""Tools without parameters, tools that are not valid, and results without a call."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.tools import ToolFormat
from tests.proxy.conftest import Server, chat
from tests.proxy.generate.tool_calls import CHAT, HELLO, MESSAGES, TOOLS, function

CHAT_TOOL = {"messages": HELLO, "tool_choice": "required", "parallel_tool_calls": False}
MESSAGES_TOOL = {"messages": HELLO, "max_tokens": 9, "tool_choice": {"type": "tool", "name": "now"}}
EMPTY = {"type": "object", "properties": {}}
NO_PARAMETERS: list[dict[str, Any]] = [{}, {"parameters": None}, {"parameters": {}}, {"parameters": EMPTY}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (CHAT, CHAT_TOOL | {"tools": [{"type": "function", "function": {"name": "now", **given}}]})
            for given in NO_PARAMETERS
        ),
        (CHAT, {"messages": HELLO, "functions": [{"name": "now"}], "function_call": {"name": "now"}}),
        *(
            (
                "/v1/responses",
                {
                    "input": "hello",
                    "tools": [{"type": "function", "name": "now", **given}],
                    "tool_choice": {"type": "function", "name": "now"},
                },
            )
            for given in NO_PARAMETERS
        ),
        *(
            ("/v1/messages", MESSAGES_TOOL | {"tools": [{"name": "now", "input_schema": given}]})
            for given in ({}, EMPTY)
        ),
    ],
)
async def test_a_tool_without_parameters_has_none(server: Server, path: str, body: dict[str, Any]) -> None:
    """On every route an absent, null or empty list of parameters leaves a call with `{}`."""
    response = await server.post(path, {"model": "echo", **body})
    assert response.status == 200, await response.text()
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = ({"type": "function", "function": {"name": "now", "parameters": nothing}},)
    expected = grammar_of(Chat((), tools, ToolChoice(ToolUse.REQUIRED, "now")), ToolFormat.HERMES)
    assert server.engine.requests[0].sampling.grammar == expected


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        [*MESSAGES, {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        [
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": "{}"}}],
            },
        ],
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c2", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    ],
)
async def test_a_result_without_its_call_is_refused(
    server: Server, path: str, messages: list[dict[str, Any]]
) -> None:
    """As on the other routes and with OpenAI: the message is named."""
    response = await server.post(path, chat(tools=TOOLS) | {"messages": messages})
    error = (await response.json())["error"]
    number = next(number for number, message in enumerate(messages) if message["role"] == "tool")
    assert (response.status, error["param"]) == (400, f"messages[{number}].tool_call_id")
    assert "no call before it has this id" in error["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "functions": [function("f")]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [function("f")], "function_call": {"name": "g"}}, "function_call.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
async def test_what_is_no_tool_is_refused(server: Server, given: dict[str, object], param: str) -> None:
    """A wrong form is a 400 that names the field."""
    response = await server.post(CHAT, chat() | given)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
