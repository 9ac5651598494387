"""Tools of Anthropic's Messages API: choices, calls, results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshare.conversation.chat import ToolChoice, ToolUse
from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.messages_api import ASK, MESSAGES, ONE, TOOLS, TWO, text_of, use_of


async def test_arguments_stream_in_pieces() -> None:
    """The input of a tool comes as it is written, and its pieces are the JSON text of it."""
    async with running_server(Behaviour(says=ONE)) as server, server.anthropic() as client:
        stream = await client.messages.create(**ASK, tools=TOOLS, stream=True)
        events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert len(deltas) > 3
    pieces = [delta.partial_json for delta in deltas if delta.type == "input_json_delta"]
    assert len(pieces) == len(deltas)
    assert json.loads("".join(pieces)) == {"city": "Paris"}


async def test_two_rounds_of_tools() -> None:
    """A tool's results come back as the template's tool messages, with the names of the tools."""
    async with running_server(Behaviour(says=TWO)) as server, server.anthropic() as client:
        first = await client.messages.create(**ASK, tools=TOOLS)
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "fine"}]}
            for use in map(use_of, first.content)
        ]
        results[1] |= {"is_error": True, "content": "no clock"}
        server.engine.behaviour.says = "It is fine."
        history = [*ASK["messages"], {"role": "assistant", "content": first.content}]
        last = {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}
        second = await client.messages.create(**{**ASK, "messages": [*history, last]}, tools=TOOLS)
    assert text_of(second.content[0]) == "It is fine."
    assistant, weather, time, user = server.engine.chats[-1].messages[1:]
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "time", "arguments": {"city": "Lyon"}},
    ]
    assert (weather["role"], weather["name"], weather["content"]) == ("tool", "weather", "fine")
    assert weather["tool_call_id"] == assistant["tool_calls"][0]["id"]
    assert (time["name"], time["content"]) == ("time", "Error: no clock")
    assert (user["role"], user["content"]) == ("user", "And?")


@pytest.mark.parametrize(
    ("given", "expected", "parallel"),
    [
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice(ToolUse.REQUIRED), False),
        ({"type": "tool", "name": "time"}, ToolChoice(ToolUse.REQUIRED, "time"), True),
        ({"type": "none"}, ToolChoice(ToolUse.NONE), True),
    ],
)
async def test_the_choice_of_tools(
    server: Server, given: dict[str, Any], expected: ToolChoice, parallel: bool
) -> None:
    """Each choice becomes the chat's."""
    response = await server.post(MESSAGES, {**ASK, "tools": TOOLS, "tool_choice": given})
    assert response.status == 200
    (chat,) = server.engine.chats
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)
    assert [tool["function"]["name"] for tool in chat.tools] == ["weather", "time"]
    assert chat.tools[0]["function"]["parameters"] == TOOLS[0]["input_schema"]


async def test_a_call_that_is_cut_off() -> None:
    """Whole and streamed it has what is there of its input, and says that tokens ran out."""
    body = {**ASK, "tools": TOOLS, "max_tokens": len(ONE) - 16}
    async with running_server(Behaviour(says=ONE)) as server, server.anthropic() as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            streamed = await stream.get_final_message()
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert use_of(whole.content[0]).input == use_of(streamed.content[0]).input


@pytest.mark.parametrize("number", ["1e400", "-1e400", "2.5E+999"])
async def test_a_number_beyond_all_floats_is_null(number: str) -> None:
    """As JSON has no infinity, and an answer must be JSON."""
    says = ONE.replace('"Paris"', f'{{"at": [{number}, 1]}}')
    body = {**ASK, "tools": TOOLS}
    async with running_server(Behaviour(says=says)) as server:
        response = await server.http.post(f"{server.url}/v1/messages", json=body)
        text = await response.text()
    assert json.loads(text, parse_constant=pytest.fail)["content"][0]["input"] == {"city": {"at": [None, 1]}}
