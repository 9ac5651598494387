"""Requests and answers of OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Any

from tests.proxy.conftest import Server

RESPONSES = "/v1/responses"
ASK: dict[str, Any] = {"model": "echo", "input": "hello"}


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "name": name, "description": f"The {name}", "parameters": schema}


def call_text(name: str, city: str) -> str:
    """A call as the fake engine's model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'city': city}})}\n</tool_call>"


TOOLS: list[Any] = [tool("weather"), tool("time")]  # without `strict`, which the client's type asks for
ONE = call_text("weather", "Paris")
TWO = f"{ONE}\n{call_text('time', 'Lyon')}"


async def events_of(server: Server, **extra: object) -> list[dict[str, Any]]:
    """The events of a stream, whose frames are checked."""
    response = await server.post(RESPONSES, {**ASK, **extra, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *frames, end = (await response.text()).split("\n\n")
    assert end == ""
    events = []
    for name, data in (frame.split("\n") for frame in frames):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events
