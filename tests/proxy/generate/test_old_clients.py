"""Clients that write functions instead of tools, and messages of old APIs."""

from __future__ import annotations

import json

from openai.types.chat import (
    ChatCompletionMessageParam,
)
from openai.types.chat.chat_completion_assistant_message_param import FunctionCall

from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.tool_calls import CHAT, MESSAGES, ONE, function


async def test_functions_of_old_clients() -> None:
    """`functions` are answered by one `function_call`, whole and in a stream."""
    body = chat(functions=[function("weather"), function("time")], function_call="auto")
    async with running_server(Behaviour(says=ONE)) as server:
        document = await (await server.post(CHAT, body)).json()
        stream = await (await server.post(CHAT, body | {"stream": True})).text()
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "weather"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"city": "Paris"}
    assert "tool_calls" not in choice["message"]
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["weather"]
    assert json.loads("".join(delta.get("arguments", "") for delta in deltas)) == {"city": "Paris"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_messages_of_old_clients(server: Server) -> None:
    """A function's call and its result are a tool's, by the same id."""
    call: FunctionCall = {"name": "weather", "arguments": "{}"}
    messages: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    response = await server.post(CHAT, chat(functions=[function("weather")]) | {"messages": messages})
    assert response.status == 200
    (seen,) = server.engine.chats
    assert not seen.parallel_tool_calls
    _, assistant, result = seen.messages
    (called,) = assistant["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "weather", "rain")
    assert result["tool_call_id"] == called["id"]
