"""Tools of OpenAI's Responses API: choices, calls, results."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.conversation.chat import ToolChoice, ToolUse
from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.responses_api import ASK, RESPONSES, TOOLS, TWO, events_of


async def test_the_events_of_calls() -> None:
    """The arguments of a call come as they are written, in an item of its own."""
    async with running_server(Behaviour(says=TWO)) as server:
        events = await events_of(server, tools=TOOLS)
    for index in (0, 1):
        own = [event for event in events if event.get("output_index") == index]
        added, *deltas, written, done = own
        assert added["item"]["arguments"] == ""
        assert {event["type"] for event in deltas} == {"response.function_call_arguments.delta"}
        assert len(deltas) > 3
        assert "".join(event["delta"] for event in deltas) == written["arguments"]
        assert done["item"]["arguments"] == written["arguments"]
        for key in ("id", "call_id", "name"):
            assert done["item"][key] == added["item"][key]


async def test_two_rounds_of_tools() -> None:
    """Output and results sent back as input become the template's messages."""
    async with running_server(Behaviour(says=f"I look.\n{TWO}")) as server, server.client() as client:
        first = await client.responses.create(**ASK, tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{call.name} is fine"}
            for call in calls
        ]
        server.engine.behaviour.says = "It is fine."
        history: list[Any] = [{"role": "user", "content": "hello"}, *first.output, *outputs]
        second = await client.responses.create(model="echo", input=history, tools=TOOLS)
    assert second.output_text == "It is fine."
    user, assistant, weather, time = server.engine.chats[-1].messages
    assert (user["role"], user["content"]) == ("user", "hello")
    assert assistant["content"].strip() == "I look."
    assert [call["function"] for call in assistant["tool_calls"]] == [
        {"name": "weather", "arguments": {"city": "Paris"}},
        {"name": "time", "arguments": {"city": "Lyon"}},
    ]
    assert (weather["role"], weather["name"], weather["content"]) == ("tool", "weather", "weather is fine")
    assert (time["tool_call_id"], time["content"]) == (calls[1].call_id, "time is fine")


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        ("none", ToolChoice(ToolUse.NONE), ["weather", "time"]),
        ("required", ToolChoice(ToolUse.REQUIRED), ["weather", "time"]),
        ({"type": "function", "name": "time"}, ToolChoice(ToolUse.REQUIRED, "time"), ["weather", "time"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
            ToolChoice(),
            ["time"],
        ),
    ],
)
async def test_the_choice_of_tools(
    server: Server, choice: object, expected: ToolChoice, names: list[str]
) -> None:
    """Each choice becomes the chat's, and the response repeats it."""
    body = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    response = await server.post(RESPONSES, body)
    assert response.status == 200
    assert (await response.json())["tool_choice"] == choice
    (chat,) = server.engine.chats
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, False)
    assert [tool["function"]["name"] for tool in chat.tools] == names
    assert chat.tools[-1]["function"]["parameters"] == TOOLS[-1]["parameters"]


async def test_tools_are_as_in_chats(server: Server) -> None:
    """A flat tool becomes a chat's; what is not given is not there, strict only where it is asked for."""
    tools = [{"type": "function", "name": "time"}, {**TOOLS[0], "strict": True, "defer_loading": False}]
    assert (await server.post(RESPONSES, {**ASK, "tools": tools})).status == 200
    time, weather = (tool["function"] for tool in server.engine.chats[0].tools)
    assert time == {"name": "time", "parameters": {"type": "object", "properties": {}}}
    assert weather == {key: tools[1][key] for key in ("name", "description", "parameters", "strict")}
